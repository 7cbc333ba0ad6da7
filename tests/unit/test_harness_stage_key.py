"""A finished stage is kept exactly as long as what it depends on stays the same."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness import code_digest, progress
from harness.lab import Lab, StageError
from harness.profiles import QUICK
from harness.stage_key import changed, stage_key


def lab(folder: Path, **settings: object) -> Lab:
    profile = replace(QUICK, **settings)  # type: ignore[arg-type]
    return Lab(folder=folder, profile=profile, console=Console(file=io.StringIO(), width=200))


def writing(text: str, policy: Path | None = None) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (folder / "text").write_text(f"{text} {policy}")

    return work


def test_a_stage_is_done_once_and_again_only_when_its_settings_change(tmp_path: Path) -> None:
    first = lab(tmp_path).stage("a", writing("one")) / "text"
    kept_at = first.stat().st_mtime_ns
    lab(tmp_path).stage("a", writing("one"))
    assert first.stat().st_mtime_ns == kept_at
    bench = lab(tmp_path)
    bench.stage("a", writing("two"))
    assert first.read_text() == "two None"
    assert "again, for it changed: settings" in bench.console.file.getvalue()  # type: ignore[attr-defined]


def test_the_content_of_an_input_counts_not_its_place(tmp_path: Path) -> None:
    for name, text in (("a", "weights"), ("b", "weights"), ("c", "others")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(text)
    keys = [stage_key(writing("x", tmp_path / name), QUICK) for name in "abc"]
    assert keys[0] == keys[1]
    assert changed(keys[0], keys[2]) == ["settings"]


def test_an_interrupted_or_keyless_stage_is_done_again(tmp_path: Path) -> None:
    def breaks(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab(tmp_path).stage("a", breaks)
    assert not (tmp_path / "a" / "done.json").exists()
    folder = lab(tmp_path).stage("a", writing("whole"))
    assert sorted(p.name for p in folder.iterdir()) == ["done.json", "text"]
    (folder / "done.json").write_text(json.dumps({"wall_s": 1.0}))  # an older version's
    lab(tmp_path).stage("a", writing("whole"))
    assert "key" in json.loads((folder / "done.json").read_text())


def test_an_archive_runs_nothing(tmp_path: Path) -> None:
    bench = lab(tmp_path)
    bench.stage("a", writing("one"))
    bench.archive = True
    assert (bench.stage("a", writing("other")) / "text").read_text() == "one None"
    with pytest.raises(StageError, match="no logs of stage b"):
        bench.stage("b", writing("other"))


def test_only_the_profile_fields_that_are_used_count(tmp_path: Path) -> None:
    bench = lab(tmp_path)

    def work(folder: Path) -> None:
        folder.joinpath("n").write_text(str(bench.profile.attempts))

    key = stage_key(work, QUICK)
    assert key == stage_key(work, replace(QUICK, rl_steps=99))
    assert changed(key, stage_key(work, replace(QUICK, attempts=99))) == ["settings"]
    assert changed(key, stage_key(work, replace(QUICK, back_ends={"engine": "sglang"}))) == ["back_ends"]


def test_a_value_without_a_digest_is_refused() -> None:
    stream = io.StringIO()

    def work(folder: Path) -> None:
        print(folder, file=stream)

    with pytest.raises(TypeError, match="StringIO"):
        stage_key(work, QUICK)


def test_a_command_reaches_its_program_and_a_call_its_module(tmp_path: Path) -> None:
    seen: dict[str, Callable[[Path], None]] = {}

    class Noting(Lab):
        def stage(self, name: str, work: Callable[[Path], None]) -> Path:
            seen[name] = work
            return self.folder / name

    bench = Noting(folder=tmp_path, profile=QUICK, console=Console(file=io.StringIO()))
    bench.evaluate("base", tmp_path)
    bench.rl()
    rollout, training = (code_digest.reached(seen[name]) for name in ("eval-base", "rl"))
    assert rollout.runs_a_command
    assert "trainer" not in rollout.names
    assert "trainer" in training.names
    files = {str(p.relative_to(code_digest.ROOT)) for p in code_digest.closure(["farm.cli"])}
    assert {"farm/dispatch.py", "farm/engine/embedded/__init__.py", "farm/sandbox/bubblewrap.py"} <= files
    assert {"farm/sandbox/command_server.py", "farm/agent/__init__.py"} <= files
    assert not any(f.startswith(("trainer/", "harness/")) for f in files)


def test_comments_and_docstrings_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm" / "__init__.py").write_text("")
    module = tmp_path / "farm" / "it.py"

    def digest(text: str) -> str:
        module.write_text(text)
        for cached in (code_digest.closure_digest, code_digest._references, code_digest._file_digest):
            cached.cache_clear()
        return code_digest.closure_digest(frozenset({"farm.it"}))

    try:
        plain = digest('"""One."""\nX = 1\n')
        assert digest('"""Two."""\nX = 1  # why\n') == plain
        assert digest("X = 2\n") != plain
    finally:
        for cached in (code_digest.closure_digest, code_digest._references, code_digest._file_digest):
            cached.cache_clear()


def test_time_left() -> None:
    known = {"eval": 30.0, "eval-rl": 50.0, "rl": 400.0}
    assert progress.expected_s("eval-base", known) == 30.0
    assert progress.expected_s("eval-rl", known) == 50.0
    assert progress.left_s("rl", 100.0, ["eval-rl"], known) == 350.0
    assert progress.left_s("rl", 900.0, ["eval-rl"], known) == 50.0
    assert progress.words(42.4) == "42 s"
    assert progress.words(350) == "6 min"
    said: list[float] = []
    with progress.saying(said.append, every_s=0.001):
        while not said:
            pass
    assert said[0] > 0
