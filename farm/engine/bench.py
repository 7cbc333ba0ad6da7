"""How fast an engine is: output tokens per second of multi-turn episodes, through its HTTP API."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from farm.engine.launch import EngineOptions, launch_engine
from farm.engine.sglang import SGLangEngine
from farm.protocols import Engine, GenerateRequest
from farm.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """The model (a Qwen3 of about a million parameters) and the episodes: a prompt, then turns that each append an
    observation and sample ``turn_tokens``."""

    vocab: int = 600
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 384
    prompt_tokens: int = 100
    observation_tokens: int = 40
    turn_tokens: int = 10
    turns: int = 5

    @property
    def context_tokens(self) -> int:
        """Length of an episode at its end."""
        return self.prompt_tokens + (self.turns - 1) * self.observation_tokens + self.turns * self.turn_tokens


def write_random_model(folder: Path, shape: BenchShape, *, seed: int = 0) -> None:
    """A Qwen3 folder with random float32 weights and tied embeddings."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def ones(size: int) -> Any:
        return np.ones(size, np.float32)

    s = shape
    tensors = {"model.embed_tokens.weight": matrix(s.vocab, s.hidden), "model.norm.weight": ones(s.hidden)}
    for n in range(s.layers):
        p = f"model.layers.{n}."
        tensors[p + "input_layernorm.weight"] = ones(s.hidden)
        tensors[p + "post_attention_layernorm.weight"] = ones(s.hidden)
        tensors[p + "self_attn.q_norm.weight"] = ones(s.head_dim)
        tensors[p + "self_attn.k_norm.weight"] = ones(s.head_dim)
        tensors[p + "self_attn.q_proj.weight"] = matrix(s.heads * s.head_dim, s.hidden)
        tensors[p + "self_attn.k_proj.weight"] = matrix(s.kv_heads * s.head_dim, s.hidden)
        tensors[p + "self_attn.v_proj.weight"] = matrix(s.kv_heads * s.head_dim, s.hidden)
        tensors[p + "self_attn.o_proj.weight"] = matrix(s.hidden, s.heads * s.head_dim)
        tensors[p + "mlp.gate_proj.weight"] = matrix(s.intermediate, s.hidden)
        tensors[p + "mlp.up_proj.weight"] = matrix(s.intermediate, s.hidden)
        tensors[p + "mlp.down_proj.weight"] = matrix(s.hidden, s.intermediate)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))


async def _episode(engine: Engine, shape: BenchShape, rid: str, seed: int) -> int:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, shape.vocab, shape.prompt_tokens).tolist()
    sampled = 0
    for turn in range(shape.turns):
        answer = await engine.generate(
            GenerateRequest(
                rid=f"{rid}-{turn}",
                input_ids=ids,
                max_new_tokens=shape.turn_tokens,
                stop_token_ids=(),
                sampling=SamplingParams(seed=seed),
            ),
            timeout_s=120.0,
        )
        sampled += len(answer.output_ids)
        ids += answer.output_ids
        ids += rng.integers(0, shape.vocab, shape.observation_tokens).tolist()
    return sampled


async def _run(engine: Engine, shape: BenchShape, concurrency: int, seconds: float, label: str) -> tuple[int, float]:
    """Tokens sampled by ``concurrency`` episode loops, and the seconds they took."""
    started = time.perf_counter()
    sampled = 0

    async def loop(worker: int) -> None:
        nonlocal sampled
        number = 0
        while number == 0 or time.perf_counter() - started < seconds:
            tokens = await _episode(engine, shape, f"{label}-{worker}-{number}", worker * 1_000_003 + number)
            sampled += tokens
            number += 1

    await asyncio.gather(*(loop(worker) for worker in range(concurrency)))
    return sampled, time.perf_counter() - started


def _cpu_s(group: int) -> float:
    """CPU seconds of the processes in a process group: a server may have several."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / 100.0


async def measure_engine(
    url: str,
    group: int,
    *,
    shape: BenchShape,
    concurrencies: tuple[int, ...] = (1, 8, 32),
    seconds: float = 4.0,
    repeats: int = 3,
) -> dict[str, dict[str, float]]:
    """See :func:`measure`; of a server that runs, whose processes are the process group ``group``. It must hold
    ``2 * max(concurrencies)`` episodes."""
    results: dict[str, dict[str, float]] = {}
    engine = SGLangEngine(url)
    try:
        await _run(engine, shape, max(concurrencies), 0.0, "warm-up")
        for concurrency in concurrencies:
            rates, cpu_rates = [], []
            for repeat in range(repeats):
                before = _cpu_s(group)
                sampled, took = await _run(engine, shape, concurrency, seconds / repeats, f"{concurrency}-{repeat}")
                rates.append(sampled / took)
                cpu_rates.append(sampled / max(0.01, _cpu_s(group) - before))
            results[f"c{concurrency}"] = {
                "median": float(np.median(rates)),
                "p95": float(np.percentile(rates, 95)),
                "n": repeats,
                "per_server_cpu_s": float(np.median(cpu_rates)),
            }
    finally:
        await engine.close()
    return results


async def measure_async(
    *,
    shape: BenchShape = BenchShape(),
    concurrencies: tuple[int, ...] = (1, 8, 32),
    seconds: float = 4.0,
    repeats: int = 3,
) -> dict[str, dict[str, float]]:
    """See :func:`measure`."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_random_model(folder / "model", shape)
        options = EngineOptions(
            model=str(folder / "model"),
            version="step-000000",
            context_length=shape.context_tokens + 8,
            max_total_tokens=2 * max(concurrencies) * (shape.context_tokens + 8),
            max_running_requests=max(concurrencies),
        )
        process = await launch_engine(options, run_folder=folder)
        try:
            return await measure_engine(
                process.url,
                process.process.pid,
                shape=shape,
                concurrencies=concurrencies,
                seconds=seconds,
                repeats=repeats,
            )
        finally:
            await process.stop()


def measure(
    *,
    shape: BenchShape = BenchShape(),
    concurrencies: tuple[int, ...] = (1, 8, 32),
    seconds: float = 4.0,
    repeats: int = 3,
) -> dict[str, dict[str, float]]:
    """Start a server with a random model and measure output tokens/s at each number of concurrent episodes.

    Returns ``{"c1": {"median", "p95", "n", "per_server_cpu_s"}, ...}``: tokens per wall-clock second (median and 95th
    percentile over ``repeats`` runs of ``seconds/repeats`` each) and tokens per CPU second of the server process."""
    return asyncio.run(measure_async(shape=shape, concurrencies=concurrencies, seconds=seconds, repeats=repeats))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
