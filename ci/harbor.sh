#!/usr/bin/env bash
# Tests with the real harbor package: its models read what the farm writes, its trials run on the farm's sandboxes, and a
# Harbor environment passes the sandbox contract. In a virtual environment of their own, build/harbor-venv.
#
#   ci/harbor.sh [PYTEST ARGUMENTS]
#
# Needs Python 3.12 or 3.13 (PYTHON names it; else one is looked for), because harbor does, and the project's own .venv.
# About 130 packages the first time; every one is pinned in ci/harbor-constraints.txt, so nothing is left to resolve.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/harbor-venv
pins=ci/harbor-constraints.txt

find_python() {
  local found
  for found in "${PYTHON:-}" python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
    if [ -n "$found" ] && "$found" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$found"
      return
    fi
  done
  echo "harbor: no Python 3.12 or 3.13 here; install one and name it: PYTHON=... make test-harbor" >&2
  exit 2
}

wanted=$(sha256sum <"$pins")
if [ "$(cat "$venv/ready" 2>/dev/null)" != "$wanted" ]; then
  python=$(find_python)
  echo "[harbor] installing into $venv by $python (a few minutes)" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --requirement "$pins"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --editable .
  echo "$wanted" >"$venv/ready"
fi
if [ $# -gt 0 ]; then
  tests=("$@")
else
  tests=(tests/harbor tests/contracts/test_sandbox_provider.py)
fi
export ROLLOUT_FARM_TEST_HARBOR=1 ROLLOUT_FARM_BACK_ENDS=harbor
"$venv/bin/python" -m pytest -p no:xdist --durations 5 "${tests[@]}"
