#!/usr/bin/env bash
# Shows on this machine what the gate says to nothing, to a planted bad policy and to a planted slow-down.
#
#   POLICY=FOLDER ci/show-gate.sh [CASE...]     cases: unchanged bad-policy slow-down (default: all)
#
# POLICY: a policy that solves well more than the margin of 5 points (default: the last of the full reproduction's RL run).
# TASKS: only so many tasks of the benchmark (default: all). BUDGET_MINUTES: of each case (75).
# SLOW: by which share each forward pass of the engine is lengthened (1.2, which made steps 23 % longer on two cores).
# Everything happens in build/show-gate, on a checkout of HEAD. On an idle machine: about 5 to 60 minutes a case.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$root/.venv/bin/python
out=$root/build/show-gate
tree=$out/tree
policy=${POLICY:-$(ls -d build/reproduce/full/rl/run/policies/step-* 2>/dev/null | tail -1)}
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(unchanged bad-policy slow-down)
for case in "${cases[@]}"; do
  case $case in unchanged | bad-policy | slow-down) ;;
  *) echo "show-gate: case '$case' is unknown; allowed: unchanged bad-policy slow-down" >&2; exit 2 ;;
  esac
done
[ -f "$policy/config.json" ] || { echo "show-gate: POLICY='$policy' is no model folder; name one" >&2; exit 2; }

git worktree remove --force "$tree" 2>/dev/null || true
rm -rf "$out" && mkdir -p "$out"
git worktree prune
git worktree add --quiet --detach "$tree" HEAD
trap 'git -C "$root" worktree remove --force "$tree"' EXIT
cp -r "$policy" "$tree/ci/policy"

gate() { (cd "$out" && PYTHONPATH=$tree "$python" -m harness.cli gate --baseline "$out/baseline.json" "$@"); }

# The planted regressions are made in the checkout that stands for the change.
plant_bad_policy() {
  "$python" - "$tree/ci/policy" "$tree/ci/bad-policy" <<'EOF'
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target)
for file in target.glob("*.safetensors"):
    tensors = load_file(file)
    rng = np.random.default_rng(0)
    for name, weights in tensors.items():
        if name.endswith(("down_proj.weight", "o_proj.weight")):
            noise = rng.normal(0, weights.astype(np.float32).std(), weights.shape)
            tensors[name] = noise.astype(weights.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
EOF
}

plant_slow_down() {
  "$python" - "$tree/farm/engine/embedded/scheduler.py" "${SLOW:-1.2}" <<'EOF'
import sys
from pathlib import Path

path, share = Path(sys.argv[1]), float(sys.argv[2])
text, head = path.read_text(), "    def step(self) -> None:\n"
assert text.count(head) == 1, "the engine's step has another form now: adapt this script"
path.write_text(text.replace(head, f"""    def step(self) -> None:
        before_s = time.perf_counter()
        self._planted_step()
        until_s = before_s + {1 + share} * (time.perf_counter() - before_s)
        while time.perf_counter() < until_s:
            pass

    def _planted_step(self) -> None:
"""))
EOF
}

limit=()
[ -z "${TASKS:-}" ] || limit=(--limit "$TASKS")
echo "== baseline: $policy"
gate --update-baseline --policy "$tree/ci/policy" "${limit[@]}"

wrong=0
for case in "${cases[@]}"; do
  echo "== $case"
  options=(--base HEAD --budget-minutes "${BUDGET_MINUTES:-75}")
  expected=0
  case $case in
    bad-policy) plant_bad_policy; options+=(--policy "$tree/ci/bad-policy"); expected=1 ;;
    slow-down) plant_slow_down; expected=1 ;;
  esac
  code=0
  gate "${options[@]}" || code=$?
  [ ! -f "$tree/build/gate/gate.json" ] || cp "$tree/build/gate/gate.json" "$out/$case.json"
  git -C "$tree" checkout --quiet -- .
  echo "$case: exit code $code, expected $expected"
  [ $code = $expected ] || wrong=1
done
exit $wrong
