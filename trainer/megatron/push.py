"""Send a published policy's weights straight to the engines, over a process group of torch.distributed.

The trainer is rank 0, the engines are the others. It talks to them through SGLang's HTTP API alone: init group, pause,
begin, one update request per bucket beside the broadcasts of its tensors, end, hold what it has against what was sent,
give it the name, check that, continue, destroy.

What holds, whatever happens:

* an engine gets the name of the new weights, which holds their digest, only after its own answer has shown that they
  are those that were sent: to the checksum of each bucket, as the embedded engine does, or by digests of what it holds
  (:mod:`trainer.megatron.proof`);
* an engine goes on only after it has answered with that name;
* while it is changed it bears a name that no client takes tokens from: an engine that a push left half-way (refused,
  out of time, killed trainer) stays paused under that name until its pool loads the published folder into it, which is
  at once when the trainer could say that it has given up;
* every wait is bounded by the one deadline, also a broadcast that an engine does not take part in: torch's group is
  waited for in a thread, and given up as soon as an engine refuses;
* an engine that does not answer when the push begins is left out and holds nobody up.

So a push can fail and nothing is lost but time: the policy is in the policy log before it begins.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from farm.types import PUSH_GIVEN_UP, PUSH_UNDER_WAY
from trainer.megatron.buckets import Outgoing
from trainer.megatron.proof import NOT_COMPARED, Digests, Form
from trainer.megatron.push_group import Backend, PushError, PushGroup, own_address

_CLEAN_UP_S = 5.0
_FIRST_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushRules:
    """``address``: this machine's, as the engines reach it; empty: that of the route to them. ``timeout_s``: of all."""

    address: str = ""
    backend: Backend = "gloo"
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """``engines`` have the weights and were paused for ``paused_s``; ``left_out`` (URL -> why) did not answer."""

    engines: tuple[str, ...]
    left_out: Mapping[str, str]
    paused_s: float


def push(urls: Sequence[str], buckets: Iterator[Outgoing], *, version: str, rules: PushRules) -> Pushed:
    """Put the weights in ``buckets`` into the engines at ``urls`` and name them ``version``. The first bucket is made
    before an engine is paused; none is when no engine answers.

    Raises PushError, within ``rules.timeout_s`` and a few seconds for cleaning up, and whatever ``buckets`` raises. The
    engines that it changed are told that the push was given up."""
    with ThreadPoolExecutor(max_workers=2 * len(urls) + 2, thread_name_prefix="push") as threads:
        return _Push(version, rules, threads).run(urls, buckets)


class _Push:
    def __init__(self, version: str, rules: PushRules, threads: ThreadPoolExecutor) -> None:
        self._urls: list[str] = []
        self._unheard: set[str] = set()  # engines that have not confirmed the checksum of every bucket
        self._forms: dict[str, Form | None] = {}  # URL -> how its weights are held
        self._digests: dict[Form, Digests] = {}
        self._version = version
        self._rules = rules
        self._threads = threads
        self._deadline_s = time.monotonic() + rules.timeout_s
        self._name = f"push-{version}-{time.time_ns()}"  # never one that an engine may still have from before

    def run(self, urls: Sequence[str], buckets: Iterator[Outgoing]) -> Pushed:
        sizes, left_out = self._present(urls)
        group: PushGroup | None = None
        try:
            first = next(buckets)
            group = self._join(sizes)
            paused_at_s = time.monotonic()
            self._change(group, first, buckets)
        except BaseException:
            self._leave(group)
            self._give_up()
            raise
        # They serve it; one that does not hear this is resumed by its pool.
        self._quietly(("/continue_generation", {}))
        paused_s = time.monotonic() - paused_at_s
        self._leave(group)
        return Pushed(engines=tuple(self._urls), left_out=left_out, paused_s=paused_s)

    def _present(self, urls: Sequence[str]) -> tuple[list[int], dict[str, str]]:
        """How many ranks each engine that answers will be, and why the others are left out."""
        within_s = min(_FIRST_ANSWER_S, self._left_s())
        asked = {url: self._threads.submit(_request, f"{url}/server_info", "GET", None, within_s) for url in urls}
        sizes: list[int] = []
        left_out: dict[str, str] = {}
        for url, future in asked.items():
            try:
                info = future.result()
                sizes.append(int(info.get("tp_size") or 1))
                self._forms[url] = Form.of(info)
                self._urls.append(url)
            except PushError as error:
                left_out[url] = str(error)
        if not sizes:
            raise PushError("; ".join(left_out.values()) or "there is no engine")
        return sizes, left_out

    def _join(self, sizes: Sequence[int]) -> PushGroup:
        """The process group, once every engine is in it."""
        group = PushGroup(
            self._name,
            1 + sum(sizes),
            address=self._rules.address or own_address(self._urls),
            backend=self._rules.backend,
            timeout_s=self._left_s(),
        )
        asked = []
        rank = 1
        for url, size in zip(self._urls, sizes, strict=True):
            asked.append(self._ask(url, "POST", "/init_weights_update_group", group.invitation(rank)))
            rank += size
        try:
            self._beside(asked, group.join)
        except BaseException:
            group.close()
            raise
        return group

    def _change(self, group: PushGroup, first: Outgoing, following: Iterator[Outgoing]) -> None:
        self._all("POST", "/pause_generation", {"mode": "retract"})
        self._all("POST", "/update_weight_version", _named(PUSH_UNDER_WAY))
        try:
            self._all("POST", "/begin_weight_update", {})
        except PushError as error:
            if error.kind != "refused":
                raise
            # A trainer that was killed in a push has left its session open.
            self._quietly(("/end_weight_update", {}))
            self._all("POST", "/begin_weight_update", {})
        bucket: Outgoing | None = first
        while bucket is not None:
            after = next(following, None)
            self._send(group, bucket, last=after is None)
            bucket = after
        self._all("POST", "/end_weight_update", {})
        self._prove()
        self._all("POST", "/update_weight_version", _named(self._version))
        for url, info in zip(self._urls, self._all("GET", "/model_info"), strict=True):
            if info.get("weight_version") != self._version:
                raise PushError(f"{url} answers {info.get('weight_version')!r} after {self._version} was pushed")

    def _send(self, group: PushGroup, outgoing: Outgoing, *, last: bool) -> None:
        tensors = outgoing.bucket.tensors
        body: dict[str, Any] = {
            "names": [info.name for info in tensors],
            "dtypes": [info.dtype for info in tensors],
            "shapes": [list(info.shape) for info in tensors],
            "group_name": self._name,
            "flush_cache": last,
            "checksum": outgoing.checksum,  # the embedded engine holds what came against it, SGLang passes it over
        }
        asked = [self._ask(url, "POST", "/update_weights_from_distributed", body) for url in self._urls]
        timeout_s = self._left_s()
        self._beside(asked, lambda: group.send(outgoing.tensors, timeout_s=timeout_s))
        for url, future in zip(self._urls, asked, strict=True):
            if future.result().get("checksum") != outgoing.checksum:
                self._unheard.add(url)
        forms = {form for url in self._unheard if (form := self._forms[url]) is not None}
        for form in forms:
            digests = self._digests.setdefault(form, Digests(form))
            for info, tensor in zip(tensors, outgoing.tensors, strict=True):
                digests.add(info.name, tensor)

    def _prove(self) -> None:
        """Ask the engines that have not confirmed the checksums what they hold. Raises PushError for one that holds
        anything else, or can't say."""
        body = {"action": "checksum", "selector": "target", "skip_tensor_list": list(NOT_COMPARED)}
        asked = {url: self._ask(url, "POST", "/weights_checker", body) for url in self._unheard}
        for url, future in asked.items():
            form = self._forms[url]
            compared, others = (
                (0, []) if form is None else self._digests[form].against(future.result().get("ranks") or ())
            )
            if others:
                told = f"{', '.join(others[:3])} ({len(others)} of {compared} compared)"
                raise PushError(f"{url} holds other weights than were sent: {told}")
            if not compared:
                raise PushError(f"{url}: what it holds can't be held against what was sent; use engine.weights=disk")

    def _beside(self, asked: list[Future[dict[str, Any]]], action: Callable[[], None]) -> None:
        """Run ``action`` until it and all requests have ended. The first that fails is raised, and the others are left
        to their own time-outs."""
        mine: Future[Any] = self._threads.submit(action)
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

    def _leave(self, group: PushGroup | None) -> None:
        """A broadcast that an engine takes no part in ends by that engine's leaving, then those who wait for what it
        should have brought end by the trainer's. Awaited by whoever ends the threads."""
        for url in self._urls:
            self._threads.submit(_talk, url, (("/destroy_weights_update_group", {"group_name": self._name}),))
        if group is not None:
            group.close()

    def _give_up(self) -> None:
        """The pool loads the published folder into an engine of this name. Paused before it is called so: what runs on
        it has no token of that name, then."""
        pause = ("/pause_generation", {"mode": "retract"})
        self._quietly(("/end_weight_update", {}), pause, ("/update_weight_version", _named(PUSH_GIVEN_UP)))

    # ---------------------------------------------------------------------------------------------- HTTP

    def _all(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        asked = [self._ask(url, method, path, body) for url in self._urls]
        return [future.result() for future in asked]

    def _ask(self, url: str, method: str, path: str, body: Mapping[str, Any] | None) -> Future[dict[str, Any]]:
        return self._threads.submit(_request, url + path, method, body, self._left_s())

    def _quietly(self, *calls: tuple[str, Mapping[str, Any]]) -> None:
        """Make these calls, in order, at every engine, as far as it answers."""
        wait([self._threads.submit(_talk, url, calls) for url in self._urls], timeout=_CLEAN_UP_S)

    def _left_s(self) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise PushError(f"not done within {self._rules.timeout_s:g} s")
        return left_s


def _named(version: str) -> dict[str, Any]:
    return {"new_version": version, "abort_all_requests": False}


def _talk(url: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """In order, whatever is refused. Ends when the engine does not answer; what went wrong before is what is told."""
    give_up_at_s = time.monotonic() + _CLEAN_UP_S
    for path, body in calls:
        try:
            _request(url + path, "POST", body, max(0.1, give_up_at_s - time.monotonic()))
        except PushError as error:
            if error.kind == "unreachable":
                return


def _request(url: str, method: str, body: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
    """Raises PushError: ``unreachable`` when there is no answer in time, ``refused``."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            raw = response.read()
        answer = json.loads(raw) if raw else {}
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(2000).decode(errors="replace")
        raise PushError(f"{url}: {error.code}: {said}", kind="refused") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PushError(f"{url}: {error}", kind="unreachable") from None
    if isinstance(answer, dict) and answer.get("success") is False:
        raise PushError(f"{url}: {answer.get('message')}", kind="refused")
    return answer if isinstance(answer, dict) else {}
