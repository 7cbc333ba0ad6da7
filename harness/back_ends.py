"""What a profile's back ends lack on this machine, found before anything starts (Rule 11)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from farm.errors import UsageError
from harness.profiles import DATA, ENGINES, POLICY, RL_TASKS, SANDBOX, VERIFIED, Profile

_PROBE_S = 5.0
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def require(profile: Profile, roles: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raises UsageError that names everything that is missing, each with what to set."""
    found = missing(profile, roles, environment)
    if found:
        raise UsageError(f"profile {profile.name!r} can't start here: {'; '.join(found)}")


def missing(profile: Profile, roles: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """One phrase for each thing that ``roles`` need and this machine does not have."""
    wanted = set(roles)
    checks = _CLUSTER if profile.name == "cluster" else _EMBEDDED
    return [phrase for role, check in checks.items() if role in wanted for phrase in check(environment)]


# ------------------------------------------------------------------------------------------- embedded


def _package(name: str) -> list[str]:
    return [] if _installed(name) else [f"the package {name} is not installed (run `make setup`)"]


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def _provider(name: str) -> list[str]:
    from farm.sandbox import make_provider

    try:
        make_provider(name)
    except UsageError as error:
        return [str(error)]
    return []


# -------------------------------------------------------------------------------------------- cluster


def _engines(environment: Mapping[str, str]) -> list[str]:
    urls = [url.strip() for url in environment.get(ENGINES, "").split(",") if url.strip()]
    if not urls:
        return [f"no engines: set {ENGINES} to the addresses of SGLang servers (http://host:port,http://...)"]
    return [f"no SGLang server answers at {url}: start it, or correct {ENGINES}" for url in urls if not _answers(url)]


def _answers(url: str) -> bool:
    if not url.startswith(("http://", "https://")):
        return False
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/model_info", timeout=_PROBE_S) as answer:
            json.loads(answer.read())
    except (OSError, ValueError):
        return False
    return True


def _sandboxes(environment: Mapping[str, str]) -> list[str]:
    name = environment.get(SANDBOX, "")
    if name not in ("e2b", "docker"):
        return [f"no sandboxes: set {SANDBOX} to e2b or docker (is {name or 'not set'})"]
    if name == "docker":
        return _provider("docker")
    found = [] if _installed("e2b") else ["the package e2b is not installed (pip install 'rollout-farm[e2b]')"]
    return found + ([] if environment.get("E2B_API_KEY") else ["no E2B account: set E2B_API_KEY"])


def _gpus() -> list[str]:
    if any(device.exists() for device in _GPU_DEVICES):
        return []
    return ["no GPU for the trainer: run it on the training node (needs /dev/nvidiactl or /dev/kfd)"]


def _tasks(environment: Mapping[str, str]) -> list[str]:
    found = []
    if not environment.get(DATA) or not (Path(environment[DATA]) / VERIFIED).is_file():
        found.append(f"no benchmark: set {DATA} to the folder with {VERIFIED}")
    if not environment.get(RL_TASKS):
        found.append(f"no training tasks: set {RL_TASKS} to a task source (swebench:PATH)")
    if not (environment.get(POLICY) and (Path(environment[POLICY]) / "config.json").is_file()):
        found.append(f"no model: set {POLICY} to a Hugging Face model folder")
    return found


Check = Callable[[Mapping[str, str]], list[str]]
_EMBEDDED: Mapping[str, Check] = {
    "engine": lambda _: _package("torch"),
    "sandbox": lambda _: _provider("bubblewrap"),
    "trainer": lambda _: _package("megatron.core"),
}
_CLUSTER: Mapping[str, Check] = {
    "engine": _engines,
    "sandbox": _sandboxes,
    "trainer": lambda _: _gpus(),
    "tasks": _tasks,
}
