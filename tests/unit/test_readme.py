"""What the README says is what the project does."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.readme import claim_table, with_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (.+?)(?:\s+#.*)?$", README, flags=re.MULTILINE)


def test_the_claim_table_is_the_newest_reports() -> None:
    assert with_table(README, claim_table()) == README, "run: python -m harness.readme"


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.split()[0] in {"farm", "trainer", "harness"}])
def test_every_command_and_option_exists(line: str) -> None:
    words = shlex.split(line)
    program = str(Path(sys.executable).parent / words[0])
    shown = subprocess.run([program, words[1], "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    for option in (word for word in words if word.startswith("--")):
        assert option in shown, f"{words[0]} {words[1]} has no {option}"


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()
