from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.advantage import group_advantages

finite = st.floats(allow_nan=False, allow_infinity=False)


def test_mean_and_population_std() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [0.3] * 8, [0.1 + 0.2, 0.3], [1e-9, 0.0]])
def test_no_variance_gives_none(rewards: list[float]) -> None:
    assert group_advantages(rewards) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, bad])


@given(st.lists(finite, max_size=16))
def test_finite_centred_and_ordered_for_any_rewards(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    if advantages is None:
        return
    assert all(math.isfinite(a) for a in advantages)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert math.fsum(a * a for a in advantages) == pytest.approx(len(advantages))
    for r, a in zip(rewards, advantages, strict=True):
        for s, b in zip(rewards, advantages, strict=True):
            assert not (r < s and a > b)
