"""Names of the micro suite: repositories, modules and functions, disjoint between the benchmark and everything else.

All names are put together from the same few words, so that a policy meets no word on the benchmark that it has not
seen; which *combination* of words belongs to which side is fixed by :func:`is_held_out`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

VERBS = (
    "add", "bind", "cap", "draw", "fit", "gain", "hold", "join", "keep", "lift", "mark", "pack", "pick", "rank",
    "rate", "scan", "sort", "sum", "take", "test", "trim", "tune", "vote", "weigh",
)  # fmt: skip
NOUNS = (
    "ants", "bees", "cats", "cows", "crabs", "cubs", "deer", "dogs", "ducks", "eels", "fish", "frogs", "goats", "hens",
    "mice", "moths", "owls", "pigs", "rats", "seals", "swans", "toads", "wasps", "wolves",
)  # fmt: skip
COLOURS = ("amber", "black", "blue", "brown", "coral", "green", "grey", "ivory", "lilac", "olive", "pink", "white")

_FUNCTIONS_PER_REPO = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """One repository: ``repo`` ("micro/amber-ants"), its ``module`` file and the functions it may hold."""

    repo: str
    module: str
    functions: tuple[str, ...]


def is_held_out(first: int, second: int) -> bool:
    """Whether the combination of two word indices belongs to the benchmark: one in six, every word on both sides."""
    return (first + second) % 6 == 0


@cache
def repositories(*, held_out: bool) -> tuple[Names, ...]:
    """All repositories of one side, always in the same order."""
    functions = [
        f"{verb}_{noun}"
        for i, verb in enumerate(VERBS)
        for j, noun in enumerate(NOUNS)
        if is_held_out(i, j) == held_out
    ]
    found = []
    for i, colour in enumerate(COLOURS):
        for j, noun in enumerate(NOUNS):
            if is_held_out(i, j) == held_out:
                names = Random(f"{colour} {noun}").sample(functions, _FUNCTIONS_PER_REPO)
                found.append(Names(repo=f"micro/{colour}-{noun}", module=f"{colour}_{noun}.py", functions=tuple(names)))
    return tuple(found)
