"""The recipe of the shipped micro policy: tokenizer, transcripts, pretraining. Reproducible by its seed.

    python -m trainer.base_policy --out datasets/micro/base-policy

1. A tokenizer is trained on the words of the suite.
2. Transcripts of somebody who works at random (``demonstrations.PRETRAINING``) are made on the pretraining problems,
   whose repositories and code shapes are disjoint from the benchmark's.
3. A Qwen3 model of 0.85 M parameters is trained on them from random weights, with the loss on *all* ids: predicting the
   listings as well as the commands is what teaches it to copy.

It takes about 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from farm.durable import write_json
from farm.errors import UsageError
from farm.render.micro import NO_COMMAND, MicroRenderer
from farm.render.micro_tokenizer import END, PAD, save_tokenizer, train_tokenizer
from farm.suites import micro, micro_issue, micro_names
from farm.suites.micro_sim import CHECK, READ, SUBMIT, UNDO, Simulation
from farm.types import content_digest
from trainer.demonstrations import PRETRAINING, transcripts

SEED = 0
TRANSCRIPTS = 10_000
STEPS = 900
LEARNING_RATE = 3e-3
BATCH = 16

_TOKENIZER_PROBLEMS = 500
_OTHER_TEXTS = (
    READ, CHECK, UNDO, SUBMIT, NO_COMMAND, "PASSED\n", "FAILED 1 of 4\n", "ERROR SyntaxError\n", "ERROR NameError\n",
    "TypeError IndentationError", "bash: line 1: x: command not found\n", "timed out", "return not",
)  # fmt: skip


def make_base_policy(
    out: Path, *, seed: int = SEED, count: int = TRANSCRIPTS, steps: int = STEPS, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Make the policy in the new folder ``out`` and return what its ``base.json`` says.

    Raises ``UsageError`` when ``out`` exists."""
    from trainer.sft import SftStep, train_sft

    if out.exists():
        raise UsageError(f"{out} exists; name a new folder")

    def report(step: SftStep) -> None:
        if step.step % 25 == 0 or step.step == step.steps:
            say(f"step {step.step}/{step.steps}  loss {step.loss:.4f}  {step.tokens / step.seconds:,.0f} tokens/s")

    with tempfile.TemporaryDirectory() as temporary:
        start = Path(temporary)
        renderer = write_start(start)
        say(f"making {count:,} transcripts")
        rows = transcripts(renderer, micro.PRETRAIN, count=count, habit=PRETRAINING, seed=seed)
        history = train_sft(
            rows, policy=start, out=out, loss="all", init="random", steps=steps, lr=LEARNING_RATE, batch=BATCH,
            seed=seed, on_step=report,
        )  # fmt: skip
    record = {
        "seed": seed,
        "transcripts": count,
        "steps": steps,
        "learning_rate": LEARNING_RATE,
        "batch": BATCH,
        "loss": round(sum(step.loss for step in history[-20:]) / len(history[-20:]), 4),
        "weights_sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "tokenizer": content_digest((out / "tokenizer.json").read_text()),
    }
    write_json(out / "base.json", record)
    return record


def write_start(folder: Path) -> MicroRenderer:
    """Write configuration and tokenizer of the micro policy into ``folder``; the renderer over them."""
    tokenizer = train_tokenizer(tokenizer_texts())
    save_tokenizer(tokenizer, folder)
    config = model_config(tokenizer.get_vocab_size(), end=tokenizer.token_to_id(END), pad=tokenizer.token_to_id(PAD))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return MicroRenderer(folder)


def tokenizer_texts() -> Iterator[str]:
    """Texts that hold every word the suite uses."""
    yield from micro_issue.all_phrases()
    for problem in islice(micro.problems(micro.PRETRAIN), _TOKENIZER_PROBLEMS):
        yield from (problem.issue, Simulation(problem).run(READ), problem.gold.command, problem.fixed)
    yield from _OTHER_TEXTS
    yield from micro_names.VERBS
    yield from micro_names.NOUNS


def model_config(vocabulary: int, *, end: int, pad: int) -> dict[str, Any]:
    """Qwen3, 4 layers of width 128."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the micro policy's base weights.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    print(json.dumps(make_base_policy(arguments.out, seed=arguments.seed), indent=2))


if __name__ == "__main__":
    main()
