"""Send a published policy's weights straight to the engines, over a process group of torch.distributed.

The trainer is rank 0, the engines are the others. It talks to them through SGLang's HTTP API alone: init group, pause,
begin, one update request per bucket beside the broadcasts of its tensors, end, check the version, continue, destroy.

What holds, whatever happens:

* an engine goes on only after it has answered with the name of the new weights, which holds their digest;
* while it is changed it bears a name that no client takes tokens from: an engine that a push left half-way (refused,
  out of time, killed trainer) stays paused under that name until its pool loads the published folder into it, which is
  at once when the trainer could say that it has given up;
* every wait is bounded by the one deadline, also a broadcast that an engine does not take part in: torch's group is
  waited for in a thread, and given up as soon as an engine refuses.

So a push can fail and nothing is lost but time: the policy is in the policy log before it begins.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from farm.errors import FarmError
from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY

_CLEAN_UP_S = 5.0
_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}


class PushError(FarmError):
    """The weights did not get there; the engines will load them from disk."""

    default_kind = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRules:
    """``address``: this machine's, as the engines reach it. ``bucket_bytes``: how much goes with one request."""

    address: str = "127.0.0.1"
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: int = 512 << 20
    timeout_s: float = 60.0


def push(urls: Sequence[str], weights: Mapping[str, Tensor], *, version: str, rules: PushRules) -> float:
    """Put ``weights`` (Hugging Face names) into all engines at ``urls`` and name them ``version``; returns the seconds
    that the engines were paused. Raises PushError, within ``rules.timeout_s`` and a few seconds for cleaning up."""
    with ThreadPoolExecutor(max_workers=2 * len(urls) + 2, thread_name_prefix="push") as threads:
        return _Push(urls, version, rules, threads).run(weights)


class _Push:
    def __init__(self, urls: Sequence[str], version: str, rules: PushRules, threads: ThreadPoolExecutor) -> None:
        self._urls = urls
        self._version = version
        self._rules = rules
        self._threads = threads
        self._deadline_s = time.monotonic() + rules.timeout_s
        self._name = f"push-{version}-{time.time_ns()}"  # never one that an engine may still have from before

    def run(self, weights: Mapping[str, Tensor]) -> float:
        sizes = [int(info.get("tp_size") or 1) for info in self._all("GET", "/server_info")]
        try:
            return self._change(self._join(sizes), list(_buckets(weights, self._rules.bucket_bytes)))
        finally:
            self._quietly("/destroy_weights_update_group", {"group_name": self._name})

    def _change(self, group: Any, buckets: Sequence[Mapping[str, Tensor]]) -> float:
        paused_at_s = time.monotonic()
        self._all("POST", "/pause_generation", {"mode": "retract"})
        try:
            self._rename(PUSH_UNDER_WAY)
            self._all("POST", "/begin_weight_update", {})
            try:
                for number, bucket in enumerate(buckets, start=1):
                    self._send(group, bucket, last=number == len(buckets))
            finally:
                self._quietly("/end_weight_update", {})
            for url, info in zip(self._urls, self._all("GET", "/model_info"), strict=True):
                if info.get("weight_version") != self._version:
                    raise PushError(f"{url} answers {info.get('weight_version')!r} after {self._version} was pushed")
        except PushError:
            self._quietly("/update_weight_version", _named(PUSH_GIVEN_UP))
            raise
        self._all("POST", "/continue_generation", {})
        return time.monotonic() - paused_at_s

    def _rename(self, version: str) -> None:
        self._all("POST", "/update_weight_version", _named(version))

    # ----------------------------------------------------------------------------------------- the group

    def _join(self, sizes: Sequence[int]) -> Any:
        """The process group, once every engine is in it."""
        rules, total = self._rules, 1 + sum(sizes)
        timeout = timedelta(seconds=self._left_s())
        store = TCPStore("0.0.0.0", 0, total, is_master=True, timeout=timeout, wait_for_workers=False)
        bodies = []
        rank = 1
        for size in sizes:
            bodies.append(
                {
                    "master_address": rules.address,
                    "master_port": store.port,
                    "rank_offset": rank,
                    "world_size": total,
                    "group_name": self._name,
                    "backend": rules.backend,
                }
            )
            rank += size
        # As torch's own init_process_group lays out its keys, and SGLang that of a named group: by name, by device.
        named = PrefixStore(f"{self._name}/", PrefixStore(self._name, store))
        prefixed = PrefixStore(f"{_BACKENDS[rules.backend]}/", named)
        asked = [
            self._threads.submit(self._call, url, "POST", "/init_weights_update_group", body)
            for url, body in zip(self._urls, bodies, strict=True)
        ]
        return self._beside(asked, lambda: _group(rules.backend, prefixed, total, timeout))

    def _send(self, group: Any, bucket: Mapping[str, Tensor], *, last: bool) -> None:
        body: dict[str, Any] = {
            "names": list(bucket),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
            "shapes": [list(tensor.shape) for tensor in bucket.values()],
            "group_name": self._name,
            "flush_cache": last,
        }
        if last:
            body["weight_version"] = self._version
        asked = [
            self._threads.submit(self._call, url, "POST", "/update_weights_from_distributed", body)
            for url in self._urls
        ]
        timeout = timedelta(seconds=self._left_s())
        device = _BACKENDS[self._rules.backend]

        def broadcast() -> None:
            options = BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            options.timeout = timeout
            sent = [tensor.to(device).contiguous() for tensor in bucket.values()]
            for work in [group.broadcast([tensor], options) for tensor in sent]:
                work.wait(timeout)

        self._beside(asked, broadcast)

    def _beside(self, asked: list[Future[dict[str, Any]]], action: Callable[[], Any]) -> Any:
        """Run ``action`` until it and all requests have ended. The first that fails is raised, and the others are left
        to their own time-outs."""
        mine = self._threads.submit(action)
        done, pending = wait([mine, *asked], timeout=self._left_s(), return_when=FIRST_EXCEPTION)
        refused = [future for future in asked if future in done and future.exception() is not None]
        for future in [*refused, mine] if mine in done else refused:
            try:
                future.result()
            except PushError:
                raise
            except Exception as error:  # torch raises RuntimeError and its own
                raise PushError(f"the process group failed: {str(error).partition(chr(10))[0]}") from error
        if pending:
            raise PushError(f"the engines did not take part within {self._rules.timeout_s:g} s")
        return mine.result()

    # ---------------------------------------------------------------------------------------------- HTTP

    def _all(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        asked = [self._threads.submit(self._call, url, method, path, body) for url in self._urls]
        return [future.result() for future in asked]

    def _call(self, url: str, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        return _request(url + path, method, body, timeout_s=self._left_s())

    def _quietly(self, path: str, body: Mapping[str, Any]) -> None:
        def call(url: str) -> None:
            try:
                _request(url + path, "POST", body, timeout_s=_CLEAN_UP_S)
            except PushError:
                return  # what went wrong before is the one to tell

        wait([self._threads.submit(call, url) for url in self._urls], timeout=_CLEAN_UP_S)

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise PushError(f"not done within {self._rules.timeout_s:g} s")
        return left_s


def _named(version: str) -> dict[str, Any]:
    return {"new_version": version, "abort_all_requests": False}


def _group(backend: str, store: PrefixStore, size: int, timeout: timedelta) -> Any:
    """Rank 0's end. Blocks until all are there."""
    if backend == "gloo":
        return ProcessGroupGloo(store, 0, size, timeout)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, 0, size, options)


def _buckets(weights: Mapping[str, Tensor], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In order; a tensor that is larger than a bucket has one of its own."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def _request(url: str, method: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            raw = response.read()
        answer = json.loads(raw) if raw else {}
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(2000).decode(errors="replace")
        raise PushError(f"{url}: {error.code}: {said}") from None
    except (OSError, ValueError) as error:
        raise PushError(f"{url}: {error}") from None
    if isinstance(answer, dict) and answer.get("success") is False:
        raise PushError(f"{url}: {answer.get('message')}")
    return answer if isinstance(answer, dict) else {}
