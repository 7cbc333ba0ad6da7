"""The recipe of the shipped micro policy: tokenizer, transcripts, pretraining. Reproducible by its seed.

    python -m trainer.base_policy --out datasets/micro/base-policy

1. A tokenizer is trained on the words of the suite.
2. Transcripts of somebody who works nearly at random (``demonstrations.PRETRAINING``) are made on the pretraining
   problems, whose repositories and code shapes are disjoint from the benchmark's; half of them only try edits.
3. A Qwen3 model of 0.85 M parameters is trained on them from random weights (:func:`write_initial_weights`), with the
   loss on *all* ids: predicting the listings as well as the commands is what teaches it to copy.

It takes about 11 minutes on one core.
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

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

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
STEPS = 2500
LEARNING_RATE = 1.5e-3
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
        write_initial_weights(start, seed=seed)
        history = train_sft(
            rows, policy=start, out=out, loss="all", steps=steps, lr=LEARNING_RATE, batch=BATCH, seed=seed,
            on_step=report,
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


def write_initial_weights(folder: Path, *, seed: int) -> None:
    """Write random weights beside the configuration in ``folder``: normal, standard deviation ``initializer_range``.

    The output projection of every attention head is the transpose of its value projection: what a head reads it hands
    on as it is, from the first step on. With that, and a standard deviation near 1/sqrt(width) where 0.02 is usual, a
    model of this size learns to copy from a listing in a third of the steps."""
    config = json.loads((folder / "config.json").read_text())
    rng = np.random.default_rng(seed)
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]

    def normal(*shape: int) -> NDArray[np.float32]:
        return np.asarray(config["initializer_range"] * rng.standard_normal(shape), np.float32)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, np.float32)

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], width), "model.norm.weight": ones(width)}
    for number in range(config["num_hidden_layers"]):
        values = normal(keys, head, width)
        layer = {
            "input_layernorm": ones(width),
            "self_attn.q_proj": normal(queries * head, width),
            "self_attn.k_proj": normal(keys * head, width),
            "self_attn.v_proj": values.reshape(keys * head, width),
            "self_attn.o_proj": np.repeat(values, queries // keys, axis=0).reshape(queries * head, width).T,
            "self_attn.q_norm": ones(head),
            "self_attn.k_norm": ones(head),
            "post_attention_layernorm": ones(width),
            "mlp.gate_proj": normal(inner, width),
            "mlp.up_proj": normal(inner, width),
            "mlp.down_proj": normal(width, inner),
        }
        for name, value in layer.items():
            weights[f"model.layers.{number}.{name}.weight"] = np.ascontiguousarray(value)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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
        "initializer_range": 0.08,
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
