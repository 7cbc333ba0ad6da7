"""PURE: the caps of an episode: what the next turn may sample, and why an episode ends (Rule 6).

The agent asks before and after every turn; the twin asks the same questions in virtual time.
"""

from __future__ import annotations

from farm.types import EndReason, Limits

UNREADABLE_TURNS = 2
"""So many turns in a row without an action that can be run end the episode."""

ENGINE_SHARE = 0.5
"""Of ``agent_s``: the longest that one generation may take before the engine counts as broken."""


def allowance(limits: Limits, *, turns: int, context_tokens: int, left_s: float) -> int | EndReason:
    """How many tokens the next turn may sample, after ``turns`` turns and with ``context_tokens`` ids so far; an end
    reason when there is no next turn. ``left_s``: what is left of ``agent_s``."""
    if turns >= limits.max_turns:
        return EndReason.MAX_TURNS
    room = limits.max_context_tokens - context_tokens
    if room <= 0:
        return EndReason.CONTEXT_FULL
    if left_s <= 0:
        return EndReason.TIME_LIMIT
    return min(room, limits.max_tokens_per_turn)


def end_of_turn(limits: Limits, *, cut: bool, context_tokens: int, unreadable: int) -> EndReason | None:
    """Why a turn that did not submit was the last one; None when another may follow.

    ``cut``: it hit its token limit; ``unreadable``: how many turns in a row held no action, this one included."""
    if cut and context_tokens >= limits.max_context_tokens:
        return EndReason.CONTEXT_FULL
    if unreadable >= UNREADABLE_TURNS:
        return EndReason.MAX_TOKENS if cut else EndReason.MALFORMED
    return None
