#!/usr/bin/env bash
# Makes .venv with the exact versions of constraints.txt and fetches the pinned sources of the real-code tasks.
# Needs python 3.11 or newer, git and bash; no root. Safe to run again: a finished step is not repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt)

say() { printf '\033[1m[set-up %s/4]\033[0m %s\n' "$1" "$2" >&2; }

"$python" - <<'EOF' || exit 2
import sys
if sys.version_info < (3, 11):
    sys.exit(f"python {sys.version.split()[0]} is too old: 3.11 or newer is needed; set PYTHON=/path/to/python3.11")
EOF
for tool in git bash; do
  command -v "$tool" >/dev/null || { echo "$tool is missing: install it with the system's package manager" >&2; exit 2; }
done

say 1 "virtual environment in .venv (about 3 minutes left, downloads apart)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
say 2 "torch, pinned (about 3 minutes left)"
torch=$(grep -E '^torch==' constraints.txt)
"${pip[@]}" "$torch"
say 3 "everything else, pinned (about 2 minutes left)"
"${pip[@]}" --editable '.[dev]'
say 4 "sources of the real-code tasks, pinned by hash (a few seconds left)"
.venv/bin/python -m farm.suites.pypi fetch
touch .venv/ready
