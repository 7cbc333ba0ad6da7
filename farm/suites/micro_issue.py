"""Issue texts of the micro suite: a failing call, and what a user might say about it.

A user describes the symptom in words, seldom the cause; some say nothing useful. The words depend on the bug's kind and
on what the code should do, never on the line.
"""

from __future__ import annotations

from random import Random

from farm.suites.operators import Mutation

VAGUE = ("the result is wrong", "this can not be right", "please fix it")

_BY_KIND = {
    "negate": ("the test is inverted", "it needs the opposite test"),
    "number": ("off by one", "one too many"),
}
_BY_INTENT = {
    "<": ("it should be less", "expected below"),
    "<=": ("it should be at most", "expected up to"),
    ">": ("it should be more", "expected above"),
    ">=": ("it should be at least", "expected no less"),
    "+=": ("it should go up", "expected an increase"),
    "-=": ("it should go down", "expected a decrease"),
    "True": ("it should say yes", "expected yes"),
    "False": ("it should say no", "expected no"),
    "+": ("it should add", "expected a sum"),
    "-": ("it should subtract", "expected a difference"),
    "*": ("it should multiply", "expected a product"),
    "//": ("it should divide", "expected a quotient"),
    "%": ("it should take the rest", "expected a remainder"),
    "==": ("it should accept the same value", "equal values are missed"),
    "!=": ("it should accept other values", "different values are missed"),
    "in": ("it should accept listed values", "known values are missed"),
    "not in": ("it should accept new values", "unknown values are missed"),
    "and": ("both must hold", "it needs both"),
    "or": ("either is enough", "it needs only one of them"),
    "min": ("it should take the smallest", "expected the least"),
    "max": ("it should take the largest", "expected the most"),
    "any": ("one match is enough", "a single match must do"),
    "all": ("every item must match", "no item may fail"),
}


def phrases(mutation: Mutation) -> tuple[str, ...]:
    """What users say about this bug."""
    return _BY_KIND.get(mutation.kind) or _BY_INTENT[mutation.old]


def all_phrases() -> tuple[str, ...]:
    """Every phrase there is, for training the tokenizer."""
    return (*VAGUE, *(p for table in (_BY_KIND, _BY_INTENT) for pair in table.values() for p in pair))


def write_issue(rng: Random, mutation: Mutation, *, call: str, got: str, expected: str, vague_share: float) -> str:
    """One line: the failing call with its result, then a remark."""
    remark = rng.choice(VAGUE if rng.random() < vague_share else phrases(mutation))
    return f"{call} gives {got}, expected {expected}: {remark}"
