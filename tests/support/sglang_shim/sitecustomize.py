"""For tests only: lets SGLang start on a machine without CUDA.

The torchvision of PyPI is linked against CUDA, so its operators are not there, and importing it fails where it
describes them. Their schemas are all that SGLang's import needs. Nothing happens in a process that does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_keep: list[Any] = []


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname == "torchvision" and not _keep:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in _SCHEMAS:
                library.define(schema)
            _keep.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
