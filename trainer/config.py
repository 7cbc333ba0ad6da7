"""Configuration of ``trainer train``: a TOML table or ``--set key=value`` -> one closed, frozen model.

What farm and trainer must agree on (group size, groups per step, staleness, mode) stands once, in the run folder's
``config.json``; :func:`batch_rules` reads it from there.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from farm.errors import UsageError
from trainer.buckets import DEFAULT_BUCKET_BYTES
from trainer.group import BatchRules
from trainer.layout import Layout, check_ranks

PROFILES = Path(__file__).parent / "profiles"
"""Shipped configurations; ``--config NAME`` finds one here when there is no file of that name."""

_PUSH_SHARE = 0.8


class ParallelConfig(BaseModel):
    """How the model lies on many ranks (see :class:`trainer.layout.Layout`). The default is one rank.

    ``distributed_optimizer``: optimizer state is divided over the ranks that hold the same weights. ``recompute``:
    activations that are computed again in the backward pass: none, those of the MLP (the experts), or whole layers.
    ``packing``: sequences of a micro-batch stand one behind the other instead of being padded to the longest.
    ``implementation``: Megatron's own layers, or Transformer Engine's (GPUs only). ``timeout_s``: how long a rank waits
    for the others within a step before it gives up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    distributed_optimizer: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    packing: bool = False
    implementation: Literal["local", "transformer_engine"] = "local"
    timeout_s: float = Field(default=600.0, gt=0)

    @property
    def layout(self) -> Layout:
        return Layout(ranks=self.ranks, tensor=self.tensor, pipeline=self.pipeline, expert=self.expert)


ONE_RANK = ParallelConfig()


class PushConfig(BaseModel):
    """How weights get to the engines where the farm's configuration says that they are pushed (``engine.weights``).

    ``address``: this machine's, as the engines reach it; empty: that of the route to them. ``backend``: "nccl" between
    GPUs. ``bucket_bytes``: how much goes with one request; the trainer holds two buckets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = ""
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: int = Field(default=DEFAULT_BUCKET_BYTES, ge=1)


class TrainerConfig(BaseModel):
    """Adam at a constant rate after a linear warm-up, no weight decay, no KL term.

    ``micro_batch_tokens`` bounds rows x length of one forward. ``checkpoint_every`` counts steps; ``save_timeout_s``
    bounds each checkpoint and each publication. ``keep_policies``: how many of the newest published policies keep their
    weights, beside the first; an engine must have loaded a policy before this many newer ones are out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(default=4e-4, gt=0, le=1)
    warmup_steps: int = Field(default=3, ge=0)
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.28, gt=0)
    clip_grad: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=2048, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    keep_policies: int = Field(default=4, ge=1)
    save_timeout_s: float = Field(default=60.0, gt=0)
    seed: int = Field(default=0, ge=0)
    parallel: ParallelConfig = ONE_RANK
    push: PushConfig = PushConfig()

    def learning_rate(self, step: int) -> float:
        """For the step that starts from policy ``step`` (from 0)."""
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))


_TABLES: Mapping[Any, type[BaseModel]] = {"parallel": ParallelConfig, "push": PushConfig}


def load_config(path: Path | None = None, *, sets: Sequence[str] = ()) -> TrainerConfig:
    """Defaults, then the file's keys (at the top or in a table ``[trainer]``), then ``sets`` (``parallel.ranks=2`` for
    a key of a table). ``path`` may be the name of a shipped profile. Raises ``UsageError``."""
    given: dict[str, Any] = {}
    where = "configuration"
    if path is not None:
        where = str(path)
        given = _read_toml(_profile(path))
    for item in sets:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {item!r}: must be key=value, for example lr=2e-4")
        table, dot, key = name.strip().partition(".")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
            if not dot:
                given[table] = value
            elif isinstance(given.setdefault(table, {}), dict):
                given[table] = given[table] | {key: value}
        except tomllib.TOMLDecodeError:
            raise UsageError(f"--set {item!r}: {text!r} is not a TOML value, for example lr=2e-4") from None
    try:
        config = TrainerConfig.model_validate(given)
    except ValidationError as error:
        raise UsageError(_explain(error, where)) from None
    check_ranks(config.parallel.layout, where=f"{where}: parallel")
    return config


def batch_rules(run_config: Mapping[str, Any], *, where: str) -> BatchRules:
    """The rules in a run's ``config.json``. Raises ``UsageError`` when the run is not one to train on."""
    try:
        rollout = run_config["rollout"]
        sync = rollout["mode"] == "sync"
        groups = int(rollout["groups_per_step"])
        rules = BatchRules(
            groups_per_step=max(1, groups),
            min_attempts=int(rollout["min_attempts"]),
            max_staleness=0 if sync else int(rollout["max_staleness"]),
            wait_for_all=sync,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where}: not a farm configuration ({type(error).__name__}: {error})") from None
    if groups < 1 or rollout.get("purpose", "rl") != "rl":
        raise UsageError(
            f"{where}: rollout.groups_per_step is {groups} and rollout.purpose {rollout.get('purpose')!r}: nobody "
            "trains on this run; start one with groups_per_step of 1 or more and purpose 'rl'"
        )
    return rules


def push_time(run_config: Mapping[str, Any]) -> float | None:
    """How many seconds a push of weights to the run's engines may take; None when they load policies from disk. It must
    have ended, whatever became of it, when the farm stops waiting for it."""
    engine = run_config.get("engine", {})
    return _PUSH_SHARE * float(engine["push_wait_s"]) if engine.get("weights") == "push" else None


def _profile(path: Path) -> Path:
    shipped = PROFILES / f"{path.name}.toml"
    return shipped if not path.exists() and path.name == str(path) and shipped.exists() else path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = ", ".join(sorted(profile.stem for profile in PROFILES.glob("*.toml")))
        raise UsageError(
            f"{path}: no such configuration file; give an existing TOML file to --config, or a shipped profile: "
            f"{shipped}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't read the configuration file ({error}); give a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML ({error}); correct that line") from None
    table = data.get("trainer", data)
    if not isinstance(table, dict):
        raise UsageError(f"{path}: trainer must be a table, given {table!r}; write [trainer] and keys below it")
    return dict(table)


def _explain(error: ValidationError, where: str) -> str:
    """The first problem, as one line."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        allowed = sorted((_TABLES[first["loc"][0]] if len(first["loc"]) > 1 else TrainerConfig).model_fields)
        near = difflib.get_close_matches(str(first["loc"][-1]), allowed, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: {name}: unknown key; {hint}allowed: {', '.join(allowed)}"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where}: {name}: given {first['input']!r}, but {message}; correct the value"
