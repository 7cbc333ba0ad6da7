"""Sandboxes in E2B's microVMs.

A template stands for an image (:func:`template_name`), because E2B starts nothing else. Creations are paced and
counted over all workers (:mod:`farm.sandbox.account_limit`). Every creation carries an idempotency key and metadata
of its own: an answer that was lost is asked for again under the same key, and what may have been made in spite of a
failure is found by its metadata and killed. Commands run detached and are asked for by short calls
(:mod:`farm.sandbox.runner_sandbox`). What an error means is a table (:mod:`farm.sandbox.e2b_faults`).

A sandbox ends by E2B's own time-out at its deadline, whatever happens to the farm; ``sweep`` kills what is overdue.

The only file that uses the ``e2b`` package, which is optional.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from farm.errors import SandboxStartError, UsageError
from farm.protocols import Sandbox, SandboxSpec
from farm.sandbox.account_limit import AccountLimit
from farm.sandbox.e2b_faults import Next, Verdict, verdict
from farm.sandbox.optional import sdk
from farm.sandbox.runner_sandbox import Refused, RunnerSandbox
from farm.sandbox.served import GRACE_S, uncancelled
from farm.sandbox.state import state_directory

MARK = "rollout-farm"  # metadata key that all sandboxes of farms carry
KNOWN_TEMPLATES: Mapping[str, str] = {"host": "base"}  # E2B's own template has bash, perl, git and Python

_CREATE_S = 60.0  # one answer to a creation
_CALL_S = 30.0  # one answer of a sandbox, beyond what it is asked to wait
_TRIES = 5
_PAUSES_S = (0.2, 0.5, 1.0, 2.0)
_BACK_OFF_S = (2.0, 5.0, 10.0, 20.0)
_CHECK_S = 60.0  # until the service has answered at all
_LOOKS = 8  # at once, for templates
_LOOK_S = 1.0  # for one of them, on the average
_PAGE = 100

_log = logging.getLogger(__name__)
T = TypeVar("T")


def template_name(image: str) -> str:
    """The template that ``farm images`` builds of ``image``: readable, and different for different images."""
    words = re.sub(r"[^a-z0-9]+", "-", image.lower().removesuffix(":latest")).strip("-")
    return f"farm-{words[-40:].strip('-')}-{hashlib.sha256(image.encode()).hexdigest()[:8]}"


class E2BProvider:
    """``templates``: image -> template, where it isn't :func:`template_name`; ``creates_per_s`` and ``concurrent``: the
    account's limits; ``ledger``: folder that all workers share; ``user``: whom commands run as; ``internet``: may they
    reach it; ``vcpus`` and ``memory_mb``: of the templates that are built here; ``life_s``: the longest that a sandbox
    will be asked for (0: not known). One event loop at a time."""

    name = "e2b"

    def __init__(
        self,
        *,
        templates: Mapping[str, str] | None = None,
        creates_per_s: float = 1.0,
        concurrent: int = 20,
        ledger: str = "",
        user: str = "root",
        internet: bool = False,
        domain: str = "",
        vcpus: int = 2,
        memory_mb: int = 1024,
        life_s: float = 0.0,
    ) -> None:
        self._sdk = sdk("e2b", oldest=(2, 63), below=3)  # 3 drops the addresses that tests go to
        key = os.environ.get("E2B_API_KEY", "")
        if not key:
            raise UsageError("sandbox 'e2b': no key; set E2B_API_KEY to a key of the account (e2b.dev/dashboard)")
        self._templates = {**KNOWN_TEMPLATES, **(templates or {})}
        folder = Path(ledger) if ledger else state_directory() / f"e2b-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self._limit = AccountLimit(folder, creates_per_s=creates_per_s, concurrent=concurrent)
        self._user = user
        self._internet = internet
        self._vcpus, self._memory_mb = vcpus, memory_mb
        self._life_s = life_s
        self._account: dict[str, Any] = {"api_key": key, "retries": 0}  # how often is tried again is decided here
        if domain:
            self._account["domain"] = domain

    @contextlib.asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        key = secrets.token_hex(16)
        until_s = spec.deadline_at_s + GRACE_S
        try:
            await self._limit.acquire(key, until_s=until_s, deadline_at_s=spec.deadline_at_s)
            box = await self._create(key, spec)
            sandbox = E2BSandbox(box, spec, user=self._user, exited=self._sdk.CommandExitException)
            try:
                await sandbox.ready()
                yield sandbox
            finally:
                sandbox.closed()
                await uncancelled(self._kill(sandbox.id))
        finally:
            await uncancelled(self._limit.release(key))

    async def sweep(self, *, now_s: float) -> int:
        """Of the whole account: sandboxes of farms whose deadline has passed."""
        try:
            found = [box async for box in self._listed({MARK: "1"})]
        except Exception as error:
            _log.warning("not swept: %s", _told(error))
            return 0
        overdue = [box.sandbox_id for box in found if _deadline(box.metadata) <= now_s]
        return sum(await asyncio.gather(*(self._kill(sandbox_id) for sandbox_id in overdue)))

    async def check(self, images: Iterable[str]) -> None:
        """Is the key good, has every image a template, and does the account allow so long a life? What it allows can't
        be asked for: one sandbox is created for that, and ended at once. Raises ``UsageError``."""
        names = {image: self.template(image) for image in images}
        wanted = sorted(set(names.values()))
        try:
            async with asyncio.timeout(_CHECK_S + _LOOK_S * len(wanted)):
                await _tried(self._sdk.AsyncSandbox.list(limit=1, **self._account).next_items)
                there = await self._there(wanted)
        except TimeoutError:
            raise UsageError("sandbox 'e2b': the service does not answer in time; is it reachable?") from None
        except Exception as error:
            judged = _judge(error, "create")
            advice = judged.advice or "is the service reachable?"
            raise UsageError(f"sandbox 'e2b': {_told(error)}; {advice}") from None
        missing = sorted(image for image, name in names.items() if name not in there)
        if missing:
            raise UsageError(
                f"sandbox 'e2b': no template {names[missing[0]]!r} for image {missing[0]!r}"
                f"{f' (and {len(missing) - 1} more)' if missing[1:] else ''}; build it with `farm images`, or name "
                "one in e2b.templates"
            )
        if names and self._life_s:
            await self._try_out(min(names))

    async def _try_out(self, image: str) -> None:
        """Is a sandbox of ``image`` created for ``life_s``? Where that is refused for now only, the run will wait."""
        spec = SandboxSpec(owner="check", deadline_at_s=time.time() + self._life_s, image=image)
        try:
            box = await self._create(secrets.token_hex(16), spec)
        except SandboxStartError as error:
            if not error.retryable:
                raise UsageError(f"sandbox 'e2b': {error}") from None
            _log.warning("no sandbox can be created just now: %s", error)
        else:
            await uncancelled(self._kill(str(box.sandbox_id)))

    async def prepare(self, image: str, *, deadline_at_s: float) -> None:
        """Build the template of ``image`` if it isn't there. Raises ``SandboxStartError``."""
        name = self.template(image)
        try:
            async with asyncio.timeout(max(1.0, deadline_at_s - time.time())):
                if name in await self._there([name]):
                    return
                await self._sdk.AsyncTemplate.build(
                    self._sdk.AsyncTemplate().from_image(image),
                    name,
                    cpu_count=self._vcpus,
                    memory_mb=self._memory_mb,
                    **self._account,
                )
        except TimeoutError:
            raise SandboxStartError(f"template {name} of {image}: not built in time", kind="template") from None
        except Exception as error:
            raise SandboxStartError(f"template {name} of {image}: {_told(error)}", kind="template") from error

    def template(self, image: str) -> str:
        return self._templates.get(image) or template_name(image)

    async def _there(self, names: list[str]) -> set[str]:
        """Those of ``names`` that are templates. A few are asked for at a time: a set of tasks has hundreds, and all at
        once would look to the service like an attack. Raises what it raised last."""
        looks = asyncio.Semaphore(_LOOKS)

        async def known(name: str) -> bool:
            async with looks:
                return bool(await _tried(lambda: self._sdk.AsyncTemplate.exists(name, **self._account)))

        tasks = [asyncio.ensure_future(known(name)) for name in names]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one that failed for good spares the service the others
                task.cancel()
        return {name for name, there in zip(names, found, strict=True) if there}

    # --------------------------------------------------------------------------------------- creation

    async def _create(self, key: str, spec: SandboxSpec) -> Any:
        """Under one key, however often it takes; what may be left of a failure is killed. Raises SandboxStartError."""
        try:
            return await self._try_create(key, spec)
        except BaseException:
            await uncancelled(self._kill_by_key(key))
            raise

    async def _try_create(self, key: str, spec: SandboxSpec) -> Any:
        template = self.template(spec.image)
        for number in range(_TRIES):
            if number:
                await self._limit.another(deadline_at_s=spec.deadline_at_s)
            life_s = int(spec.deadline_at_s - time.time()) + 1
            if life_s <= 1:
                raise SandboxStartError("its deadline has passed", kind="deadline")
            try:
                # Not interrupted: the answer has the id of what would have to be killed.
                return await uncancelled(
                    self._sdk.AsyncSandbox.create(
                        template,
                        timeout=life_s,
                        metadata={MARK: "1", "key": key, "owner": spec.owner, "deadline": repr(spec.deadline_at_s)},
                        allow_internet_access=self._internet,
                        idempotency_key=key,
                        request_timeout=_CREATE_S,
                        **self._account,
                    )
                )
            except Exception as error:
                judged = _judge(error, "create")
                if judged.next not in (Next.RETRY, Next.BACK_OFF) or number == _TRIES - 1:
                    raise _start_error(error, judged, template, spec.image) from error
                await self._pause(judged.next, number)
        raise AssertionError("unreachable")

    async def _pause(self, kind: Next, number: int) -> None:
        wait_s = _pause_s(kind, number)
        if kind is Next.BACK_OFF:
            await self._limit.back_off(wait_s)
        await asyncio.sleep(wait_s)

    async def _kill_by_key(self, key: str) -> None:
        try:
            async for box in self._listed({MARK: "1", "key": key}):
                await self._kill(box.sandbox_id)
        except Exception as error:
            _log.warning("a sandbox with key %s may be left until its deadline: %s", key, _told(error))

    async def _listed(self, metadata: Mapping[str, str]) -> AsyncIterator[Any]:
        query = self._sdk.SandboxQuery(metadata=dict(metadata))
        pages = self._sdk.AsyncSandbox.list(query=query, limit=_PAGE, **self._account)
        while pages.has_next:
            for box in await _tried(pages.next_items):
                yield box

    async def _kill(self, sandbox_id: str) -> bool:
        """False when it was gone; what can't be killed now ends at its deadline."""
        try:
            return bool(await _tried(lambda: self._sdk.AsyncSandbox.kill(sandbox_id, **self._account)))
        except Exception as error:
            _log.warning("sandbox %s is left until its deadline: %s", sandbox_id, _told(error))
            return False


class E2BSandbox(RunnerSandbox):
    """A running microVM; made by :class:`E2BProvider` only."""

    def __init__(self, box: Any, spec: SandboxSpec, *, user: str, exited: type[Exception]) -> None:
        super().__init__(str(box.sandbox_id), spec, user=user)
        self._box = box
        self._exited = exited  # what the SDK raises when a command's exit code is not 0

    async def _say(self, command: str, *, wait_s: float) -> str:
        self._check()

        async def call() -> str:
            done: Any
            try:
                done = await self._box.commands.run(
                    command, user=self._user, cwd="/", timeout=wait_s + _CALL_S, request_timeout=wait_s + _CALL_S
                )
            except self._exited as error:
                done = error
                if not done.stdout:  # it could not even be started: no memory, no processes left
                    raise _Broken(f"exit code {done.exit_code}: {str(done.stderr)[-200:]}") from error
            return str(done.stdout)

        return await self._persist(call, wait_s + _CALL_S)

    async def _put(self, files: Mapping[str, bytes]) -> None:
        await self._files("write_files", [{"path": path, "data": data} for path, data in files.items()])

    async def _fetch(self, path: str) -> bytes:
        return bytes(await self._files("read", path, format="bytes"))

    async def _files(self, call: str, *given: Any, **named: Any) -> Any:
        """A call on files. Raises ``SandboxLostError``, or ``Refused`` when the sandbox says no."""
        self._check()
        return await self._persist(
            lambda: getattr(self._box.files, call)(*given, user=self._user, request_timeout=_CALL_S, **named), _CALL_S
        )

    async def _persist(self, call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """``call`` again and again while the table says so."""
        for number in range(_TRIES):
            try:
                return await _once(call, timeout_s + _CALL_S)
            except Exception as error:
                judged = _judge(error, "use")
                match judged.next:
                    case Next.REFUSED:
                        raise Refused(_told(error)) from error
                    case Next.NEW_SANDBOX | Next.FATAL:
                        self._fail(_told(error), judged.kind)
                    case _ if number == _TRIES - 1:
                        self._fail(_told(error), judged.kind)
                await asyncio.sleep(_PAUSES_S[min(number, len(_PAUSES_S) - 1)])
        raise AssertionError("unreachable")


class _Broken(Exception):
    """A short command could not be carried out."""


def _judge(error: BaseException, at: str) -> Verdict:
    names = {cls.__name__ for cls in type(error).__mro__}
    status = getattr(error, "status_code", None)
    return verdict(names, at=at, message=str(error), status=status if isinstance(status, int) else None)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _start_error(error: Exception, judged: Verdict, template: str, image: str) -> SandboxStartError:
    advice = f"; {judged.advice}" if judged.advice else ""
    return SandboxStartError(
        f"template {template} (image {image}): {_told(error)}{advice}",
        kind=judged.kind,
        retryable=judged.next is not Next.FATAL,
    )


async def _tried(call: Callable[[], Awaitable[T]]) -> T:
    """``call``, which may be repeated, a few times. Raises what it raised last."""
    for number in range(_TRIES):
        try:
            return await _once(call, _CALL_S)
        except Exception as error:
            following = _judge(error, "use").next
            if following not in (Next.RETRY, Next.BACK_OFF) or number == _TRIES - 1:
                raise
            await asyncio.sleep(_pause_s(following, number))
    raise AssertionError("unreachable")


async def _once(call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """``call``, bounded in time. The SDK can turn a cancellation into an error of its transport, or lose it (Python
    3.11's ``wait_for`` does, when the first event comes at the same moment): here it stays one."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        async with asyncio.timeout(timeout_s):
            return await call()
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


def _pause_s(kind: Next, number: int) -> float:
    """Before try ``number`` + 1."""
    pauses = _BACK_OFF_S if kind is Next.BACK_OFF else _PAUSES_S
    return pauses[min(number, len(pauses) - 1)] * random.uniform(0.8, 1.2)


def _deadline(metadata: Mapping[str, str]) -> float:
    try:
        return float(metadata.get("deadline", ""))
    except ValueError:
        return float("inf")  # not made by this program: whoever made it knows
