# reproduce: trains a policy by asynchronous RL and regenerates every reported figure.   test: all tests.
# test-sglang: the engine's tests on a real SGLang, which it installs (CPU).   bench-sglang: embedded against real.
# check: style, types, import contracts.   bench: speed of the parts, with bench-sglang where it is installed.   datasets, base-policy: make the shipped micro suite and weights anew.
SHELL := bash
BIN := .venv/bin
PROFILE ?= full

.PHONY: reproduce test test-swebench test-sandboxes test-clusters test-sglang test-harbor test-scaffold check bench bench-sglang datasets base-policy ci setup
reproduce: .venv/ready
	$(BIN)/harness reproduce --all --profile $(PROFILE)

test: .venv/ready
	$(BIN)/pytest --numprocesses 2 --dist loadscope --durations 10

test-swebench:  # with the real swebench package, in its own .venv-swebench
	ci/swebench.sh

# Docker and E2B back ends; as root, installs docker.io where it is missing.
test-sandboxes: .venv/ready
	ci/sandboxes.sh

test-harbor:  # with the real harbor package, in its own build/harbor-venv; needs Python 3.12 or 3.13
	ci/harbor.sh

test-scaffold:  # the agent "external" with the real mini-swe-agent, in its own .venv-mini
	ci/mini_swe_agent.sh

# Clusters: ssh, cut networks, Slurm, a double of Kubernetes; as root, installs what is missing.
test-clusters: .venv/ready
	ci/clusters.sh

test-sglang: .venv/ready
	ci/sglang.sh test

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/ready
	$(BIN)/harness bench

bench-sglang: .venv/ready
	ci/sglang.sh bench

datasets: .venv/ready
	$(BIN)/python -m farm.suites.micro

base-policy: .venv/ready
	$(BIN)/trainer base-policy

ci:
	.ci/run

setup: .venv/ready
.venv/ready: pyproject.toml constraints.txt ci/setup.sh
	ci/setup.sh
