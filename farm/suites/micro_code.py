"""Random small functions with bounded run time: the correct code of the micro suite, before a bug goes in.

A function has two to six lines of two or three kinds of statements over small integers and short lists; every loop
runs over a list that was passed in, so whatever one edit does to it, it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Value = int | list[int]

_COMPARE = ("<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Source of one function, with how to call it: ``parameters`` are "int" or "list"."""

    name: str
    source: str
    parameters: tuple[str, ...]

    @property
    def lines(self) -> int:
        return self.source.count("\n")


def random_function(rng: Random, name: str) -> Function:
    """A function of one of the shapes below, called ``name``."""
    parameters, body = rng.choice(_SHAPES)(rng)
    head = f"def {name}({', '.join(parameters)}):\n"
    source = head + "".join(f"    {line}\n" for line in body)
    return Function(name=name, source=source, parameters=tuple("list" if p == "xs" else "int" for p in parameters))


def random_arguments(rng: Random, function: Function) -> tuple[Value, ...]:
    """Arguments of one call: digits, and lists of two to four of them."""
    return tuple(
        rng.randrange(10) if kind == "int" else [rng.randrange(10) for _ in range(rng.randint(2, 4))]
        for kind in function.parameters
    )


def _compare(rng: Random, left: str, right: str) -> str:
    return f"{left} {rng.choice(_COMPARE)} {right}"


def _digit(rng: Random) -> str:
    return str(rng.randint(1, 7))


def _condition(rng: Random, left: str, right: str) -> str:
    """One test of ``left``, now and then against ``right``."""
    other = rng.choice((right, _digit(rng)))
    simple = [
        _compare(rng, left, other),
        f"{left} {rng.choice(('==', '!='))} {other}",
        f"{left} % {rng.randint(2, 3)} == {rng.randint(0, 1)}",
        f"not {_compare(rng, left, other)}",
    ]
    return rng.choice(simple)


def _expression(rng: Random, left: str, right: str) -> str:
    other = rng.choice((right, _digit(rng)))
    return rng.choice(
        (
            f"{left} + {other}",
            f"{left} - {other}",
            f"{left} * {other}",
            f"{left} // {rng.randint(2, 3)}",
            f"{left} % {rng.randint(3, 5)}",
            f"{rng.choice(('min', 'max'))}({left}, {other})",
        )
    )


def _both(rng: Random, first: str, second: str) -> str:
    return f"{first} {rng.choice(('and', 'or'))} {second}"


def _change(rng: Random, name: str, amount: str) -> str:
    return f"{name} {rng.choice(('+=', '-='))} {amount}"


def _scalar(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    test = _condition(rng, rng.choice("abc"), "b")
    if rng.random() < 0.4:
        test = _both(rng, test, _compare(rng, "b", _digit(rng)))
    inner = _change(rng, "c", rng.choice(("a", "b", _digit(rng)))) if rng.random() < 0.6 else "return " + _digit(rng)
    last = "c" if rng.random() < 0.5 else _expression(rng, "c", "a")
    return ("a", "b"), [f"c = {_expression(rng, 'a', 'b')}", f"if {test}:", f"    {inner}", f"return {last}"]


def _steps(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    body = [f"c = {_expression(rng, 'a', 'b')}", _change(rng, "c", rng.choice(("a", "b", _digit(rng))))]
    return ("a", "b"), [*body, f"return {_expression(rng, 'c', 'b')}"]


def _total(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    test = _condition(rng, "x", "k")
    if rng.random() < 0.3:
        test = _both(rng, test, _compare(rng, "x", _digit(rng)))
    body = ["n = " + rng.choice(("0", "k", _digit(rng))), "for x in xs:", f"    if {test}:"]
    body.append("        " + _change(rng, "n", rng.choice(("x", "k", _digit(rng)))))
    return ("xs", "k"), [*body, "return " + ("n" if rng.random() < 0.6 else _expression(rng, "n", "k"))]


def _every(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    step = _expression(rng, "x", "k")
    body = ["n = " + rng.choice(("0", "k", _digit(rng))), "for x in xs:", "    " + _change(rng, "n", step)]
    return ("xs", "k"), [*body, "return " + ("n" if rng.random() < 0.5 else _expression(rng, "n", "k"))]


def _search(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    found = rng.choice(("True", "False"))
    test = _condition(rng, "x", "k")
    if rng.random() < 0.3:
        test = _both(rng, test, _compare(rng, "x", _digit(rng)))
    other = _compare(rng, "k", _digit(rng))
    return ("xs", "k"), ["for x in xs:", f"    if {test}:", f"        return {found}", f"return {other}"]


def _guard(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    member = rng.choice(("k in xs", "k not in xs"))
    test = member if rng.random() < 0.6 else _both(rng, member, _condition(rng, "k", "3"))
    if rng.random() < 0.5:
        call = f"{rng.choice(('any', 'all'))}({_condition(rng, 'x', 'k')} for x in xs)"
        return ("xs", "k"), [f"if {test}:", f"    return {rng.choice(('True', 'False'))}", f"return {call}"]
    call = f"{rng.choice(('min', 'max'))}(xs)"
    return ("xs", "k"), [f"if {test}:", f"    return {_expression(rng, 'k', '2')}", f"return {call}"]


def _flag(rng: Random) -> tuple[tuple[str, ...], list[str]]:
    member = rng.choice(("a in xs", "a not in xs", "not a in xs"))
    member = member if member != "not a in xs" else f"not {_compare(rng, 'a', 'b')}"
    test = _both(rng, member, _condition(rng, "b", "a"))
    return ("a", "b", "xs"), [f"if {test}:", f"    return {_expression(rng, 'a', 'b')}", f"return {_digit(rng)}"]


_Shape = Callable[[Random], tuple[tuple[str, ...], list[str]]]
_SHAPES: tuple[_Shape, ...] = (_scalar, _steps, _total, _every, _search, _guard, _flag)
