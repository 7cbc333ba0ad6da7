"""The set-up for machines apart in docs/operate.md is complete, and its commands are there."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest

from farm import cli as farm_cli
from farm.config import SGLANG_COMMAND, FarmConfig, load_config
from harness import cli as harness_cli
from trainer import cli as trainer_cli
from trainer.config import batch_rules
from trainer.config import load_config as load_trainer_config

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operate.md").read_text()
SET_UP = PAGE.partition("## One inference node")[2]
BLOCKS = re.findall(r"^```(\w*)\n(.+?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
(TOML,) = (text for language, text in BLOCKS if language == "toml")
LINES = [line for language, text in BLOCKS if not language for line in text.replace("\\\n", "").splitlines()]
PROGRAMS: dict[str, click.Group] = {"farm": farm_cli.main, "trainer": trainer_cli.cli, "harness": harness_cli.cli}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> FarmConfig:
    path = tmp_path_factory.mktemp("set-up") / "farm.toml"
    path.write_text(TOML)
    return load_config(path)


def test_the_configuration_is_whole(config: FarmConfig) -> None:
    assert config.rollout.tasks.startswith(("made:", "swebench:"))
    assert config.policy.base
    assert (config.renderer.name, config.grader.name) == ("chat", "tests")
    assert (config.engine.kind, config.engine.weights) == ("sglang", "push")
    assert config.cluster.kind == "ssh"
    assert config.cluster.span[1] * config.cluster.slots == 384
    assert config.limits.max_context_tokens > 10_000
    assert not [table for table in ("rollout", "policy", "renderer", "grader", "limits") if f"[{table}]" not in TOML]


def test_trainer_and_farm_fit_each_other(config: FarmConfig) -> None:
    rules = batch_rules(config.model_dump(mode="json"), where="docs")
    assert rules is not None
    profile = load_trainer_config(Path("qwen3-30b-a3b"))
    assert profile.micro_batch_tokens >= config.limits.max_context_tokens
    assert profile.push.backend == "nccl"


def test_the_engines_are_those_that_are_started(config: FarmConfig) -> None:
    (line,) = (line for line in LINES if "sglang.launch_server" in line)
    words = shlex.split(line.replace("$((30000 + i))", "30000"))
    options = {word: value for word, value in pairwise(words) if word.startswith("--")}
    assert "--enable-metrics" in line
    assert options.keys() <= set(SGLANG_COMMAND)
    assert options["--model-path"] == config.policy.base
    assert int(options["--context-length"]) >= config.engine.context_length
    gpus = re.findall(r"for i in ([\d ]+);", SET_UP)[0].split()
    assert options["--port"] == "30000"
    assert list(config.engine.urls) == [f"http://{options['--host']}:{30000 + int(i)}" for i in gpus]
    assert {urlsplit(url).hostname for url in config.engine.urls} == {options["--host"]}


@pytest.mark.parametrize("line", [line for line in LINES if line.split(" ")[0] in PROGRAMS])
def test_every_command_and_option_is_there(line: str) -> None:
    words = shlex.split(line, comments=True)
    command = PROGRAMS[words[0]].get_command(click.Context(PROGRAMS[words[0]]), words[1])
    assert command is not None, f"{words[0]} has no command {words[1]}"
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_what_an_evaluation_sets_is_allowed(tmp_path: Path) -> None:
    (line,) = (line for line in LINES if line.startswith("farm rollout") and "swebench:" in line and "/shared" in line)
    words = shlex.split(line)
    sets = [value for option, value in pairwise(words) if option == "--set"]
    (tmp_path / "farm.toml").write_text(TOML)
    rollout = {"tasks": words[words.index("--tasks") + 1]}
    found = load_config(tmp_path / "farm.toml", sets=sets, overrides={"rollout": rollout})
    assert (found.grader.name, found.sandbox.provider) == ("swebench", "docker")
    assert found.limits.limits.grade_s == load_config(overrides={"rollout": rollout}).limits.grade_s


@pytest.mark.parametrize("page", ["clusters", "train-on-gpus"])
def test_other_pages_lead_there(page: str) -> None:
    assert "operate.md#one-inference-node-one-training-node-a-cpu-fleet" in (DOCS / f"{page}.md").read_text()
    assert "\n## One inference node, one training node, a CPU fleet\n" in PAGE
