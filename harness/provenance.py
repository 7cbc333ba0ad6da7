"""Where a report's numbers come from: commit, lock, machine, versions."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dask", "distributed", "megatron-core", "numpy", "pyarrow", "tokenizers", "torch")


def provenance(profile: str) -> dict[str, Any]:
    return {
        "profile": profile,
        "commit": commit(),
        "dirty": dirty(),
        "constraints": hashlib.sha256((ROOT / "constraints.txt").read_bytes()).hexdigest()[:16],
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "machine": machine(),
    }


def made_by() -> dict[str, Any]:
    """What a stage was made with: the commit, whether the checkout was ``dirty``, the machine in words."""
    return {"commit": commit(), "dirty": dirty(), "machine": machine_words(machine())}


def machine_words(found: Mapping[str, Any]) -> str:
    return (
        f"{found['cores']} cores of {found['processor']}, {found['memory_gib']} GiB, {found['system']}, "
        f"Python {found['python']}"
    )


def dirty() -> bool:
    """Whether tracked files outside reports/ differ from the commit."""
    return bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports"))


def commit() -> str | None:
    return _git("rev-parse", "HEAD")


def machine() -> dict[str, Any]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
