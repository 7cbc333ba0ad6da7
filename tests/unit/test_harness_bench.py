"""What `make bench` adds where a real SGLang is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import bench

RATE = {"median": 90.0, "p95": 95.0, "n": 3, "per_server_cpu_s": 80.0}
FOUND = {
    "unit": "output tokens/s",
    "embedded": {"c1": RATE},
    "sglang": {"c1": {**RATE, "median": 30.0}},
    "ratio": {"c1": 3.0},
    "weights": {"embedded": {"disk_s": 0.02}, "sglang": {"disk_s": 0.06}},
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    monkeypatch.setattr(bench, "PARTS", {"log": lambda: {"log.x": bench._figure([1.0], "MB/s")}})
    return tmp_path


def install(root: Path) -> None:
    """A script that measures nothing."""
    for folder in ("ci", "build/sglang-venv"):
        (root / folder).mkdir(parents=True)
    (root / "build/sglang-venv/ready").touch()
    (root / "found.json").write_text(json.dumps(FOUND))
    (root / "ci/sglang.sh").write_text('[ "$1" = bench ] && cp found.json build/bench-sglang.json')


def test_the_embedded_engine_is_compared_with_a_real_sglang_that_is_installed(root: Path) -> None:
    install(root)
    bench.bench(root / "bench.json")
    found = json.loads((root / "bench.json").read_text())
    assert found["log.x"]["median"] == 1.0
    assert found["against_sglang.embedded.output_tokens_per_s.c1"] == {
        "median": 90.0, "p95": 95.0, "n": 3, "unit": "tokens/s",
    }  # fmt: skip
    assert found["against_sglang.sglang.output_tokens_per_s.c1"]["median"] == 30.0
    assert found["against_sglang.embedded_to_sglang.c1"]["median"] == 3.0
    assert found["against_sglang.sglang.disk_s"] == {"median": 0.06, "p95": 0.06, "n": 1, "unit": "s"}


def test_without_it_one_line_says_how_to_get_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.bench(root / "bench.json")
    assert set(json.loads((root / "bench.json").read_text())) == {"log.x"}
    assert "`ci/sglang.sh install`" in capsys.readouterr().out
