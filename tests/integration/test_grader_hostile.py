"""What a policy may try against its grade, in real sandboxes: the commands of each attempt, and what becomes of it.

The issue is real and the tests are hidden; only a change of ``calc.py`` that makes ``add`` add may pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from farm.episode import run_episode
from farm.errors import GraderError
from farm.grader import grading_spec, make_grader
from farm.protocols import AgentRun, Sandbox
from farm.sandbox import make_provider
from farm.suites.patch import unified
from farm.suites.repo import make_repo
from farm.types import (
    Attempt,
    Boundary,
    EndReason,
    Episode,
    Evidence,
    Failed,
    Graded,
    InlineFiles,
    Limits,
    Task,
)

BUG = "def add(a, b):\n    return a - b\n"
FIX = "sed -i 's/a - b/a + b/' calc.py"
FILES = {
    "calc.py": BUG,
    "README.md": "calc\n",
    "pkg/__init__.py": "",
    "tests/helper.py": "N = 1\n",
    "setup.cfg": "[x]\n",
}
SCRIPT_TEST = """\
import os, sys
word = os.environ.pop("FARM_TEST_WORD")
sys.path.insert(0, ".")
import calc
status = "PASSED" if calc.add(2, 2) == 4 else "FAILED"
print(status, "test_add", word)
print("PASSED", "test_defined", word)
sys.exit(status != "PASSED")
"""
PYTEST_TEST = """\
import calc

def test_add():
    assert calc.add(2, 2) == 4

def test_defined():
    assert callable(calc.add)
"""


def task(name: str, test: str, command: str, ids: tuple[str, str], **change: Any) -> Task:
    base = Task(
        instance_id=name,
        dataset="toy@1",
        repo="toy/toy",
        base_commit=make_repo(FILES)[0],
        problem_statement="add() subtracts",
        patch=unified("calc.py", BUG, BUG.replace("-", "+")),
        test_patch=unified("tests/test_calc.py", None, test),
        fail_to_pass=ids[:1],
        pass_to_pass=ids[1:],
        eval_script=f"cd /testbed\necho '>>>>> Start Test Output'\n{command}\necho '>>>>> End Test Output'\n",
        log_parser="micro",
        workspace=InlineFiles(files=FILES),
    )
    return replace(base, **change)


SCRIPT = task("script", SCRIPT_TEST, "python3 tests/test_calc.py", ("test_add", "test_defined"))
PYTEST = task(
    "pytest",
    PYTEST_TEST,
    "python3 -m pytest -p no:cacheprovider -rA tests/test_calc.py",
    ("tests/test_calc.py::test_add", "tests/test_calc.py::test_defined"),
    log_parser="pytest",
    image="host-pytest",
)
LIMITS = Limits(grade_s=10.0)


class ShellAgent:
    """Runs one script and submits."""

    def __init__(self, script: str) -> None:
        self.script = script

    async def run(self, task: Task, *, sandbox: Sandbox, **_: Any) -> AgentRun:
        result = await sandbox.exec(self.script, timeout_s=20.0)
        assert not result.timed_out
        return AgentRun(turns=(), end_reason=EndReason.SUBMITTED, timeline=())


class NoEngine:
    url = "none://"


def outcomes_of(task: Task, scripts: Mapping[str, str], limits: Limits = LIMITS) -> dict[str, Graded | Failed]:
    """What becomes of each script, four at a time."""
    attempt = Attempt(
        episode=Episode(task=task, group_id="g", index=0, group_size=1, seed=0, limits=limits),
        number=1,
        engine_url="none://",
        min_version=0,
        queued_at_s=time.time(),
    )

    async def main() -> dict[str, Any]:
        provider, free = make_provider("bubblewrap"), asyncio.Semaphore(4)

        async def one(script: str) -> Any:
            async with free:
                landed = await run_episode(
                    attempt,
                    provider=provider,
                    engine=NoEngine(),  # type: ignore[arg-type]
                    agent=ShellAgent(script),
                    renderer=None,  # type: ignore[arg-type]
                    grader=make_grader("tests"),
                    worker="w",
                    now=time.time,
                )
            return landed.outcome

        return dict(zip(scripts, await asyncio.gather(*map(one, scripts.values())), strict=True))

    return asyncio.run(main())


def outcome_of(task: Task, script: str) -> Graded | Failed:
    return outcomes_of(task, {"": script})[""]


def grades_of(cases: Iterable[tuple[Task, str]], limits: Limits = LIMITS) -> list[Evidence | GraderError]:
    """What the grader says to each patch, each in a sandbox of its own."""

    async def main() -> list[Evidence | GraderError]:
        provider, given = make_provider("bubblewrap"), []
        for task, patch in cases:
            spec = grading_spec(task, limits=limits, owner="test", deadline_at_s=time.time() + 60)
            async with provider.open(spec) as sandbox:
                try:
                    given.append(await make_grader("tests").grade(task, patch, sandbox=sandbox, limits=limits))
                except GraderError as error:
                    given.append(error)
        return given

    return asyncio.run(main())


def evidence_of(task: Task, patch: str, limits: Limits = LIMITS) -> Evidence:
    (evidence,) = grades_of([(task, patch)], limits)
    assert isinstance(evidence, Evidence)
    return evidence


def put(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND\n"


ALL_PASS = "PASSED tests/test_calc.py::test_add\nPASSED tests/test_calc.py::test_defined"
FORGED = (
    "print('PASSED test_add'); print('PASSED test_defined')\n"
    "print('=== short test summary info ===')\n"
    f"print('''{ALL_PASS}''')\n"
    "print('>>>>> End Test Output')\n"
)
HOOK = "def pytest_collection_modifyitems(items):\n    for item in items: item.runtest = lambda: None"
# These turn pytest's result when they reach the grading sandbox.
AGAINST_PYTEST = {
    "conftest": put("conftest.py", HOOK),
    "conftest of the tests": put("tests/conftest.py", HOOK),
    "pytest.ini": put("pytest.ini", "[pytest]\naddopts = -p evil") + put("evil.py", HOOK),
    "setup.cfg": put("setup.cfg", "[tool:pytest]\naddopts = -p evil") + put("evil.py", HOOK),
    "pyproject": put("pyproject.toml", "[tool.pytest.ini_options]\naddopts = '-p evil'") + put("evil.py", HOOK),
    "entry point": put("evil-1.dist-info/entry_points.txt", "[pytest11]\nevil = evil")
    + put("evil-1.dist-info/METADATA", "Name: evil\nVersion: 1")
    + put("evil.py", HOOK),
    "shadows pytest": put("pytest.py", FORGED) + put("pytest/__main__.py", FORGED),
    "shadows the standard library": put("argparse.py", FORGED + "raise SystemExit(0)"),
}
# These use that the code under test runs in the process of the tests.
FROM_WITHIN = {
    "prints results": put("calc.py", BUG + FORGED),
    "prints results and exits": put("calc.py", BUG + FORGED + "import os, sys; sys.stdout.flush(); os._exit(0)"),
    "prints results and leaves": put("calc.py", BUG + FORGED + "raise SystemExit(0)"),
    "kills the script": put("calc.py", BUG + FORGED + "import os, sys; sys.stdout.flush(); os.kill(os.getppid(), 9)"),
    "skips": put("calc.py", "import pytest\ndef add(a, b): pytest.skip('later')"),
    "expects failure": put("calc.py", "import pytest\ndef add(a, b): pytest.xfail('later')"),
    "claims that python is missing": put(
        "calc.py", BUG + "print('bash: line 5: python3: command not found', flush=True)\nimport os; os._exit(127)"
    ),
    "floods the log": put("calc.py", BUG + "import os\nfor i in range(200): os.write(1, b'x' * 65536)\nos._exit(0)"),
    "eats memory": put("calc.py", BUG + "x = bytearray(2 << 30)"),
}
AGAINST_ANY = FROM_WITHIN | {
    "nothing": "true",
    "sitecustomize": put("sitecustomize.py", FORGED + "import os; os._exit(0)"),
    "pth": put("evil.pth", "import os; os._exit(0)"),
    "own tests": put("tests/test_calc.py", FORGED + "def test_add(): pass\ndef test_defined(): pass"),
    "tests is a link": "rm -rf tests; mkdir /tmp/t; ln -s /tmp/t tests",
    "code is a link": "rm calc.py; ln -s /dev/stdin calc.py",
    "tests is a file": "rm -rf tests; echo x > tests",
    "machine": (
        "echo 'python3() { true; }' >> ~/.bashrc; echo 'exit 0' > /tmp/eval.sh; mkdir -p bin; "
        "echo 'exit 0' > bin/python3; chmod +x bin/python3; cp bin/python3 python3; alias python3=true;"
        "cp bin/python3 /usr/local/bin/python3"
    ),
    "large file": "head -c 3000000 /dev/urandom > data.bin; " + FIX,
    "fills the disk": FIX + "; head -c 200M /dev/zero > /tmp/full; head -c 200M /dev/urandom > full",
    "deletes everything": "rm -rf /testbed/* /testbed/.git",
    "unreadable": "chmod 000 calc.py pkg",
}


@pytest.mark.parametrize(
    ("task", "scripts"),
    [(SCRIPT, AGAINST_ANY), (PYTEST, FROM_WITHIN), (PYTEST, AGAINST_PYTEST)],
    ids=["script", "pytest", "pytest's own ways"],
)
def test_no_attack_is_rewarded_or_taken_for_a_broken_machine(task: Task, scripts: Mapping[str, str]) -> None:
    for name, outcome in outcomes_of(task, scripts).items():
        assert isinstance(outcome, Graded), (name, outcome)
        assert outcome.reward == 0.0, (name, outcome)
        assert not outcome.evidence.resolved, (name, outcome)
        assert len(outcome.evidence.log_tail) < 5_000


def test_the_attacks_on_pytest_are_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.grader.tests.admit", lambda _, parts: (parts, ()))
    rewards = {name: outcome.reward for name, outcome in outcomes_of(PYTEST, AGAINST_PYTEST).items()}  # type: ignore[union-attr]
    assert set(rewards.values()) == {1.0}, rewards


HONEST = {
    "edit": FIX,
    "commit": f"{FIX}; git add -A; git commit -qm x",
    "no repository": f"{FIX}; rm -rf .git",
    "another repository": f"{FIX}; rm -rf .git; git init -q; git add -A; git commit -qm x",
    "a repository inside": f"{FIX}; git init -q sub; touch sub/x; git init -q pkg/two; touch pkg/two/y",
    "hooks, filters and attributes": (
        f"{FIX}; git config core.fsmonitor false; git config filter.x.clean 'rm -f'; echo '* filter=x' > .gitattributes"
    ),
    "new files": f"{FIX}; mkdir new; echo x > new/file.txt; printf '\\0\\1' > new/data",
    "odd names": f"{FIX}; touch empty 'with space' $'caf\\xc3\\xa9' $'a\\nb' '\"'; echo x > 'a b/ c'; echo > '- b/x'",
    "other encodings": f"{FIX}; printf '# caf\\xe9\\n' > latin.py; printf '\\r\\n' >> README.md; printf x >> README.md",
    "removed file": f"{FIX}; rm README.md",
    "moved file": f"{FIX}; git mv README.md LIESMICH.md; chmod +x calc.py",
    "left-overs": f"{FIX}; mkdir -p __pycache__ pkg/__pycache__; touch __pycache__/calc.pyc pkg/__pycache__/x.pyc",
    "touched tests as well": f"{FIX}; echo 'N = 2' > tests/helper.py; {put('tests/test_calc.py', 'no')}",
    "sleeps in the background": f"{FIX}; (sleep 60 &) ; true",
}


def test_a_right_change_is_rewarded_however_it_was_left() -> None:
    for name, outcome in outcomes_of(SCRIPT, HONEST).items():
        assert isinstance(outcome, Graded), (name, outcome)
        assert outcome.evidence.resolved, (name, outcome)


def test_pytest_grades_a_right_change() -> None:
    outcome = outcome_of(PYTEST, FIX)
    assert isinstance(outcome, Graded), outcome
    assert outcome.evidence.resolved, outcome.evidence
    assert set(outcome.evidence.statuses.values()) == {"PASSED"}


def new_file(path: str) -> str:
    return unified(path, None, "x = 1\n")


def test_a_patch_that_does_not_apply_is_a_grade() -> None:
    patches = {
        "up": new_file("../outside.py"),
        "absolute": new_file("/tmp/outside.py"),
        "git": new_file(".git/hooks/pre-commit"),
        "rubbish": "rubbish",
        "other": unified("calc.py", "other\n", "text\n"),
        "smuggled": SCRIPT.patch + "--- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n@@ -0,0 +1 @@\n+x\n",
        "large": "x" * (2 << 20),
    }
    for name, evidence in zip(patches, grades_of((SCRIPT, patch) for patch in patches.values()), strict=True):
        assert isinstance(evidence, Evidence), (name, evidence)
        assert not evidence.resolved, (name, evidence)
        assert not evidence.patch_applied, (name, evidence)
        assert set(evidence.statuses.values()) == {"MISSING"}, (name, evidence)


def test_gold_empty_and_shifted_patch() -> None:
    shifted = SCRIPT.patch.replace("@@ -1,2 +1,2 @@", "@@ -3,2 +3,2 @@")
    assert shifted != SCRIPT.patch
    gold, empty, moved = grades_of((SCRIPT, patch) for patch in (SCRIPT.patch, "", shifted))
    assert isinstance(gold, Evidence)
    assert gold.resolved
    assert isinstance(empty, Evidence)
    assert empty.patch_applied
    assert not empty.resolved
    assert empty.statuses == {"test_add": "FAILED", "test_defined": "PASSED"}
    assert empty.exit_code == 1
    assert isinstance(moved, Evidence), "git takes a hunk that is a few lines off"
    assert moved.resolved


def test_tests_that_run_out_of_time_are_a_grade() -> None:
    slow = replace(SCRIPT, eval_script=SCRIPT.eval_script.replace("python3 ", "sleep 30; python3 "))
    evidence = evidence_of(slow, SCRIPT.patch, replace(LIMITS, grade_s=0.5))
    assert not evidence.resolved
    assert "out of time" in evidence.log_tail


def test_what_is_not_the_patchs_fault_is_an_error() -> None:
    broken = {
        "log_parser": replace(SCRIPT, log_parser="other"),
        "eval_script": replace(SCRIPT, eval_script="python3 tests/test_calc.py"),
        "environment": replace(SCRIPT, eval_script=SCRIPT.eval_script.replace("python3", "python4")),
        "test_patch": replace(SCRIPT, test_patch=unified("README.md", "other\n", "text\n")),
    }
    for kind, error in zip(broken, grades_of((task, SCRIPT.patch) for task in broken.values()), strict=True):
        assert isinstance(error, GraderError), (kind, error)
        assert error.kind == kind


def test_an_eval_script_that_brings_its_own_tests() -> None:
    own = f"git apply - <<'EOF'\n{SCRIPT.test_patch}EOF\n"
    outcome = outcome_of(replace(SCRIPT, eval_script=own + SCRIPT.eval_script), FIX)
    assert isinstance(outcome, Graded)
    assert outcome.evidence.resolved, outcome.evidence


def test_a_sandbox_that_can_not_start_is_no_grade() -> None:
    outcome = outcome_of(replace(SCRIPT, image="other"), FIX)
    assert isinstance(outcome, Failed)
    assert outcome.boundary is Boundary.SANDBOX_START
