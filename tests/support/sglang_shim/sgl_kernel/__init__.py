"""For tests only: stands in for SGLang's CUDA kernels, of which there is no build for CPUs on PyPI.

Without AMX SGLang computes by torch's own operators; it only imports this. Whatever is called after all says so.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; this is a CPU without it")

    return kernel
