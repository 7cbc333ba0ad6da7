#!/usr/bin/env bash
# The gate of one change: pass@1 against ci/baseline.json, durations against the code of the commit it branched from.
# usage: ci/gate.sh [BASE-BRANCH]   (default: origin/main; with no such branch the baseline's own commit)
# BUDGET_MINUTES bounds it (75). Exit code 0: pass, 1: regression, 2: bad input, 3: inconclusive.
set -uo pipefail
cd "$(dirname "$0")/.."
branch=${1:-origin/main}
[ -e .venv/ready ] || ci/setup.sh || exit 2

base=()
if fork=$(git merge-base HEAD "$branch" 2>/dev/null); then
  base=(--base "$fork")
fi
.venv/bin/harness gate --baseline ci/baseline.json "${base[@]}" --budget-minutes "${BUDGET_MINUTES:-75}"
code=$?
case $code in
  0) ;;
  1) echo "::error title=gate::regression, see the table" ;;
  3) echo "::warning title=gate::inconclusive within the budget: not shown to be worse, not shown to be fine" ;;
  *) echo "::error title=gate::the gate could not run (exit code $code)" ;;
esac
exit $code
