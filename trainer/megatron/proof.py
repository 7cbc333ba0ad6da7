"""Whether an SGLang server holds the weights that were sent to it, by what it says of them itself.

SGLang takes no checksum with the weights that come over a process group, but ``/weights_checker`` answers with a digest
of every parameter as it holds it: on the CPU of its bytes by SHA-256, on a GPU by a hash of its 32-bit words (seen in
SGLang 0.5.23). Here are the same digests of what was sent, of all that a server holds in a way that is known here: as
it was sent, or query, key and value joined, or gate and up. Not compared are experts (how they are laid out depends on
the kernels), a vocabulary that the server fills up, and, where it cuts matrices into shards or quantizes them, all but
the vectors.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Parts of the names of parameters that a server need not read.
NOT_COMPARED = (".experts.",)

_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PART = re.compile(r"(?<=\.)(?:[qkv]|gate|up)_proj(?=\.)")
_VOCABULARY = re.compile(r"(?:embed_tokens|lm_head)\.weight$")
_VOCABULARY_STEP = 64  # SGLang fills the rows up to a multiple of it
_DTYPES = {
    "float32": torch.float32, "float": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "half": torch.float16,
}  # fmt: skip
_DEVICES = ("cpu", "cuda")

_TILE = 8192  # words
_CHUNK = 256 * _TILE  # at once
_MASK = 0xFFFFFFFF
_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & _MASK)
_STEPS = (0x27D4EB2D, 0x165667B1)
_TURNS = (15, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a server holds its weights. ``dtype``: None for that of the model. ``whole``: matrices are neither cut nor
    quantized."""

    device: str
    dtype: torch.dtype | None
    whole: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Form | None:
        """By ``/server_info``; None when its digests are unknown here."""
        device, dtype = str(info.get("device") or "cuda"), str(info.get("dtype") or "auto")
        if device not in _DEVICES or dtype not in {"auto", *_DTYPES}:
            return None
        whole = int(info.get("tp_size") or 1) == 1 and not info.get("quantization")
        return cls(device=device, dtype=_DTYPES.get(dtype), whole=whole)


class Digests:
    """``by_name``: what a server in this form answers of the weights that were added, as far as that is known."""

    def __init__(self, form: Form) -> None:
        self.by_name: dict[str, str] = {}
        self._form = form
        self._parts: dict[str, dict[str, Tensor]] = {}  # of joined parameters, until they are complete

    def add(self, name: str, tensor: Tensor) -> None:
        """``tensor`` may be kept until the next ones have been added."""
        part = _PART.search(name)
        if any(skipped in name for skipped in NOT_COMPARED) or not (
            self._form.whole or (tensor.dim() == 1 and not part)
        ):
            return
        if _VOCABULARY.search(name) and tensor.shape[0] % _VOCABULARY_STEP:
            return
        if part:
            joined, members = next((joined, them) for joined, them in _JOINED.items() if part[0] in them)
            name = _PART.sub(joined, name)
            found = self._parts.setdefault(name, {})
            found[part[0]] = tensor
            if len(found) < len(members):
                return
            tensor = torch.cat([found[member] for member in members])
            del self._parts[name]
        digest = _digest_of_bytes if self._form.device == "cpu" else digest_of_words
        self.by_name[name] = digest(tensor if self._form.dtype is None else tensor.to(self._form.dtype))

    def against(self, ranks: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
        """How many of these there is an answer to in ``/weights_checker``'s ``ranks``, and the names of those that are
        others there."""
        held = [item for rank in ranks for item in rank["checksums"].items() if item[0] in self.by_name]
        return len(held), sorted({name for name, digest in held if digest != self.by_name[name]})


def _digest_of_bytes(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(memoryview(raw.numpy())).hexdigest()[:16]


def digest_of_words(tensor: Tensor) -> str:
    """Of the 32-bit words ``w`` at positions ``i`` (the last filled up with zeros), made where the tensor is.

    For each tile of 8192 words two sums modulo 2^32 over ``mix(w ^ (i * step + seed) ^ rotated(i))``, each mixed with
    the number of bytes of the whole; they are the halves of a 64-bit number. The sum of these over all tiles is mixed
    once more. ``mix`` is the finalizer of MurmurHash3, the last one that of SplitMix64."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 4 or raw.storage_offset() % 4:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 4)])
    words = raw.view(torch.int32)
    if not words.numel():
        return f"{0:016x}"
    total = 0
    for number, chunk in enumerate(words.split(_CHUNK)):
        at = torch.arange(chunk.numel(), dtype=torch.int64, device=chunk.device) + number * _CHUNK
        high, low = (_tiles(chunk, at, which, words.numel()) for which in range(2))
        total += int(((high << 32) + low).sum())  # modulo 2^64, as is meant
    return f"{_finish(total):016x}"


def _tiles(words: Tensor, at: Tensor, which: int, count: int) -> Tensor:
    """One of the two sums of each tile, as int64 below 2^32."""
    turn = _TURNS[which]
    place = ((at * _STEPS[which] + _SEEDS[which]) ^ (at << turn) ^ ((at & _MASK) >> (32 - turn))) & _MASK
    mixed = _mix((words.to(torch.int64) & _MASK) ^ place)
    mixed = torch.cat([mixed, mixed.new_zeros(-mixed.numel() % _TILE)])
    return _mix((mixed.view(-1, _TILE).sum(1) & _MASK) ^ (count * 4 & _MASK))


def _mix(x: Tensor) -> Tensor:
    """On int64 below 2^32. A product overflows, and its low half is right all the same."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _finish(x: int) -> int:
    every = (1 << 64) - 1
    x &= every
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & every
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & every
    return x ^ (x >> 31)
