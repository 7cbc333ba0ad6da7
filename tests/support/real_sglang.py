"""Real SGLang servers on the CPU, from the environment that ``ci/sglang.sh`` makes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from farm.engine.bench import BenchShape, write_random_model
from farm.engine.launch import CommandOptions, EngineProcess, free_port, launch_engine

# Set by ci/sglang.sh; without it nothing that needs a real server is collected.
PYTHON = os.environ.get("SGLANG_PYTHON", "")
CONTEXT = 1024
SHAPE = BenchShape(vocab=571, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=128)

SHIM = Path(__file__).parent / "sglang_shim"
_TOKENIZER = Path(__file__).parents[2] / "datasets" / "micro" / "base-policy"
_START_S = 600.0  # half a minute on an idle machine
# float32, so that log-probs can be compared; one thread, for two are twenty times slower; and no busy waiting.
_COMMAND = (
    "env", f"PYTHONPATH={SHIM}", "SGLANG_USE_CPU_ENGINE=1", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1",
    "{python}", "-m", "sglang.launch_server", "--model-path", "{{model}}", "--weight-version", "{{version}}",
    "--host", "{{host}}", "--port", "{{port}}", "--device", "cpu", "--dtype", "float32",
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--context-length", "{{context_length}}",
    "--max-total-tokens", "{{max_total_tokens}}", "--max-running-requests", "{{max_running_requests}}",
    "--enable-metrics", "--sleep-on-idle", "--skip-server-warmup",
)  # fmt: skip


def command(*more: str) -> tuple[str, ...]:
    """``engine.command`` of a real server on this machine."""
    return (*(part.format(python=PYTHON) for part in _COMMAND), *more)


def unfit_command(*more: str) -> tuple[str, ...]:
    """Of one that was started without what a farm needs: it counts nothing, and its log-probs are tempered."""
    environment, *rest = (part for part in command(*more) if part != "--enable-metrics")
    return (environment, "-u", "SGLANG_RETURN_ORIGINAL_LOGPROB", *rest)


def write_model(folder: Path, *, seed: int, shape: BenchShape = SHAPE) -> str:
    """A random Qwen3 with the micro policy's tokenizer, which SGLang wants."""
    write_random_model(folder, replace(shape, vocab=571), seed=seed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(_TOKENIZER / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 4, "torch_dtype": "float32"}))
    return str(folder)


@contextmanager
def real_server(
    model: str,
    folder: Path,
    *more: str,
    how: Callable[..., tuple[str, ...]] = command,
    max_total_tokens: int = 4096,
    context_length: int = CONTEXT,
    max_running_requests: int = 8,
    version: str = "default",
) -> Iterator[EngineProcess]:
    """One ``sglang.launch_server``, ended on exit with all its processes. ``more``: further options of its own;
    ``how`` makes the command of them."""
    options = CommandOptions(
        command=how(*more),
        model=model,
        version=version,
        port=free_port(),
        max_total_tokens=max_total_tokens,
        context_length=context_length,
        max_running_requests=max_running_requests,
    )
    process = asyncio.run(launch_engine(options, run_folder=folder, name="sglang", timeout_s=_START_S))
    try:
        yield process
    finally:
        asyncio.run(process.stop())
