"""How fast the trajectory log is on this machine and disk.

MB are 10^6 bytes of Arrow memory (``RecordBatch.nbytes``): what the records weigh, not what compression leaves of them.
The trajectories are of the size of software-engineering episodes: 60 turns, 48,000 tokens of about four characters,
0.4 MB each; token ids and log-probs are random, so compression gains little on them, as with real ones.
"""

from __future__ import annotations

import asyncio
import random
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from farm.trajectory_codec import encode
from farm.trajectory_log import DirectoryLog
from farm.types import (
    Cursor,
    EndReason,
    Event,
    Evidence,
    Graded,
    SamplingParams,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
)

_WORDS = ["def", "return", "self", "import", "assert", "test", "value", "None", "for", "in", "if", "raise", "\n    "]


def measure(*, episodes: int = 200, folder: Path | None = None) -> dict[str, float]:
    """Append ``episodes`` one by one, seal them and tail them, in a temporary folder below ``folder``.

    Returns ``append_mb_per_s`` (durable, one writer), ``seal_mb_per_s``, ``tail_mb_per_s`` (to records), and
    ``append_small_cpu_ms`` (CPU milliseconds to append an episode of 5 turns and 250 tokens)."""
    large = [synthetic(i, turns=60, context=600, output=200) for i in range(episodes)]
    small = [synthetic(i, turns=5, context=40, output=10) for i in range(episodes, 2 * episodes)]
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        with DirectoryLog(Path(place) / "large") as log:
            megabytes = sum(encode([t]).nbytes for t in large) / 1e6
            append_s = _timed(lambda: [log.append(t) for t in large])
            seal_s = _timed(log.seal)
            tail_s = _timed(lambda: asyncio.run(_tail(log, episodes)))
        with DirectoryLog(Path(place) / "small") as log:
            before = time.process_time()
            for trajectory in small:
                log.append(trajectory)
            small_s = (time.process_time() - before) / episodes
    return {
        "append_mb_per_s": megabytes / append_s,
        "seal_mb_per_s": megabytes / seal_s,
        "tail_mb_per_s": megabytes / tail_s,
        "append_small_cpu_ms": 1e3 * small_s,
    }


def synthetic(number: int, *, turns: int, context: int, output: int) -> Trajectory:
    """An episode of the given shape: ids per turn of context and of sampled tokens. Same number, same episode."""
    source = random.Random(number)
    started = 1e9 + number
    made = tuple(_turn(source, step=number // 128, context=context, output=output) for _ in range(turns))
    return Trajectory(
        episode_id=f"{source.getrandbits(128):032x}",
        group_id=f"g{number // 8}",
        group_size=8,
        index=number % 8,
        instance_id=f"synthetic-{number // 8}",
        task_digest=f"{source.getrandbits(128):032x}",
        dataset="synthetic",
        repo="synthetic/synthetic",
        strata={"kind": "arith", "size": "2"},
        weight=1.0,
        seed=number,
        purpose="rl",
        sampling=SamplingParams(),
        attempt=1,
        worker="bench",
        engine_url="http://127.0.0.1:0",
        outcome=Graded(
            reward=float(number % 2),
            evidence=Evidence(
                statuses={f"test_{i}": "PASSED" for i in range(4)},
                resolved=bool(number % 2),
                patch_applied=True,
                exit_code=0,
                log_tail=_words(source, 60),
            ),
        ),
        end_reason=EndReason.SUBMITTED,
        turns=made,
        patch=_words(source, 60),
        timeline=tuple(
            Event(name=name, start_at_s=started + i, end_at_s=started + i + 0.5)
            for i, name in enumerate(["queued", "sandbox_start", *["generate", "exec"] * turns, "grade"])
        ),
        usage=Usage(prompt_tokens=turns * context, output_tokens=turns * output),
        started_at_s=started,
        ended_at_s=started + 2 * turns,
    )


def _turn(source: random.Random, *, step: int, context: int, output: int) -> Turn:
    bits = source.randbytes(4 * output)
    mantissas = struct.unpack(f"={output}I", bits)
    logprobs = struct.unpack(f"={output}f", struct.pack(f"={output}f", *(-m / 2**31 for m in mantissas)))
    return Turn(
        segment=0,
        context_ids=tuple(source.choices(range(150_000), k=context)),
        output_ids=tuple(m % 150_000 for m in mantissas),
        output_logprobs=logprobs,
        spans=(VersionSpan(step=step, start=0, end=output),),
        finish_reason="stop",
        action=_words(source, output * 3 // 4),
        observation=_words(source, context * 3 // 4),
        exit_code=0,
        cached_tokens=context,
        retractions=0,
    )


def _words(source: random.Random, count: int) -> str:
    return " ".join(source.choices(_WORDS, k=count))


async def _tail(log: DirectoryLog, rows: int) -> None:
    read = 0
    async for _ in log.tail(Cursor()):
        read += 1
        if read == rows:
            return


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
