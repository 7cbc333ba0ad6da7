"""Hugging Face Qwen3 / Qwen3-MoE weights <-> Megatron ``GPTModel`` weights, exactly, on any number of ranks.

Only names and layouts change: Megatron keeps query, key and value of a layer in one matrix, grouped by key-value
head, and gate and up projections in another. No arithmetic, so a round trip is bit-equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farm.errors import UsageError
from trainer.buckets import Bucket, TensorInfo, plan_buckets
from trainer.megatron.sharding import cut_of, local_parameters, part_of, part_shape
from trainer.publish import copy_hf
from trainer.shapes import heads, hf_parts, hf_shapes, megatron_shapes

WEIGHTS = "model.safetensors"
FILE_BYTES = 4 << 30
"""A model above this many bytes is written in several files, as Hugging Face writes them."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ------------------------------------------------------------------------------------------ names and layouts


def split(name: str, weight: Tensor, hf: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """One whole Megatron weight under Hugging Face names. Tensors may share its memory."""
    names = [part for part, _ in hf_parts(name, hf)]
    if name.endswith("linear_qkv.weight"):
        per_group, groups, width = heads(hf)
        parts = weight.view(groups, per_group + 2, width, -1).split([per_group, 1, 1], dim=1)
        return [(part, x.reshape(-1, weight.shape[-1])) for part, x in zip(names, parts, strict=True)]
    return list(zip(names, weight.chunk(len(names), dim=0), strict=True))


def join(name: str, parts: Sequence[Tensor], hf: Mapping[str, Any]) -> Tensor:
    """The inverse of :func:`split`: ``parts`` in the order of ``hf_parts``."""
    if name.endswith("linear_qkv.weight"):
        per_group, groups, width = heads(hf)
        rows = [x.view(groups, n, width, x.shape[-1]) for x, n in zip(parts, (per_group, 1, 1), strict=True)]
        return torch.cat(rows, dim=1).reshape(-1, parts[0].shape[-1])
    return torch.cat(list(parts), dim=0) if len(parts) > 1 else parts[0]


def to_hf(state: Mapping[str, Tensor], hf: Mapping[str, Any]) -> dict[str, Tensor]:
    """Whole Megatron weights under Hugging Face names. Tensors may share memory with ``state``."""
    return {part: x for name, weight in state.items() for part, x in split(name, weight.detach(), hf)}


def from_hf(weights: Mapping[str, Tensor], hf: Mapping[str, Any]) -> dict[str, Tensor]:
    """Hugging Face ``weights`` under Megatron's names. ``KeyError`` names a missing weight."""
    return {name: join(name, [weights[part] for part, _ in hf_parts(name, hf)], hf) for name in megatron_shapes(hf)}


# ------------------------------------------------------------------------------------------ model folders


class HfWeights(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder (one safetensors file, or several with an index), read when asked for.

    Use it in a ``with``. Raises ``UsageError`` when the folder or a file can't be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}

    def __enter__(self) -> HfWeights:
        index = self._folder / f"{WEIGHTS}.index.json"
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [WEIGHTS]
        for name in names:
            try:
                file = safe_open(self._folder / name, framework="pt")
                self._where |= dict.fromkeys(file.keys(), name)
                self._files[name] = file
            except FileNotFoundError:
                raise UsageError(f"{self._folder} is not a model folder: it has no {name}") from None
            except (OSError, SafetensorError) as error:
                raise UsageError(f"{self._folder / name} can't be read as safetensors: {error}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.clear()

    def __getitem__(self, name: str) -> Tensor:
        file = self._where[name]
        try:
            tensor: Tensor = self._files[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{self._folder / file} can't be read as safetensors: {error}") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_hf_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder. Raises ``UsageError``."""
    with HfWeights(folder) as weights:
        return dict(weights)


def load_into(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole Megatron-named ``weights`` into a ``model`` that is whole on this rank.

    Raises ``UsageError`` when names or shapes do not fit."""
    # ``_extra_state`` entries are Transformer Engine's place for quantisation scales; there are none here.
    own = {k for k in model.state_dict() if not k.endswith("_extra_state")}
    if own != set(weights):
        raise UsageError(f"weights do not fit the model: {sorted(own ^ set(weights))[:4]} are missing or unknown")
    try:
        model.load_state_dict(dict(weights), strict=False)
    except RuntimeError as error:
        raise UsageError(f"weights do not fit the model: {error}") from None


def load_hf(model: torch.nn.Module, folder: Path, hf: Mapping[str, Any], *, tensor: tuple[int, int] = (0, 1)) -> None:
    """Copy the weights of a Hugging Face folder into what of a Megatron ``model`` is on this rank, the tensor rank
    ``tensor`` = (rank, size). Only what this rank needs is read. Raises ``UsageError``."""
    shapes = megatron_shapes(hf)
    with HfWeights(folder) as weights, torch.no_grad():
        for name, parameter in local_parameters(model, hf).items():
            try:
                whole = join(name, [weights[part] for part, _ in hf_parts(name, hf)], hf)
            except KeyError as error:
                raise UsageError(f"{folder} does not hold the weight {error} that its config.json calls for") from None
            except RuntimeError as error:
                raise UsageError(f"weights do not fit the model: {name}: {error}") from None
            if tuple(whole.shape) != shapes[name]:
                raise UsageError(
                    f"weights do not fit the model: {name} is {list(whole.shape)}, by config.json {list(shapes[name])}"
                )
            cut = cut_of(name)
            if tuple(parameter.shape) != part_shape(shapes[name], cut, tensor[1]):
                raise UsageError(f"weights do not fit the model: {name} is {list(parameter.shape)} on this rank")
            parameter.copy_(part_of(whole, cut, *tensor))


def hf_dtype(hf: Mapping[str, Any]) -> str:
    """The type in which the model's weights are published."""
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float32")


def tensor_infos(hf: Mapping[str, Any], *, dtype: str | None = None) -> list[TensorInfo]:
    """All weights of the model as Hugging Face has them, in the order in which :func:`hf_weights` gives them."""
    return [TensorInfo(name=n, dtype=dtype or hf_dtype(hf), shape=s) for n, s in hf_shapes(hf).items()]


def hf_weights(
    weights: Iterable[tuple[str, Tensor]], hf: Mapping[str, Any], *, dtype: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole Megatron ``weights`` one by one under Hugging Face names, in the published type."""
    to = DTYPES[dtype or hf_dtype(hf)]
    for name, weight in weights:
        for part, tensor in split(name, weight, hf):
            yield part, tensor.to(to).contiguous()


def in_buckets(
    tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[Bucket]
) -> Iterator[tuple[Bucket, list[Tensor]]]:
    """``tensors`` in the portions that were planned of them. Raises ``ValueError`` when they are not those planned."""
    source = iter(tensors)
    for bucket in buckets:
        portion = []
        for info in bucket.tensors:
            name, tensor = next(source, ("nothing", torch.empty(0)))
            if name != info.name or tuple(tensor.shape) != info.shape:
                raise ValueError(f"expected {info.name} {info.shape}, got {name} {tuple(tensor.shape)}")
            portion.append(tensor)
        yield bucket, portion


def write_hf(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    hf: Mapping[str, Any],
    *,
    source: Path,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a complete Hugging Face folder: whole Megatron ``weights`` in the model's order, every other file
    (configuration, tokenizer) copied from ``source``. ``folder`` must exist; making it durable is the caller's part.

    The bytes depend on the weights alone, not on how many ranks they came from."""
    files = plan_buckets(tensor_infos(hf), max_bytes=file_bytes)
    where: dict[str, str] = {}
    for file, tensors in in_buckets(hf_weights(weights, hf), files):
        name = WEIGHTS if len(files) == 1 else f"model-{file.number + 1:05d}-of-{len(files):05d}.safetensors"
        portion = {info.name: tensor.cpu() for info, tensor in zip(file.tensors, tensors, strict=True)}
        save_file(portion, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(portion, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(file.bytes for file in files)}, "weight_map": where}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    copy_hf(source, folder, weights=False)
