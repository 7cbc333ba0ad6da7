#!/usr/bin/env bash
# Tests with the real swebench package, in a virtual environment of their own (.venv-swebench) that sees the project's.
# Under a minute, and the first time another for some 40 packages (90 MB); then it goes on from what is installed. Tests
# over all of SWE-bench Verified are left out, and said to be, where ROLLOUT_FARM_DATA has no such file.
set -euo pipefail
cd "$(dirname "$0")/.."
make --silent setup
venv=.venv-swebench
if ! [ "$venv/ready" -nt constraints.txt ]; then
  .venv/bin/python -m venv "$venv"
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --editable '.[swebench]'
  touch "$venv/ready"
fi
ROLLOUT_FARM_TEST_SWEBENCH=1 "$venv/bin/python" -m pytest -rs --durations 5 tests/extra_swebench
