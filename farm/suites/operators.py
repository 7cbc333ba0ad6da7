"""Bug operators: every way to break a Python source by changing one token, found in its syntax tree.

``mutations`` is pure and deterministic. A mutation replaces one span of one line, so the rest of the file, comments and
layout included, stays byte for byte as it was: the gold patch is the reverse edit.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from dataclasses import dataclass

_BINARY = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
_STRICT = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
_FLIP = {ast.Lt: ("<", ">"), ast.LtE: ("<=", ">="), ast.Gt: (">", "<"), ast.GtE: (">=", "<=")}
_EQUAL = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "==")}
_MEMBER = {ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
_LOGIC = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

KINDS = ("arith", "augment", "strict", "flip", "equal", "member", "logic", "negate", "number", "truth", "call")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mutation:
    """Replace ``old`` by ``new`` at ``line`` (from 1), ``column`` (characters, from 0). ``kind`` is one of KINDS."""

    line: int
    column: int
    kind: str
    old: str
    new: str
    function: str  # name of the enclosing function, "" at module level

    def apply(self, source: str) -> str:
        """The broken source. Raises ValueError when ``old`` is not where the mutation says."""
        lines = source_lines(source)
        text = lines[self.line - 1]
        if text[self.column : self.column + len(self.old)] != self.old:
            raise ValueError(f"line {self.line}, column {self.column} does not hold {self.old!r}")
        lines[self.line - 1] = text[: self.column] + self.new + text[self.column + len(self.old) :]
        return "".join(lines)


def mutations(source: str, *, kinds: tuple[str, ...] = KINDS) -> list[Mutation]:
    """All mutations of ``source``, ordered by place; each can be parsed. Raises SyntaxError on unreadable source."""
    tree = ast.parse(source)
    return sorted({mutation for mutation in _walk(tree, source_lines(source), "") if mutation.kind in kinds})


def source_lines(source: str) -> list[str]:
    """Lines as Python counts them, ends kept: ``str.splitlines`` also splits at form feeds and separators."""
    return list(io.StringIO(source, newline=""))


def _walk(node: ast.AST, lines: list[str], function: str) -> Iterator[Mutation]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    for kind, left, right, (old, new) in _gaps(node):
        place = _between(lines, left, right, old)
        if place:
            yield Mutation(line=place[0], column=place[1], kind=kind, old=old, new=new, function=function)
    yield from _leaves(node, lines, function)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):  # positions inside f-strings can't be trusted before 3.12
            yield from _walk(child, lines, function)


def _gaps(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr, tuple[str, str]]]:
    """Operators that stand between two expressions."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        yield "arith", node.left, node.right, _BINARY[type(node.op)]
    elif isinstance(node, ast.BoolOp):
        yield from (("logic", a, b, _LOGIC[type(node.op)]) for a, b in zip(node.values, node.values[1:], strict=False))
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:], strict=False):
            for kind, table in (("strict", _STRICT), ("flip", _FLIP), ("equal", _EQUAL), ("member", _MEMBER)):
                if type(op) in table:
                    yield kind, left, right, table[type(op)]
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        swap = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
        yield "augment", node.target, node.value, swap


def _leaves(node: ast.AST, lines: list[str], function: str) -> Iterator[Mutation]:
    """Constants, names of built-ins, ``not``: what the expression begins with, if it is written the plain way."""
    change = _leaf(node)
    if change and isinstance(node, ast.expr):
        kind, old, new = change
        column = _column(lines, node.lineno, node.col_offset)
        after = lines[node.lineno - 1][column + len(old) :][:1]
        plain = not (after.isspace() if old.endswith(" ") else after.isalnum() or after == "_")
        if plain and lines[node.lineno - 1].startswith(old, column):  # not 0x10, 1_000, not(x), (min)(x)
            yield Mutation(line=node.lineno, column=column, kind=kind, old=old, new=new, function=function)


def _leaf(node: ast.AST) -> tuple[str, str, str] | None:
    """Kind, old text and new text of the change to the first token of ``node``."""
    match node:
        case ast.Constant(value=bool(value)):
            return "truth", str(value), str(not value)
        case ast.Constant(value=int(value)) if 0 <= value < 1000:
            return "number", str(value), str(value + 1)
        case ast.UnaryOp(op=ast.Not()):
            return "negate", "not ", ""
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            return "call", name, _NAMES[name]
    return None


def _column(lines: list[str], line: int, byte_offset: int) -> int:
    return len(lines[line - 1].encode()[:byte_offset].decode())


def _between(lines: list[str], left: ast.expr, right: ast.expr, token: str) -> tuple[int, int] | None:
    """Where ``token`` stands alone between two expressions of one line; None when it doesn't."""
    if left.end_lineno is None or left.end_col_offset is None or left.end_lineno != right.lineno:
        return None
    start = _column(lines, left.end_lineno, left.end_col_offset)
    gap = lines[right.lineno - 1][start : _column(lines, right.lineno, right.col_offset)]
    if gap.strip(" ()") != token:
        return None
    return right.lineno, start + gap.index(token)
