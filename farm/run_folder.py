"""The run folder: everything that one run knows, in one place that explains itself.

    run/
      README.md        what is here, for whoever finds it
      run.json         format and schema version
      config.json      the resolved configuration that the run was started with
      trajectories/    the trajectory log (farm to trainer)
      policies/        the policy log (trainer to farm)
      logs/            what the processes said
      graded/          whole test logs of an evaluation on rows of SWE-bench
      trainer/         metrics.jsonl, checkpoints/

The folder is the run: started again on it, farm and trainer go on from where the two logs say they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from farm.durable import REAL_DISK, claim_folder, storage_errors, write_json
from farm.errors import UsageError

FORMAT = "rollout-farm run"
SCHEMA_VERSION = 1

_README = """# A run of Rollout Farm

| here | what it is | who writes it |
|---|---|---|
| `config.json` | the resolved configuration of the run; it can't change | the first start |
| `trajectories/shard-*.parquet` | the sealed trajectories, one row per episode | the farm |
| `trajectories/open/` | episodes that have landed and wait to be sealed | the farm's workers |
| `policies/step-*/` | the first and the newest published policies, each a Hugging Face model folder | the trainer |
| `trainer/metrics.jsonl` | one line per training step | the trainer |
| `trainer/checkpoints/` | weights, optimizer, random state and cursor | the trainer |
| `logs/` | what each process said | all |
| `graded/` | of an evaluation on SWE-bench: the whole test logs, for `farm predictions --report` | the farm's workers |

Look into it:

    farm replay . EPISODE
    duckdb -c "SELECT oldest_step, avg(reward), count(*) FROM 'trajectories/shard-*.parquet' GROUP BY ALL ORDER BY 1"

Start the farm or the trainer again with this folder and the run goes on: nothing that has landed is lost or done twice.
"""


class RunFolder:
    """The paths of a run. Make one with :meth:`create` or :meth:`open`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any]) -> RunFolder:
        """Lay out a new run, or open the one that is there if it has the same configuration.

        ``config`` must be JSON. Raises :class:`UsageError` for a foreign folder, another schema version, or another
        configuration, and then names the keys that differ."""
        run = cls(path)
        _claim(run.path, create=True)
        wanted = json.loads(json.dumps(config))
        if run._config.exists():
            differing = sorted(_differences(run.config(), wanted))
            if differing:
                more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
                raise UsageError(
                    f"{run.path}: was started with another configuration ({'; '.join(differing[:5])}{more}); "
                    "use the one it was started with, or a new folder"
                )
        with storage_errors(f"{run.path}: cannot lay out the run"):
            for folder in (run.trajectories, run.policies, run.logs, run.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            readme = run.path / "README.md"
            if not readme.exists():
                readme.write_text(_README)
            if not run._config.exists():  # last: a run with a configuration is laid out whole
                write_json(run._config, wanted)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """The run that is there. Raises :class:`UsageError` when there is none, or it was never laid out whole."""
        run = cls(path)
        _claim(run.path, create=False)
        run.config()
        return run

    def config(self) -> dict[str, Any]:
        """The configuration that the run was started with."""
        try:
            config: dict[str, Any] = json.loads(self._config.read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._config}: unreadable ({error}); start the run once more to lay it out") from error
        return config

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def graded(self) -> Path:
        """See :mod:`farm.grader.kept_logs`."""
        return self.path / "graded"

    @property
    def policies(self) -> Path:
        return self.path / "policies"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def trainer(self) -> Path:
        return self.path / "trainer"

    @property
    def metrics(self) -> Path:
        return self.trainer / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.trainer / "checkpoints"

    @property
    def _config(self) -> Path:
        return self.path / "config.json"


def _claim(path: Path, *, create: bool) -> None:
    claim_folder(path, marker="run.json", format_name=FORMAT, version=SCHEMA_VERSION, create=create, disk=REAL_DISK)


def _differences(old: Any, new: Any, at: str = "") -> Iterator[str]:
    """``key: old -> new`` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            name = f"{at}.{key}" if at else key
            if key not in old:
                yield f"{name}: not set -> {_short(new[key])}"
            elif key not in new:
                yield f"{name}: {_short(old[key])} -> not set"
            else:
                yield from _differences(old[key], new[key], name)
    elif old != new:
        yield f"{at}: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
