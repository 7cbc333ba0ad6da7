"""Read the safetensors of a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from farm.engine.embedded.config import ModelFolderError, read_json


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors, single or sharded. Raises :class:`ModelFolderError`."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        files = [folder / name for name in names]
    elif single.exists():
        files = [single]
    else:
        raise ModelFolderError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelFolderError(f"{file} can't be read as safetensors: {error}") from None
    return tensors
