"""Megatron-core on a machine without CUDA: every deviation from stock Megatron, in one place.

Importing this module imports Megatron; all modules of this package get it through ``trainer.megatron``'s
``__init__``. Where CUDA exists nothing is changed: :func:`cuda_literals` is then a null context.

What stock Megatron-core 0.16 insists on, and the way round:

* **C1** its ``jit_fuser`` is ``torch.compile``, applied as a decorator at import. Merely applying it loads Inductor
  (4 s of a 7 s import) and its result needs a C++ compiler on CPU. During the import ``torch.compile`` is identity.
* **C2** ``torch.cuda.current_device()`` is called for the device of new tensors (rotary embedding, gradient buffers,
  MoE router). It answers with the CPU device.
* **C3** literals: ``device="cuda"`` in the schedule, the optimizer and gradient clipping, and a comparison of
  ``Tensor.type()`` with ``"torch.cuda.FloatTensor"``. A torch function mode rewrites both. It costs 1.4 µs per torch
  call, so it is entered only where the literals are (:func:`cuda_literals`), and left for the model's forward
  (:func:`plain_torch`).
* **C4** (a slip of Megatron, wherever Transformer Engine is missing) the MoE router looks for the name
  ``te_general_gemm`` that only Transformer Engine defines. It is given the value None.

Only with many ranks, or where activations are computed again (:func:`adapt_to_ranks`):

* **C5** recomputation saves and restores CUDA's random state, and sequence parallelism switches to one of its own for
  dropout. Nothing here draws random numbers in a forward pass (no dropout), so no state is kept.
* **C6** the all-to-all token dispatcher copies its split sizes to the CPU on a CUDA stream. On the CPU they only have
  to become NumPy arrays, which ``all_to_all_single`` accepts.

* **C7** pipeline stages end each exchange with ``torch.cuda.synchronize()``. It does nothing.

Not needed with the modules chosen in :mod:`trainer.megatron.model`, hence not here: Transformer Engine stubs.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MODULES = ("distributed", "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel", "transformer.moe.moe_utils")
HAVE_CUDA = torch.cuda.is_available()


def _not_compiled(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda f: f


def _import_megatron() -> None:
    compile_ = torch.compile
    if not HAVE_CUDA:
        torch.compile = _not_compiled  # C1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one line for each of Apex, Transformer Engine, ... that is missing
            for name in _MODULES:
                importlib.import_module(f"megatron.core.{name}")
    finally:
        torch.compile = compile_
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # C4


class _CudaLiterals(TorchFunctionMode):
    """C3."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def cuda_literals() -> contextlib.AbstractContextManager[Any]:
    """Enter around calls into Megatron's schedule and optimizer."""
    return contextlib.nullcontext() if HAVE_CUDA else _CudaLiterals()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron warns about its own calls to itself, on every call; nothing there is for us to act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
        yield


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Leave :func:`cuda_literals` for a hot region that holds no such literals (the model's forward)."""
    if HAVE_CUDA:
        yield
    else:
        with torch._C.DisableTorchFunction():
            yield


def adapt_to_ranks() -> None:
    """C5 to C7; safe to call again, nothing where CUDA exists."""
    if HAVE_CUDA:
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    torch.cuda.synchronize = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *_, **__: None
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none on a CPU"
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _splits_as_arrays


def _splits_as_arrays(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    if point == dispatcher.cuda_dtoh_point and not dispatcher.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            value = getattr(dispatcher, name)
            if torch.is_tensor(value):
                setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


_import_megatron()
if not HAVE_CUDA:
    torch.cuda.current_device = lambda: torch.device("cpu")  # C2
