"""Configuration: closed, resolved, and wrong input answered by one helpful line."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.config import FarmConfig, load_config, parse_config, parse_workers, to_json, with_overrides
from farm.errors import UsageError
from farm.types import Boundary


def fails(given: dict[str, object], *parts: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(given, where="farm.toml")
    text = str(caught.value)
    assert "\n" not in text
    for part in ("farm.toml", *parts):
        assert part in text, text


def test_defaults_are_the_micro_profile_and_survive_json() -> None:
    config = parse_config({})
    assert config.rollout.tasks == "micro:rl"
    assert config.cluster.span == (2, 2)
    assert config.limits.lease > config.limits.episode_s
    assert set(config.retry.budgets) == set(Boundary)
    assert parse_config(to_json(config)) == config


def test_profile_follows_the_task_source_and_the_file_wins() -> None:
    config = parse_config({"rollout": {"tasks": "pypi"}, "limits": {"tool_s": 9.0}})
    assert config.limits.tool_s == 9.0
    assert config.limits.grade_s == 120.0
    assert parse_config(to_json(config)) == config


def test_file_then_sets_then_options(tmp_path: Path) -> None:
    path = tmp_path / "farm.toml"
    path.write_text('[rollout]\ngroup_size = 4\nseed = 1\n[sandbox]\nprovider = "fake"\n')
    config = load_config(
        path,
        sets=["rollout.seed=2", "sandbox.provider=bubblewrap"],
        overrides={"rollout": {"tasks": "micro:benchmark", "limit": None}, "cluster": {"workers": "1:4"}},
    )
    assert (config.rollout.group_size, config.rollout.seed, config.rollout.tasks) == (4, 2, "micro:benchmark")
    assert config.sandbox.provider == "bubblewrap"
    assert config.cluster.span == (1, 4)


def test_sets_reach_tables_within_sections() -> None:
    given = {"cluster": {"slurm": {"partition": "gpu", "cpus": 4}}}
    merged = with_overrides(given, ["cluster.slurm.partition=cpu", 'cluster.kubernetes.patch={a = "b"}'], {})
    config = parse_config(merged).cluster
    assert (config.slurm.partition, config.slurm.cpus, config.kubernetes.patch) == ("cpu", 4, {"a": "b"})
    assert given == {"cluster": {"slurm": {"partition": "gpu", "cpus": 4}}}, "what was given was changed"
    with pytest.raises(UsageError, match=r"cluster\.slurm\.partitoin: unknown key; did you mean 'partition'"):
        parse_config(with_overrides({}, ["cluster.slurm.partitoin=cpu"], {}))


def test_pools_have_what_they_don_t_say_from_the_section() -> None:
    given = {
        "context_length": 1024,
        "pools": {"one": {"count": 2}, "two": {"kind": "sglang", "urls": ["http://x:1"], "context_length": 600}},
    }
    config = parse_config({"engine": given})
    pools = config.engine.named_pools
    assert [(name, pool.kind, pool.count, pool.context_length) for name, pool in pools.items()] == [
        ("one", "embedded", 2, 1024),
        ("two", "sglang", 1, 600),
    ]
    assert parse_config(to_json(config)) == config
    assert list(parse_config({}).engine.named_pools) == ["default"]


def test_enough_attempts_follow_the_group_size() -> None:
    assert parse_config({}).rollout.min_attempts == 6
    assert parse_config({"rollout": {"group_size": 4}}).rollout.min_attempts == 3
    assert parse_config({"rollout": {"group_size": 1}}).rollout.min_attempts == 1


def test_sync_mode_has_no_staleness() -> None:
    assert parse_config({"rollout": {"mode": "sync", "max_staleness": 3}}).rollout.staleness == 0


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"rollout": {"group_sise": 4}}, ("rollout.group_sise", "group_size")),
        ({"rolout": {}}, ("rolout", "did you mean 'rollout'")),
        ({"rollout": {"group_size": "many"}}, ("rollout.group_size", "'many'", "integer")),
        ({"rollout": {"group_size": 0}}, ("rollout.group_size", "greater than or equal to 1")),
        ({"rollout": {"mode": "later"}}, ("rollout.mode", "'async' or 'sync'")),
        ({"rollout": {"min_attempts": 9}}, ("min_attempts 9", "group_size 8")),
        ({"rollout": 3}, ("rollout", "3")),
        ({"cluster": {"workers": "0"}}, ("at least one worker",)),
        ({"cluster": {"workers": "4:1"}}, ("MIN must not be greater",)),
        ({"cluster": {"workers": "some"}}, ("must be N or MIN:MAX",)),
        ({"cluster": {"address": "tcp://10.0.0.1:8786"}}, ("without TLS", "tls://")),
        ({"cluster": {"address": "tls://10.0.0.1:8786"}}, ("tls_ca",)),
        ({"cluster": {"address": "nowhere"}}, ("tcp://HOST:PORT",)),
        ({"engine": {"kind": "vllm"}}, ("engine.kind", "'embedded', 'launch' or 'sglang'")),
        ({"engine": {"kind": "sglang"}}, ("needs urls",)),
        ({"engine": {"urls": ["http://127.0.0.1:1"]}}, ("only for kind",)),
        ({"engine": {"max_total_tokens": 100}}, ("context_length",)),
        ({"engine": {"command": ["serve"]}}, ("engine.command", "{port}")),
        ({"engine": {"command": ["serve", "{port}", "{gpu}"]}}, ("engine.command", "'gpu'", "allowed: model")),
        ({"engine": {"command": ["serve", "{port"]}}, ("engine.command", "write a brace that is meant as such twice")),
        ({"engine": {"pools": {"a": 3}}}, ("pools.a must be a table", "[engine.pools.a]")),
        ({"engine": {"pools": {"a": {"kind": "sglang"}}}}, ("engine.pools.a", "needs urls")),
        ({"engine": {"count": 2, "pools": {"a": {}}}}, ("named ones (a)", "[engine.pools.NAME]")),
        ({"engine": {"pools": {"a": {"context_length": 256}}}}, ("limits.max_context_tokens 512", "256")),
        ({"limits": {"tool_s": 70}}, ("tool_s < agent_s < episode_s < lease_s",)),
        ({"limits": {"lease_s": 100}}, ("tool_s < agent_s < episode_s < lease_s",)),
        ({"limits": {"max_context_tokens": 1024}}, ("engine.context_length",)),
    ],
)
def test_one_line_that_says_what_is_wrong(given: dict[str, object], parts: tuple[str, ...]) -> None:
    fails(given, *parts)


@pytest.mark.parametrize("item", ["rollout.seed", "seed=3", "=3", "rollout.=1"])
def test_malformed_set(item: str) -> None:
    with pytest.raises(UsageError, match=r"section\.key=value"):
        load_config(None, sets=[item])


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[rollout\n")
    with pytest.raises(UsageError, match="not valid TOML"):
        load_config(broken)


def test_workers() -> None:
    assert parse_workers("3") == (3, 3)
    assert parse_workers("1:8") == (1, 8)


def test_closed_and_frozen() -> None:
    config = FarmConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.seed = 3  # type: ignore[misc]
