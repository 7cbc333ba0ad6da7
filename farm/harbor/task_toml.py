"""``task.toml``, as much of Harbor's schema 1.4 as the farm can honour. What it can't is refused, naming the key.

The models are the farm's own. A key that Harbor knows and the farm can't do is told apart from a typing error; keys
that change nothing for a rollout (``artifacts``, descriptions) are read over. Older names (``version``, ``memory``,
``storage``, ``allow_internet``) mean what they do in Harbor.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from farm.errors import UsageError

SCHEMA_VERSION = "1.4"

_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

# What a task may say that the farm can't do -> why, and what to do about it.
_CANNOT: Mapping[str, str] = {
    "steps": "tasks of several steps are not run here; make a task of each",
    "environment.gpus": "sandboxes have no GPU",
    "environment.gpu_types": "sandboxes have no GPU",
    "environment.tpu": "sandboxes have no TPU",
    "environment.mcp_servers": "agents here have no MCP client",
    "environment.skills_dir": "agents here read no skills",
    "environment.healthcheck": "a sandbox is taken as ready when its first command runs",
    "environment.allowed_hosts": "a sandbox has the whole network or none",
    "agent.allowed_hosts": "a sandbox has the whole network or none",
    "verifier.allowed_hosts": "a sandbox has the whole network or none",
    "agent.user": "commands run as the image's own user; set USER in its Dockerfile",
    "verifier.user": "commands run as the image's own user; set USER in its Dockerfile",
    "verifier.environment": "tests run in the machine that the agent leaves",
    "verifier.collect": "tests run in the machine that the agent leaves",
}
_SAYS_NOTHING: tuple[Any, ...] = (None, 0, "", [], {})


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AgentTable(_Table):
    timeout_sec: float | None = Field(default=None, gt=0)
    network_mode: str | None = None


class VerifierTable(_Table):
    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    network_mode: str | None = None
    environment_mode: Literal["shared"] | None = None


class EnvironmentTable(_Table):
    build_timeout_sec: float = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: Literal["linux"] = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    env: dict[str, str] = {}
    workdir: str | None = None
    network_mode: Literal["public", "no-network"] = "public"

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        table = dict(given)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in table:
                table.setdefault(new, _megabytes(old, table.pop(old)))
        internet = table.pop("allow_internet", None)
        if "network_mode" not in table and internet is not None:
            table["network_mode"] = "public" if internet else "no-network"
        return {name: value for name, value in table.items() if value is not None}

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value!r} must be an absolute path")
        return value


class SolutionTable(_Table):
    env: dict[str, str] = {}


class PackageTable(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    description: str = ""
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _form(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or ".." in value:
            raise ValueError(f"{value!r} must be ORG/NAME")
        return value


class TaskToml(_Table):
    """One ``task.toml``. ``metadata`` is free; the farm's own facts are in ``metadata.rollout_farm``."""

    schema_version: str = SCHEMA_VERSION
    task: PackageTable | None = None
    metadata: dict[str, Any] = {}
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    source: str | None = None
    artifacts: Any = None
    multi_step_reward_strategy: Any = None

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "version" in given:
            table = dict(given)
            table.setdefault("schema_version", str(table.pop("version")))
            table.pop("version", None)
            return table
        return given

    @model_validator(mode="after")
    def _one_network(self) -> TaskToml:
        for name, mode in (("agent", self.agent.network_mode), ("verifier", self.verifier.network_mode)):
            if mode not in (None, self.environment.network_mode):
                raise ValueError(
                    f"{name}.network_mode {mode!r} is another than environment.network_mode "
                    f"{self.environment.network_mode!r}; a sandbox has one for its whole life"
                )
        return self


def parse(text: str, *, where: str) -> TaskToml:
    """``text`` of a ``task.toml``. Raises UsageError: what, ``where``, what to do."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where}: not valid TOML ({error}); correct that line") from None
    for name, why in _CANNOT.items():
        value: Any = given
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in _SAYS_NOTHING:
            raise UsageError(f"{where}: {name} can't be honoured: {why}")
    for table in ("environment", "agent", "verifier"):  # these say nothing, as seen above
        if isinstance(given.get(table), Mapping):
            given[table] = {key: value for key, value in given[table].items() if f"{table}.{key}" not in _CANNOT}
    given.pop("steps", None)
    try:
        return TaskToml.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"{where}: {_explain(error)}") from None


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{name}: the farm does not know this key, so it can't say that it is honoured; remove it"
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    if first["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return (
        f"{name}: given {first['input']!r}, but {message[:1].lower()}{message[1:]}; correct it, or leave the task out"
    )


def _megabytes(name: str, value: Any) -> int:
    text = str(value).strip().upper().removesuffix("B").removesuffix("I")
    try:
        return int(float(text[:-1]) * _SIZES[text[-1]])
    except (KeyError, ValueError, IndexError):
        raise ValueError(f"{name} {value!r} must be a size such as '2G' or '512M'") from None


# ------------------------------------------------------------------------------------------------ writing


def dump(tables: Mapping[str, Any]) -> str:
    """``tables`` (of strings, numbers, truth values, lists of these, and tables) as TOML. Raises TypeError."""
    return "\n".join(_lines(tables, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = [f"{_key(name)} = {_value(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    if lines and path:
        lines.insert(0, f"\n[{'.'.join(map(_key, path))}]")
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines(value, (*path, name))
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{value!r} has no place in TOML")


def _text(value: str) -> str:
    """A basic string. JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
