"""Bug operators: what is found, where, and what is left alone."""

import pytest

from farm.suites.operators import KINDS, Mutation, mutations


def changes(source: str) -> list[tuple[str, str, str]]:
    return [(m.kind, m.old, m.new) for m in mutations(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a + b", [("arith", "+", "-")]),
        ("a - b", [("arith", "-", "+")]),
        ("a * b", [("arith", "*", "+")]),
        ("a // b", [("arith", "//", "*")]),
        ("a % b", [("arith", "%", "//")]),
        ("a += b", [("augment", "+=", "-=")]),
        ("a -= b", [("augment", "-=", "+=")]),
        ("a < b", [("flip", "<", ">"), ("strict", "<", "<=")]),
        ("a >= b", [("flip", ">=", "<="), ("strict", ">=", ">")]),
        ("a == b", [("equal", "==", "!=")]),
        ("a in b", [("member", "in", "not in")]),
        ("a not in b", [("member", "not in", "in")]),
        ("a is not b", [("member", "is not", "is")]),
        ("a and b and c", [("logic", "and", "or"), ("logic", "and", "or")]),
        ("not a", [("negate", "not ", "")]),
        ("f(9)", [("number", "9", "10")]),
        ("f(True)", [("truth", "True", "False")]),
        ("min(a)", [("call", "min", "max")]),
        ("any(a)", [("call", "any", "all")]),
    ],
)
def test_each_operator(source: str, expected: list[tuple[str, str, str]]) -> None:
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "a ** b",
        "a / b",
        "a @ b",
        "a *= b",
        "f(0x10, 1_000, 1000, 1.5, 2j, None, 'x + 1', b'1')",
        "not(a)",
        "not  a",
        "f(0x0, 00, 0b0)",
        "(min)(a)",
        "x.min(a)",
        "f'{a + b} {1}'",
        "a \\\n + b",
        "# a + b",
        "",
    ],
)
def test_left_alone(source: str) -> None:
    assert changes(source) == []


def test_every_kind_can_be_found() -> None:
    source = "def f(a, b):\n    a += 1\n    return not any(a) and a in b or a < b == min(a + b, True)\n"
    assert {m.kind for m in mutations(source)} == set(KINDS)


def test_kinds_are_filtered() -> None:
    assert [m.kind for m in mutations("a + b < c", kinds=("arith",))] == ["arith"]


def test_place_and_function() -> None:
    source = "x = 1\n\n\ndef outer():\n    def inner():\n        return y - 2\n    return inner\n"
    found = {(m.kind, m.line, m.column, m.function) for m in mutations(source)}
    assert found == {("number", 1, 4, ""), ("arith", 6, 17, "inner"), ("number", 6, 19, "inner")}


def test_parentheses_between_operands() -> None:
    (mutation,) = mutations("(a) * ((b))")
    assert mutation.apply("(a) * ((b))") == "(a) + ((b))"


def test_columns_count_characters_not_bytes() -> None:
    (mutation,) = mutations("f('käse', x) + y")
    assert mutation.apply("f('käse', x) + y") == "f('käse', x) - y"


def test_form_feed_and_separators_do_not_start_a_line() -> None:
    source = "s = 'a\u2028b'\n\x0c\ndef f(x):\r\n    return x + y\r\n"
    (mutation,) = mutations(source)
    assert mutation.apply(source) == source.replace("+", "-")


def test_apply_refuses_another_source() -> None:
    (mutation,) = mutations("a + b")
    with pytest.raises(ValueError, match="does not hold"):
        mutation.apply("a - b")


def test_unreadable_source() -> None:
    with pytest.raises(SyntaxError):
        mutations("def f(:")


def test_ordered_by_place() -> None:
    found = mutations("if a < 1 and b:\n    c = 2 + d\n")
    assert found == sorted(found)
    assert isinstance(found[0], Mutation)
