"""Checkpoints of many ranks: one folder per step, one file per rank, loadable on any other layout.

``step-000012/`` holds ``rank-00000.pt`` … and ``checkpoint.json``. A rank's file holds *pieces*: of a weight (by its
canonical name and the cut that tensor parallelism made) a flat range, in float32, with Adam's two moments of the same
range. Without the distributed optimizer a range is the whole part and only one of the ranks that hold the same part
writes it; with it, each rank writes the range that it owns. Whoever loads puts the pieces of each of *its* weights
together, whole, and takes its own part and range of them: so any layout loads any other's checkpoint to the same bytes.

Whole or not there (Rule 2): every rank writes and flushes its file into a folder with a temporary name, all meet, and
rank 0 adds ``checkpoint.json`` and renames the folder.

Why not Megatron's ``dist_checkpointing``: its writers fork, a manager process is started that outlives a killed rank,
and with torch's Adam the step count of a resumed run is silently wrong (docs/adr/0005).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor

from farm.durable import REAL_DISK, Disk, storage_errors, write_json
from farm.errors import UsageError
from trainer.config import ParallelConfig
from trainer.megatron.sharding import Cut, cut_of, local_parameters, part_of, part_shape, whole_of
from trainer.shapes import Shape, count, is_expert, megatron_shapes

SCHEMA_VERSION = 1
_NAME = re.compile(r"step-(\d{6,})")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Sharded(Protocol):
    """What of a learner is saved and loaded here."""

    model: torch.nn.Module
    hf: dict[str, Any]
    parallel: ParallelConfig


@dataclass(frozen=True, slots=True)
class _Owned:
    """Range [start, end) of this rank's part of a weight, as the optimizer holds it: ``main`` is the float32 weight,
    ``state`` what Adam keeps of it, ``group`` its parameter group."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


def steps(folder: Path) -> list[int]:
    """Steps that have such a checkpoint, ascending."""
    names = (_NAME.fullmatch(p.name) for p in folder.glob("step-*") if (p / "checkpoint.json").is_file())
    return sorted(int(match[1]) for match in names if match)


def remove_strays(folder: Path, disk: Disk = REAL_DISK) -> None:
    """What a crash left half-written. For one rank, before any other writes."""
    for stray in folder.glob("step-*.tmp"):
        if stray.is_dir():
            disk.remove_tree(stray)


def save(
    learner: Sharded,
    optimizer: MegatronOptimizer,
    folder: Path,
    step: int,
    *,
    loop: Mapping[str, Any],
    keep: int,
    name: str,
    disk: Disk = REAL_DISK,
) -> None:
    """Called on all ranks with the same temporary ``name``. Returns when the checkpoint is in place.

    Raises :class:`farm.errors.FarmError` (``disk_full``, ``storage``) on the rank whose disk fails; the others wait in
    vain then, and are ended with it."""
    rank = torch.distributed.get_rank()
    temporary, path = folder / name, folder / f"step-{step:06d}"
    with storage_errors(f"{path}: cannot write the checkpoint"):
        temporary.mkdir(parents=True, exist_ok=True)
        record = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "pieces": list(_pieces(learner, optimizer)),
            "rng": torch.get_rng_state(),
        }
        disk.write(temporary / f"rank-{rank:05d}.pt", lambda file: torch.save(record, file))
        torch.distributed.barrier()
        if rank == 0:
            head = {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "ranks": learner.parallel.ranks,
                "parallel": learner.parallel.model_dump(),
                "loop": dict(loop),
            }
            write_json(temporary / "checkpoint.json", head, disk=disk)
            disk.sync_folder(temporary)
            if path.exists():  # a step that is done again after a resume from an older checkpoint
                disk.rename(path, folder / f"{name}.old.tmp")
            disk.rename(temporary, path)
            disk.sync_folder(folder)
            for old in steps(folder)[:-keep]:
                disk.remove_tree(folder / f"step-{old:06d}")
            for stray in folder.glob(f"{name}.old.tmp"):
                disk.remove_tree(stray)
        torch.distributed.barrier()


def load(learner: Sharded, optimizer: MegatronOptimizer, folder: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Load step ``step`` into this rank; its (step, loop). Raises ``UsageError`` for a checkpoint of another schema
    version, of another model, or that can't be read."""
    path = folder / f"step-{step:06d}"
    try:
        head = json.loads((path / "checkpoint.json").read_text())
        if head["schema_version"] != SCHEMA_VERSION:
            raise UsageError(
                f"{path}: schema version {head['schema_version']}, this program reads {SCHEMA_VERSION}; use a new run "
                "folder"
            )
        # mmap: of the other ranks' files only what is needed here is read.
        files = [
            torch.load(path / f"rank-{rank:05d}.pt", map_location="cpu", weights_only=True, mmap=True)
            for rank in range(head["ranks"])
        ]
    except UsageError:
        raise
    except Exception as error:  # torch raises whatever its unpickler meets
        raise UsageError(f"{path}: not a readable checkpoint ({type(error).__name__}: {error}); remove it") from error
    pieces: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for piece in file["pieces"]:
            pieces.setdefault(piece["name"], []).append(piece)
    shapes = megatron_shapes(learner.hf)
    names = {parameter: name for name, parameter in local_parameters(learner.model, learner.hf).items()}
    tensor = (mpu.get_tensor_model_parallel_rank(), learner.parallel.tensor)
    with torch.no_grad():
        for parameter, name in names.items():
            part = _own_part(path, pieces, name, "weight", shapes, tensor)
            parameter.copy_(part)
        for owned in _owned(optimizer):
            name = names[owned.parameter]
            for key in ("weight", *_MOMENTS):
                flat = _own_part(path, pieces, name, key, shapes, tensor).reshape(-1)[owned.start : owned.end]
                if key == "weight":
                    owned.main.view(-1).copy_(flat)
                else:
                    owned.state[key] = flat.to(owned.main.device, torch.float32).clone().view(owned.main.shape)
            _set_adam_step(owned, pieces[name][0]["adam_step"])
    if head["ranks"] == learner.parallel.ranks:
        torch.set_rng_state(files[torch.distributed.get_rank()]["rng"].clone())
    return int(head["step"]), head["loop"]


# ------------------------------------------------------------------------------------------------ pieces


def _pieces(learner: Sharded, optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """What this rank writes."""
    names = {parameter: name for name, parameter in local_parameters(learner.model, learner.hf).items()}
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    for owned in _owned(optimizer):
        name = names[owned.parameter]
        if not is_expert(name) and cut_of(name) is Cut.WHOLE and tensor_rank > 0:
            continue  # tensor rank 0 has the same
        if not learner.parallel.distributed_optimizer and _replica(name) > 0:
            continue
        yield {
            "name": name,
            "tensor": [tensor_rank if cut_of(name) is not Cut.WHOLE else 0, learner.parallel.tensor],
            "start": owned.start,
            "end": owned.end,
            "adam_step": _adam_step(owned),
            "weight": _flat(owned.main),
            **{key: _flat(_moment(owned, key)) for key in _MOMENTS},
        }


def _flat(tensor: Tensor) -> Tensor:
    """On the CPU, in float32, and with a storage of its own: torch saves a view with all that it is a view of."""
    flat = tensor.detach().view(-1).to("cpu", torch.float32)
    return flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()


def _replica(name: str) -> int:
    """0 on exactly one of the ranks that hold the same part of a weight."""
    return int(mpu.get_expert_data_parallel_rank() if is_expert(name) else mpu.get_data_parallel_rank())


def _own_part(
    path: Path,
    pieces: Mapping[str, list[dict[str, Any]]],
    name: str,
    key: str,
    shapes: Mapping[str, Shape],
    tensor: tuple[int, int],
) -> Tensor:
    """This rank's part of a weight, or of one of its moments, put together from all pieces."""
    cut, shape = cut_of(name), shapes[name]
    found = pieces.get(name, [])
    if not found:
        raise UsageError(f"{path}: does not hold {name}; it is a checkpoint of another model")
    size = 1 if cut is Cut.WHOLE else int(found[0]["tensor"][1])
    one = part_shape(shape, cut, size)
    parts = [torch.empty(count(one)) for _ in range(size)]
    filled = 0
    for piece in found:
        parts[piece["tensor"][0]][piece["start"] : piece["end"]] = piece[key]
        filled += piece["end"] - piece["start"]
    if filled != count(one) * size:
        raise UsageError(f"{path}: holds {filled} of {count(one) * size} values of {name}; remove it")
    return part_of(whole_of([part.view(one) for part in parts], cut), cut, *tensor)


# ------------------------------------------------------------------------------------------------ the optimizer


def _owned(optimizer: MegatronOptimizer) -> Iterator[_Owned]:
    """What each of Megatron's optimizers owns on this rank."""
    if isinstance(optimizer, ChainedOptimizer):
        for one in optimizer.chained_optimizers:
            yield from _owned(one)
    elif isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            at = optimizer._get_model_param_range_map(parameter)["param"]
            settings = optimizer.optimizer.param_groups[group]
            main = settings["params"][order]
            yield _Owned(parameter, at.start, at.end, main, optimizer.optimizer.state[main], settings)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        mains = {
            id(main): parameter
            for parameters, copies in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
            for parameter, main in zip(parameters, copies, strict=True)
        }
        for settings in optimizer.optimizer.param_groups:
            for main in settings["params"]:
                parameter = mains.get(id(main), main)
                yield _Owned(parameter, 0, parameter.numel(), main, optimizer.optimizer.state[main], settings)
    elif isinstance(optimizer, FP32Optimizer):
        for settings in optimizer.optimizer.param_groups:
            for main in settings["params"]:
                yield _Owned(main, 0, main.numel(), main, optimizer.optimizer.state[main], settings)
    else:
        raise TypeError(f"{type(optimizer).__name__}: an optimizer whose state is not known here")


def _moment(owned: _Owned, key: str) -> Tensor:
    """Zeros before the first step, which is what Adam starts from."""
    value = owned.state.get(key)
    return torch.zeros_like(owned.main, dtype=torch.float32) if value is None else value


def _adam_step(owned: _Owned) -> int:
    """torch's Adam counts for each tensor, Transformer Engine's for each group."""
    return int(owned.state["step"] if "step" in owned.state else owned.group.get("step", 0))


def _set_adam_step(owned: _Owned, step: int) -> None:
    if _is_torch_adam(owned.group):
        owned.state["step"] = torch.tensor(float(step))
    else:
        owned.group["step"] = step


def _is_torch_adam(group: Mapping[str, Any]) -> bool:
    """Only torch's Adam has these settings in its groups."""
    return "amsgrad" in group and "foreach" in group
