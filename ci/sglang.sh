#!/usr/bin/env bash
# Real SGLang on the CPU: installs it into build/sglang-venv and runs the tests that need it.
# usage: ci/sglang.sh [install | test [PYTEST-ARGUMENT...] | bench]   (default: test; test and bench install first)
# Needs python 3.11 and the project's own .venv (ci/setup.sh). Nothing is compiled, no CUDA is installed; 2 GB of disk.
# Safe to run again: what is installed already is not installed again until ci/sglang-constraints.txt changes.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/sglang-venv
pins=ci/sglang-constraints.txt
python=${PYTHON:-python3}

install() {
  local wanted
  wanted=$(sha256sum <"$pins")
  if [ "$(cat "$venv/ready" 2>/dev/null)" = "$wanted" ]; then return; fi
  echo "[sglang] installing into $venv (about 2 minutes, downloads apart)" >&2
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # Every package is pinned, so nothing is left to resolve; and what SGLang declares would bring in CUDA.
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --requirement "$pins"
  echo "$wanted" >"$venv/ready"
}

action=${1:-test}
[ $# -gt 0 ] && shift
case $action in
  install) install ;;
  test)
    install
    SGLANG_PYTHON=$PWD/$venv/bin/python .venv/bin/python -m pytest -p no:xdist --durations 10 --timeout 700 \
      tests/contracts/test_engine.py tests/sglang "$@"
    ;;
  bench)
    install
    SGLANG_PYTHON=$PWD/$venv/bin/python .venv/bin/python tests/support/bench_sglang.py build/bench-sglang.json
    ;;
  *)
    echo "usage: ci/sglang.sh [install | test [PYTEST-ARGUMENT...] | bench]" >&2
    exit 2
    ;;
esac
