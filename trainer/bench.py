"""Training throughput at the micro policy's size, for ``make bench``."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TypedDict

import numpy as np

from trainer.batch import TokenSequence, micro_batches

VOCABULARY = 600
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}


class Figure(TypedDict):
    median: float
    p95: float
    n: int
    unit: str


def measure(*, repeats: int = 5, episodes: int = 32) -> dict[str, Figure]:
    """``trainer.tokens_per_s``: ids of all turns, context included, per second of a whole GRPO step (batching, forward,
    backward, optimizer) on one thread; p95 is the slow end."""
    from trainer.megatron import losses
    from trainer.megatron.learner import Learner

    data = [_episode(random.Random(i)) for i in range(episodes)]
    tokens = sum(len(s.ids) for s in data)
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        learner = Learner(Path(folder), random_weights=True)
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            learner.step(micro_batches(data, max_tokens=2048), losses.grpo(0.2, 0.28), lr=1e-4)
            if repeat:  # the first step allocates
                rates.append(tokens / (time.perf_counter() - started))
    return {
        "trainer.tokens_per_s": {
            "median": statistics.median(rates),
            "p95": sorted(rates)[round(0.05 * (len(rates) - 1))],
            "n": len(rates),
            "unit": "tokens/s",
        }
    }


def _episode(chance: random.Random) -> TokenSequence:
    """About 250 ids in up to 8 turns of about 10 sampled ids, as the micro suite gives."""
    ids: list[int] = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(60, 100))]
    sampled = [False] * len(ids)
    for _ in range(chance.randrange(4, 9)):
        for count, mine in ((chance.randrange(6, 15), True), (chance.randrange(10, 28), False)):
            ids += [chance.randrange(VOCABULARY) for _ in range(count)]
            sampled += [mine] * count
    return TokenSequence(
        ids=np.asarray(ids, np.int64),
        sampled=np.asarray(sampled, np.bool_),
        logprobs=np.full(len(ids), -6.4, np.float32),
        advantage=chance.choice((-1.0, 1.0)),
    )
