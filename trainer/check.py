"""``trainer check``: whether a configuration can train a model on given GPUs, said before anything is started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from trainer.config import TrainerConfig
from trainer.hf_config import read_hf_config
from trainer.layout import check_layout
from trainer.memory import GIB, Need, Recompute, estimate, gpu_bytes
from trainer.shapes import MODELS, active_parameters, known_model, parameters

_UNITS = {"gb": 1e9, "gib": float(GIB)}
_WORDS = {
    "weights": "weights",
    "gradients": "gradients (float32)",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits, if every token has a loss",
    "publish": "publishing (not while activations are there)",
    "reserved": "context, communication, fragmentation (assumed)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``need``: of the rank that needs most; ``gpu_bytes``: what one GPU has."""

    need: Need
    gpu_bytes: float
    parameters: int
    active_parameters: int

    @property
    def fits(self) -> bool:
        return self.need.total <= self.gpu_bytes


def model_config(model: str) -> dict[str, Any]:
    """``config.json`` of a model folder, or what is known of a published model. Raises ``UsageError``."""
    folder = Path(model)
    if folder.is_dir():
        return read_hf_config(folder)
    if model not in MODELS:
        raise UsageError(f"model {model!r} is neither a model folder nor known; known: {', '.join(MODELS)}")
    return known_model(model)


def memory_bytes(text: str) -> float:
    """The memory of a GPU by its name (``h200``) or as a size (``96GiB``). Raises ``UsageError``."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", text, re.IGNORECASE)
    return float(size[1]) * _UNITS[size[2].lower()] if size else gpu_bytes(text)


def check(config: TrainerConfig, hf: Mapping[str, Any], *, memory: float) -> Fit:
    """Raises ``UsageError`` when the model can't be laid out so; whether it fits is in the answer."""
    parallel = config.parallel
    check_layout(parallel.layout, hf)
    return Fit(
        need=_need(config, hf, parallel.recompute),
        gpu_bytes=memory,
        parameters=parameters(hf),
        active_parameters=active_parameters(hf),
    )


def remedies(config: TrainerConfig, hf: Mapping[str, Any], *, memory: float) -> list[str]:
    """Single changes that would make it fit, the cheapest in speed first."""
    parallel = config.parallel
    found = []
    if not parallel.distributed_optimizer:
        changed = config.model_copy(update={"parallel": parallel.model_copy(update={"distributed_optimizer": True})})
        if _need(changed, hf, parallel.recompute).total <= memory:
            found.append("parallel.distributed_optimizer=true")
    if parallel.precision == "float32":
        changed = config.model_copy(update={"parallel": parallel.model_copy(update={"precision": "bfloat16"})})
        if _need(changed, hf, parallel.recompute).total <= memory:
            found.append('parallel.precision="bfloat16"')
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    for mode in modes[modes.index(parallel.recompute) + 1 :]:
        if _need(config, hf, mode).total <= memory:
            found.append(f'parallel.recompute="{mode}"')
            break
    standing = _need(config.model_copy(update={"micro_batch_tokens": 1}), hf, parallel.recompute).total
    per_token = (_need(config, hf, parallel.recompute).total - standing) / max(1, config.micro_batch_tokens - 1)
    if standing < memory:
        most = int((memory - standing) / per_token) // 1024 * 1024
        if 0 < most < config.micro_batch_tokens:
            found.append(f"micro_batch_tokens={most}")
    return found or ["more GPUs with a larger parallel.tensor, expert or pipeline, or GPUs with more memory"]


def table(fit: Fit, config: TrainerConfig) -> list[str]:
    """For people, one line for each part."""
    layout = config.parallel.layout
    lines = [
        f"{fit.parameters / 1e9:.2f} B parameters, {fit.active_parameters / 1e9:.2f} B active, on {layout.ranks} "
        f"ranks: tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}, experts over "
        f"{layout.expert} ({layout.expert_data} copies)",
        f"per GPU, at {config.micro_batch_tokens} tokens a micro-batch:",
    ]
    lines += [f"  {size / GIB:8.2f} GiB  {_WORDS[part]}" for part, size in asdict(fit.need).items()]
    lines.append(f"  {fit.need.total / GIB:8.2f} GiB  in all, of {fit.gpu_bytes / GIB:.2f} GiB")
    return lines


def _need(config: TrainerConfig, hf: Mapping[str, Any], recompute: Recompute) -> Need:
    return estimate(
        hf,
        config.parallel.layout,
        tokens=config.micro_batch_tokens,
        precision=config.parallel.precision,
        distributed_optimizer=config.parallel.distributed_optimizer,
        recompute=recompute,
    )
