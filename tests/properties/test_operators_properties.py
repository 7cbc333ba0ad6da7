"""Properties of the bug operators over generated sources of any shape."""

import ast

from hypothesis import given, settings
from hypothesis import strategies as st

from farm.suites.operators import KINDS, Mutation, mutations

NAMES = st.sampled_from(["a", "b", "größe", "xs", "min"])
ATOMS = st.one_of(
    NAMES,
    st.integers(0, 1200).map(str),
    st.sampled_from(
        ["True", "False", "None", "'ä + 1'", "0x1f", "00", "0x0", "0o7", "1_0", "f'{a + 1}'", '"\u2028 < "', "2.5"]
    ),
)
BINARY = ["+", "-", "*", "//", "%", "**", "<", "<=", ">", ">=", "==", "!=", "in", "not in", "is", "is not", "and", "or"]


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(lambda a, op, b: f"{a} {op} {b}", inner, st.sampled_from(BINARY), inner),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"not {e}"),
        inner.map(lambda e: f"not({e})"),
        inner.map(lambda e: f"not  {e}"),
        st.builds(lambda n, e: f"{n}if {e}else {n}", st.integers(0, 9), inner),
        st.builds(lambda f, e: f"{f}({e})", st.sampled_from(["min", "max", "any", "all", "f", "(min)"]), inner),
        st.builds(lambda a, b: f"[{a}, {b}]", inner, inner),
        st.builds(lambda a, b: f"({a} +\n     {b})", inner, inner),
    )


EXPRESSIONS = st.recursive(ATOMS, _deeper, max_leaves=8)
STATEMENTS = st.one_of(
    EXPRESSIONS,
    EXPRESSIONS.map(lambda e: f"a += {e}"),
    EXPRESSIONS.map(lambda e: f"def g(x={e}):\n    return x - {e}  # a + b"),
    EXPRESSIONS.map(lambda e: f"\x0cif {e}:\n\tb = {e}"),
)


def _source(statements: list[str], newline: str) -> str:
    return "".join(f"{s}\n" for s in statements).replace("\n", newline)


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


SOURCES = st.builds(_source, st.lists(STATEMENTS, max_size=4), st.sampled_from(["\n", "\r\n"])).filter(_parses)


@settings(max_examples=150, deadline=None)
@given(SOURCES)
def test_a_mutation_changes_one_token_and_can_be_undone(source: str) -> None:
    tree = ast.dump(ast.parse(source))
    for mutation in mutations(source):
        broken = mutation.apply(source)
        assert ast.dump(ast.parse(broken)) != tree
        assert len(broken) - len(source) == len(mutation.new) - len(mutation.old)
        back = Mutation(
            line=mutation.line,
            column=mutation.column,
            kind=mutation.kind,
            old=mutation.new,
            new=mutation.old,
            function=mutation.function,
        )
        assert back.apply(broken) == source
        assert mutation.kind in KINDS


@settings(max_examples=60, deadline=None)
@given(SOURCES)
def test_deterministic_ordered_and_without_doubles(source: str) -> None:
    found = mutations(source)
    assert found == mutations(source) == sorted(found)
    assert len(found) == len(set(found))
