"""The receiving end of weights that a trainer sends over a process group of torch.distributed, as SGLang has it.

A group is named by the trainer, who is rank 0 and keeps the store; its keys are laid out as torch's own
``init_process_group`` lays them out under that name, so any of its backends at the other end finds them. Everything
here blocks, for ``TIMEOUT_S`` at most, and belongs into a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT_S = 60.0


class WeightGroupError(Exception):
    """The request can't be carried out; the message is one line (HTTP 400)."""


class WeightGroups:
    """The groups that this server is a member of, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroupGloo] = {}

    def join(self, body: Mapping[str, Any]) -> None:
        """Become rank ``rank_offset`` of ``world_size``; returns once all are there. Raises WeightGroupError."""
        name = str(body.get("group_name", "weight_update_group"))
        if name in self._groups:
            raise WeightGroupError(f"group {name} exists already; destroy it first")
        if body.get("backend") != "gloo":
            raise WeightGroupError(f"backend {body.get('backend')!r} is not supported on this machine, only 'gloo'")
        timeout = timedelta(seconds=TIMEOUT_S)
        try:
            rank, size = int(body["rank_offset"]), int(body["world_size"])
            store = TCPStore(
                str(body["master_address"]), int(body["master_port"]), size, is_master=False, timeout=timeout
            )
            prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
            self._groups[name] = ProcessGroupGloo(prefixed, rank, size, timeout)
        except KeyError as error:
            raise WeightGroupError(f"{error.args[0]} is missing") from None
        except (ValueError, TypeError, RuntimeError) as error:
            raise WeightGroupError(f"Failed to initialize custom process group: {_first_line(error)}.") from None

    def receive(self, body: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors ``names`` of ``dtypes`` and ``shapes``, each by one broadcast from rank 0, in order. Raises
        WeightGroupError, also when they are not those of ``checksum``, where that is given (SGLang has no such field
        and passes it over)."""
        name = str(body.get("group_name", "weight_update_group"))
        group = self._groups.get(name)
        if group is None:
            raise WeightGroupError(
                f"Group {name} not in [{', '.join(self._groups)}]. Please call init_weights_update_group"
            )
        names: Sequence[str] = body.get("names") or ()
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            tensors = {
                key: torch.empty([int(n) for n in shape], dtype=getattr(torch, str(dtype)))
                for key, dtype, shape in zip(names, body["dtypes"], body["shapes"], strict=True)
            }
            pending = [group.broadcast([tensor], options) for tensor in tensors.values()]
            for work in pending:
                work.wait(timedelta(seconds=TIMEOUT_S))
        except KeyError as error:
            raise WeightGroupError(f"{error.args[0]} is missing") from None
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise WeightGroupError(f"Failed to update parameter online: {_first_line(error)}.") from None
        expected = body.get("checksum")
        if expected is not None and (found := checksum(tensors.values())) != expected:
            raise WeightGroupError(f"Failed to update parameter online: checksum {found}, sent was {expected}.")
        return tensors

    def leave(self, body: Mapping[str, Any]) -> None:
        """Raises WeightGroupError for a group that is none."""
        name = str(body.get("group_name", "weight_update_group"))
        if self._groups.pop(name, None) is None:
            raise WeightGroupError("The group to be destroyed does not exist.")


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """As ``trainer.megatron.buckets.checksum`` has it: over all 32-bit words ``w``, the sum of
    ``(w + 1) * odd(position)`` modulo 2^64."""
    words = []
    for tensor in tensors:
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        words.append(torch.cat([raw, raw.new_zeros(-raw.numel() % 4)]).view(torch.int32).to(torch.int64))
    every = torch.cat(words)
    factors = (torch.arange(len(every)) * 0x1E3779B97F4A7C15).bitwise_or_(1)
    return f"{int(((every + 1) * factors).sum()) % (1 << 64):016x}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
