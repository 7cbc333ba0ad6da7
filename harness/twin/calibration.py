"""The inputs of the predictions: ``calibration.toml``, and data sheets."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from farm.errors import UsageError
from harness.twin import sheets
from harness.twin.sheets import Gpu, ModelShape

CALIBRATION = Path(__file__).parent / "calibration.toml"
KINDS = ("reported", "profile", "practice", "assumed", "sheet")
_SHEET = ("hbm_bytes", "hbm_bytes_per_s", "flops_per_s")
_SHEET_ALLOWED = (1e9, 1e19)


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One figure that goes in. ``kind`` "reported": a figure of the reference, which never counts as reproduced.
    ``allowed``: least and greatest value that a question may give it."""

    name: str
    value: float
    kind: str
    unit: str
    source: str
    allowed: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All inputs, by name: those of ``calibration.toml`` and ``gpu.*`` of the GPU's data sheet."""

    shape: ModelShape
    gpu_name: str
    seed: int
    entries: Mapping[str, Input]

    def __getitem__(self, name: str) -> float:
        return self.entries[name].value

    def count(self, name: str) -> int:
        """An input that is a whole number, at least 1."""
        return max(1, round(self.entries[name].value))

    @property
    def gpu(self) -> Gpu:
        return Gpu(name=self.gpu_name, **{name: self[f"gpu.{name}"] for name in _SHEET})

    def scaled(self, name: str, factor: float) -> Inputs:
        entry = self.entries[name]
        return self.given(**{name: entry.value * factor})

    def given(self, **values: float) -> Inputs:
        """With other values for some inputs."""
        changed = {name: replace(self.entries[name], value=float(value)) for name, value in values.items()}
        return replace(self, entries={**self.entries, **changed})

    def asked(self, **values: float) -> Inputs:
        """:meth:`given`, for values from outside. Raises UsageError for an unknown name and for what is not allowed."""
        for name, value in values.items():
            if name not in self.entries:
                raise UsageError(f"input {name!r} is unknown; known: {', '.join(sorted(self.entries))}")
            low, high = self.entries[name].allowed
            if not low <= value <= high:
                raise UsageError(f"{name} is {value:g}; allowed: {low:g} to {high:g} {self.entries[name].unit}")
        return self.given(**values)

    def on(self, *, model: str | None = None, gpu: str | None = None) -> Inputs:
        """For another model or GPU. Raises UsageError when it has no data sheet."""
        shape = self.shape if model is None else sheets.model(model)
        sheet = self.gpu if gpu is None else sheets.gpu(gpu)
        entries = {**self.entries, **_sheet_inputs(sheet)}
        return replace(self, shape=shape, gpu_name=sheet.name, entries=entries)


def load(path: Path = CALIBRATION) -> Inputs:
    with path.open("rb") as file:
        data = tomllib.load(file)
    sheet = sheets.gpu(data["gpu"])
    rows = [Input(**{**row, "value": float(row["value"]), "allowed": tuple(row["allowed"])}) for row in data["input"]]
    unknown = {row.kind for row in rows} - set(KINDS)
    if unknown:
        raise ValueError(f"{path}: unknown kinds {sorted(unknown)}; known: {KINDS}")
    entries = {**{row.name: row for row in rows}, **_sheet_inputs(sheet)}
    return Inputs(
        shape=sheets.model(data["model"]),
        gpu_name=sheet.name,
        seed=int(data["seed"]),
        entries=entries,
    )


def _sheet_inputs(gpu: Gpu) -> dict[str, Input]:
    units = {"hbm_bytes": "bytes", "hbm_bytes_per_s": "bytes/s", "flops_per_s": "FLOP/s, dense bfloat16"}
    return {
        f"gpu.{name}": Input(
            name=f"gpu.{name}",
            value=float(getattr(gpu, name)),
            kind="sheet",
            unit=units[name],
            source=f"{gpu.name} data sheet",
            allowed=_SHEET_ALLOWED,
        )
        for name in _SHEET
    }
