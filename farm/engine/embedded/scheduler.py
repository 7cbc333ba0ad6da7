"""Continuous batching over rows of a KV store: admission, prefix reuse, steps, retraction, weight swaps.

Invariant: rows [0, R) are the running requests, in any order; every other row is free or holds the KV of a finished
sequence, kept for prefix reuse and given up oldest first. Tokens of running requests plus tokens kept never exceed the
budget when a step begins. A kept row is reused only under the weights that computed it.

A request that continues a kept sequence (the next turn of an episode) takes its row over and computes only what is new,
the sampled tokens of the last turn included; one that shares a shorter prefix (another attempt at the same task) copies
that much. Nothing here knows of HTTP or of a clock other than ``now``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from farm.engine.embedded.model import Chunk, Decoder, KVStore, StepInput, Weights
from farm.engine.embedded.request import Request, version_spans
from farm.engine.embedded.sampler import SamplingRows, sample

# SGLang's defaults for how much of a running request's remaining length is set aside at admission.
_RATIO_START, _RATIO_MIN, _RATIO_STEPS = 0.7, 0.098, 600
_RETRACT_STEPS = 20

_MIN_SHARED = 16  # a shorter common prefix is not worth a copy
_WAIT_FOR_SIBLING = 32  # tokens that a running request is about to compute anyway
_STOPS = 16
_MASKED = -1e30

_ROW = np.dtype(
    [
        ("tokens", np.int32),  # known tokens: prompt and sampled
        ("computed", np.int32),  # of these, how many have their KV in the store
        ("end", np.int32),
        ("prompt", np.int32),
        ("epoch", np.int64),
        ("used", np.int64),  # when last used, for giving up the oldest
        ("sequence", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("seed", np.uint64),
        ("stops", np.int32, (_STOPS,)),
    ]
)


class QueueFullError(Exception):
    """The waiting queue is at its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Caps of one server. Tokens, except for the two request counts; ``max_queued`` None means no cap.

    ``clip_new_tokens``: no request counts for more tokens to come than this at admission (SGLang's
    ``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``)."""

    max_total_tokens: int
    context_length: int
    max_running: int
    max_queued: int | None
    chunk_tokens: int
    clip_new_tokens: int = 4096

    @property
    def rows(self) -> int:
        """Rows of the KV store: for what runs, and as many for what is kept."""
        return 2 * self.max_running

    @property
    def capacity(self) -> int:
        """Tokens of a row: no sequence outgrows the context or (by more than the token that finds it full) the
        budget."""
        return min(self.context_length, self.max_total_tokens + 1)


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    retracted: int = 0
    aborted: int = 0
    steps: int = 0


class Scheduler:
    """All state of the model loop. Single-threaded: every method is called from the loop's thread, between steps."""

    def __init__(
        self, weights: Weights, limits: Limits, *, version: str, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.limits = limits
        self.version = version
        self.counters = Counters()
        self.new_token_ratio = _RATIO_START
        self.paused = False
        self._now = now
        self._rows_total = limits.rows
        self._decoder = Decoder(weights, capacity=limits.capacity)
        self._store = KVStore(weights.config, rows=self._rows_total, capacity=limits.capacity)
        self._table = np.zeros(self._rows_total, _ROW)
        self._tokens = np.zeros((self._rows_total, limits.capacity), np.int32)
        self._logprobs = np.zeros((self._rows_total, limits.capacity), np.float32)
        self._columns = np.arange(limits.capacity, dtype=np.int32)
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._next_step = 0  # of these, how many only wait for the next step
        self._epoch = 1
        self._tick = 0
        self._sequence = 0

    # ------------------------------------------------------------------------------------- state, for reports

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """Requests that wait for room: those that the last admission left. What came since, and what was held back for
        a prefix that another request is computing, waits for a step."""
        return self.waiting if self.paused else max(0, self.waiting - self._next_step)

    @property
    def retracted_waiting(self) -> int:
        return sum(1 for request in self._waiting if request.retractions)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return not self.paused and bool(self._running or self._waiting)

    @property
    def running_tokens(self) -> int:
        """KV tokens that running requests hold, the one about to be computed included."""
        return int(self._table["tokens"][: self.running].sum())

    @property
    def kept_tokens(self) -> int:
        """KV tokens of finished sequences, kept for prefix reuse."""
        return int(self._table["computed"][self.running :].sum())

    # ------------------------------------------------------------------------------------- commands

    def submit(self, request: Request) -> None:
        """Queue a request. Raises :class:`QueueFullError`."""
        if self.limits.max_queued is not None and len(self._waiting) + 1 > self.limits.max_queued:
            raise QueueFullError
        self.counters.requests += 1
        self._next_step += 1
        self._waiting.append(request)

    def abort(self, prefix: str | None) -> None:
        """Finish the requests whose rid begins with ``prefix`` (all, when None) with what they have."""
        self._abort(lambda rid: prefix is None or rid.startswith(prefix))

    def abort_exactly(self, rid: str) -> None:
        """Finish the request ``rid``."""
        self._abort(rid.__eq__)

    def _abort(self, concerns: Callable[[str], bool]) -> None:
        for request in [r for r in self._waiting if concerns(r.rid)]:
            self._waiting.remove(request)
            self._finish(request, {"type": "abort", "message": "Abort in waiting queue"})
        for row in reversed(range(self.running)):
            if concerns(self._running[row].rid):
                self._leave(row, _aborted("Aborted"))

    def retract_all(self) -> None:
        """Send running requests back to the queue's head, in their order, and drop their KV."""
        order = np.argsort(self._table["sequence"][: self.running])[::-1]
        for request in [self._running[row] for row in order]:
            self._retract(self._running.index(request))

    def flush(self) -> bool:
        """Give up all kept sequences. False, and nothing done, while requests run (or wait, unless paused)."""
        if self._running or (self._waiting and not self.paused):
            return False
        self._table["computed"] = 0
        return True

    def set_weights(self, weights: Weights, version: str | None) -> None:
        """Swap the weights. Running requests go on with the KV they have; no later request reuses any of it."""
        self._decoder.weights = weights
        self._epoch += 1
        self._table["computed"][self.running :] = 0
        if version is not None:
            self.set_version(version)

    def set_version(self, version: str) -> None:
        """Name the weights; tokens sampled so far keep the name they were sampled under."""
        if version == self.version:
            return
        for row, request in enumerate(self._running):
            sampled = int(self._table["tokens"][row]) - request.prompt_length
            if sampled:
                request.version_changes.append((self.version, sampled))
        for request in self._waiting:
            if len(request.tokens) > request.prompt_length:
                request.version_changes.append((self.version, len(request.tokens) - request.prompt_length))
        self.version = version

    # ------------------------------------------------------------------------------------- one step

    def step(self) -> None:
        """Admit what fits, make room, compute one batch, sample, finish what is done."""
        self._admit()
        self._make_room()
        if not self._running:
            return
        self.counters.steps += 1
        self._tick += 1
        self.new_token_ratio = max(_RATIO_MIN, self.new_token_ratio - (_RATIO_START - _RATIO_MIN) / _RATIO_STEPS)
        table = self._table[: self.running]
        computed = table["computed"]
        pending = table["tokens"] - computed
        decode = np.flatnonzero(pending == 1)
        taken = np.zeros(self.running, np.int32)
        taken[decode] = 1
        chunks, scored = self._chunks(pending, taken)
        # Rows whose next token can be sampled: the decoding ones, then those whose prompt ends in this step.
        ends = [c for c in chunks if c.length == pending[c.row]]
        done = np.concatenate([decode, np.array([c.row for c in ends], np.int64)]) if ends else decode
        with torch.inference_mode():
            logits = self._decoder.step(self._assemble(decode, chunks, ends, scored), self._store)
            first = len(done)
            for chunk in scored:
                self._score_inputs(chunk, logits[first : first + chunk.length])
                first += chunk.length
            computed += taken
            table["used"] = self._tick
            if len(done):
                self._sample(done, logits[: len(done)])

    def _chunks(self, pending: NDArray[np.int32], taken: NDArray[np.int32]) -> tuple[list[Chunk], list[Chunk]]:
        """The prompt chunks of this step, oldest request first, and those of them whose inputs are to be scored."""
        waiting = np.flatnonzero(pending > 1)
        chunks: list[Chunk] = []
        if not len(waiting):
            return chunks, chunks
        table = self._table
        offset = int(taken.sum())
        budget = self.limits.chunk_tokens
        for row in waiting[np.argsort(table["sequence"][waiting])].tolist():
            length = min(int(pending[row]), budget)
            if length == 0:
                break
            taken[row] = length
            chunks.append(Chunk(row, int(table["computed"][row]), offset, length))
            offset += length
            budget -= length
        return chunks, [c for c in chunks if self._running[c.row].scoring_from is not None]

    def _assemble(
        self, decode: NDArray[np.int64], chunks: list[Chunk], ends: list[Chunk], scored: list[Chunk]
    ) -> StepInput:
        """The step's tensors; ``wanted``: all decode tokens, the last tokens of ``ends``, then whole scored chunks."""
        table = self._table
        positions = table["computed"][decode]
        ids = self._tokens[decode, positions]
        rows = decode
        if chunks:
            spans = [(c.row, c.position, c.position + c.length) for c in chunks]
            ids = np.concatenate([ids, *(self._tokens[r, a:b] for r, a, b in spans)])
            positions = np.concatenate([positions, *(self._columns[a:b] for _, a, b in spans)])
            rows = np.repeat(
                np.concatenate([decode, [c.row for c in chunks]]), [1] * len(decode) + [c.length for c in chunks]
            )
        count = len(decode)
        wanted = np.arange(count)
        if ends:
            wanted = np.concatenate([wanted, [c.offset + c.length - 1 for c in ends]])
        if scored:
            wanted = np.concatenate([wanted, *(np.arange(c.offset, c.offset + c.length) for c in scored)])
        mask = None
        if count:
            region = int(decode[-1]) + 1
            lengths = table["computed"][:region] + 1
            longest = int(lengths[decode].max())
            mask = torch.from_numpy(
                np.where(self._columns[None, :longest] < lengths[:, None], np.float32(0), np.float32(_MASKED))
            ).unsqueeze(1)
        return StepInput(
            ids=torch.from_numpy(ids),
            rows=torch.from_numpy(rows),
            positions=torch.from_numpy(positions.astype(np.int64)),
            decode_rows=torch.from_numpy(decode),
            decode_in_order=count > 0 and count == int(decode[-1]) + 1,
            mask=mask,
            chunks=chunks,
            wanted=torch.from_numpy(wanted),
            ends=None
            if scored
            else [Chunk(c.row, c.position + c.length - 1, count + n, 1) for n, c in enumerate(ends)],
        )

    def _score_inputs(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Keep the log-probability of each prompt token that follows a token of ``chunk`` (logits [length, vocab])."""
        stop = min(chunk.position + chunk.length, self._running[chunk.row].prompt_length - 1)
        count = stop - chunk.position
        if count > 0:
            following = self._tokens[chunk.row, chunk.position + 1 : stop + 1].astype(np.int64)
            picked = torch.log_softmax(logits[:count], -1).gather(1, torch.from_numpy(following).unsqueeze(1))
            self._logprobs[chunk.row, chunk.position + 1 : stop + 1] = picked.squeeze(1).numpy()

    def _sample(self, done: NDArray[np.int64], logits: torch.Tensor) -> None:
        """Append one token to each row of ``done`` and finish what has ended."""
        table = self._table
        mine = table[done]
        position = mine["tokens"]
        scoring = position >= mine["end"]  # max_new_tokens = 0: nothing is sampled
        ids, logprobs = sample(
            logits, SamplingRows(mine["temperature"], mine["top_p"], mine["top_k"], mine["seed"], position)
        )
        grow = ~scoring
        rows, at = done[grow], position[grow]
        self._tokens[rows, at] = ids[grow]
        self._logprobs[rows, at] = logprobs[grow]
        table["tokens"][rows] += 1
        self.counters.generated_tokens += len(rows)
        now = self._now()
        for row in done[(position == mine["prompt"]) & grow].tolist():
            self._running[row].first_token_s = now
        stopped = (mine["stops"] == ids[:, None]).any(1) & grow
        ended = stopped | (position + 1 >= mine["end"])
        finishing = np.flatnonzero(ended)
        for n in finishing[np.argsort(done[finishing])[::-1]].tolist():
            sampled = int(position[n]) + int(grow[n]) - int(mine["prompt"][n])
            self._leave(
                int(done[n]),
                {"type": "stop", "matched": int(ids[n])} if stopped[n] else {"type": "length", "length": sampled},
            )

    # ------------------------------------------------------------------------------------- admission

    def _admit(self) -> None:
        held_back: list[Request] = []
        while self._waiting and self.running < self.limits.max_running:
            request = self._waiting[0]
            if not self._fits(request):
                break
            self._waiting.popleft()
            source, shared, sibling = self._match(request)
            if sibling:
                held_back.append(request)
            else:
                self._place(request, source, shared)
        self._waiting.extendleft(reversed(held_back))
        self._next_step = len(held_back)

    def _fits(self, request: Request) -> bool:
        """SGLang's rule: room for the whole request beside a share of what the running ones may still need."""
        if not self._running:
            return True
        table = self._table[: self.running]
        remaining = np.minimum(table["end"] - table["tokens"], self.limits.clip_new_tokens).sum()
        needed = len(request.tokens) + min(request.end - len(request.tokens), self.limits.clip_new_tokens)
        return self.running_tokens + float(remaining) * self.new_token_ratio + needed <= self.limits.max_total_tokens

    def _match(self, request: Request) -> tuple[int, int, bool]:
        """The row with the longest usable common prefix, its length, and whether to wait for a running sibling that is
        about to compute a clearly longer one. The last token is always computed: its logits are needed."""
        usable = len(request.tokens) - 1
        if request.scoring_from is not None:
            usable = min(usable, request.scoring_from)
        if usable < _MIN_SHARED:
            return 0, 0, False
        table = self._table
        differs = self._tokens[:, :usable] != request.tokens[:usable]
        common = np.where(differs.any(1), differs.argmax(1), usable).astype(np.int64)
        common[table["epoch"] != self._epoch] = 0
        ready = np.minimum(common, table["computed"])
        source = int(ready.argmax())
        shared = int(ready[source])
        coming = np.minimum(common, table["tokens"])[: self.running]
        sibling = self.running > 0 and int(coming.max()) >= shared + _WAIT_FOR_SIBLING
        return source, shared if shared >= _MIN_SHARED else 0, sibling

    def _place(self, request: Request, source: int, shared: int) -> None:
        """Give the request row R, with the KV of its first ``shared`` tokens."""
        table = self._table
        row = self.running
        if shared and source >= row and table["computed"][source] == shared:
            self._swap(source, row)
        else:
            source = self._vacate(row, source)
            if shared:
                self._store.copy(source, row, shared)
            table["computed"][row] = shared
        length = len(request.tokens)
        self._tokens[row, :length] = request.tokens
        self._logprobs[row, :length] = request.logprobs
        request.sequence = self._sequence
        self._sequence += 1
        table[row] = (
            length, shared, request.end, request.prompt_length, self._epoch, self._tick, request.sequence,
            request.temperature, request.top_p, request.top_k, request.seed,
            request.stop_ids + (-1,) * (_STOPS - len(request.stop_ids)),
        )  # fmt: skip
        self._running.append(request)
        if request.admitted_s is None:
            request.admitted_s = self._now()
            request.cached_tokens = shared
            self.counters.prompt_tokens += request.prompt_length
            self.counters.cached_tokens += shared

    def _vacate(self, row: int, source: int) -> int:
        """Empty ``row`` (not a running one), keeping what it holds elsewhere if there is a free row; returns where
        ``source`` is now."""
        table = self._table
        if table["computed"][row] == 0:
            return source
        free = np.flatnonzero(table["computed"][row + 1 :] == 0)
        if len(free):
            target = row + 1 + int(free[0])
        else:
            others = np.arange(row, self._rows_total)
            others = others[others != source]
            target = int(others[table["used"][others].argmin()])
        table["computed"][target] = 0
        if target != row:
            self._swap(row, target)
        return target if source == row else source

    # ------------------------------------------------------------------------------------- leaving

    def _make_room(self) -> None:
        """Give up kept rows, then retract, until the step's tokens fit the budget."""
        budget = self.limits.max_total_tokens
        table = self._table
        while self._running and self.running_tokens + self.kept_tokens > budget:
            kept = table["computed"][self.running :]
            if kept.any():
                used = np.where(kept > 0, table["used"][self.running :], np.iinfo(np.int64).max)
                table["computed"][self.running + int(used.argmin())] = 0
            elif self.running > 1:
                self._retract_one()
            else:
                message = (
                    "Out of memory even after retracting all other requests in the decode batch. "
                    "Aborting the last request."
                )
                self._leave(0, _aborted(message, 500))

    def _retract_one(self) -> None:
        """Retract the request with the fewest sampled tokens (longest prompt first), and expect more from then on."""
        table = self._table[: self.running]
        sampled = table["tokens"] - table["prompt"]
        victim = int(np.lexsort((-table["prompt"], sampled))[0])
        self._retract(victim)
        table = self._table[: self.running]
        sampled = table["tokens"] - table["prompt"]
        wanted = float((table["end"] - table["prompt"]).sum())
        self.new_token_ratio = min(1.0, (float(sampled.sum()) + _RETRACT_STEPS * self.running) / (wanted + 1))

    def _retract(self, row: int) -> None:
        request = self._running[row]
        self._take_tokens(row)
        request.retractions += 1
        self.counters.retracted += 1
        self._release(row)
        self._table["computed"][self.running] = 0
        self._waiting.appendleft(request)

    def _leave(self, row: int, finish: dict[str, Any]) -> None:
        """A running request ends; its row is kept for reuse when its KV is of the present weights."""
        request = self._running[row]
        self._take_tokens(row)
        if self._table["epoch"][row] != self._epoch:
            self._table["computed"][row] = 0
        self._release(row)
        self._finish(request, finish)

    def _take_tokens(self, row: int) -> None:
        request = self._running[row]
        length = int(self._table["tokens"][row])
        request.tokens = self._tokens[row, :length].copy()
        request.logprobs = self._logprobs[row, :length].copy()

    def _release(self, row: int) -> None:
        """Move ``row`` out of the running rows."""
        last = self.running - 1
        self._swap(row, last)
        self._running[row] = self._running[last]
        self._running.pop()
        self._table["tokens"][last] = self._table["computed"][last]

    def _finish(self, request: Request, finish: dict[str, Any]) -> None:
        request.finish = finish
        request.finished_s = self._now()
        request.versions = version_spans(
            request.version_changes, self.version, len(request.tokens) - request.prompt_length
        )
        if finish["type"] == "abort":
            self.counters.aborted += 1
        request.on_finish(request)

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        table = self._table
        self._store.swap(a, b, int(table["computed"][a]), int(table["computed"][b]))
        pair, turned = [a, b], [b, a]
        table[pair] = table[turned]
        self._tokens[pair] = self._tokens[turned]
        self._logprobs[pair] = self._logprobs[turned]


def _aborted(message: str, status_code: int | None = None) -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
