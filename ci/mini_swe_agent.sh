#!/usr/bin/env bash
# The agent "external" with the real mini-swe-agent, in a virtual environment of its own (.venv-mini), up to a step of the
# trainer on what it did. Its loop needs only a few of its dependencies, so only those are installed. About a minute (60 MB).
set -euo pipefail
cd "$(dirname "$0")/.."
make --silent setup
venv=.venv-mini
pins=(mini-swe-agent==2.4.6)
needed=(jinja2 pydantic platformdirs python-dotenv pyyaml rich typer requests)
if ! [ -e "$venv/ready" ]; then
  .venv/bin/python -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "${pins[@]}"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "${needed[@]}"
  touch "$venv/ready"
fi
ROLLOUT_FARM_MINI_PYTHON="$PWD/$venv/bin/python" .venv/bin/pytest -p no:xdist tests/extra_scaffold
