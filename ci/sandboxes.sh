#!/usr/bin/env bash
# Runs the sandbox contract, and what each back end promises beyond it, on a real Docker engine and on E2B's SDK.
#
#   ci/sandboxes.sh [PYTEST ARGUMENTS]
#
# Needs root and a Debian or Ubuntu, because it installs docker.io and crun with apt-get where they are missing, and starts
# an engine of its own: own data in build/, own socket, no bridge, no change to the host's network; it ends with the script.
# No registry and no account is used: images are made from this host's files, E2B is a local server over bubblewrap.
# A fresh machine takes two to three minutes, most of it apt-get and tests.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$root/build/sandboxes
began=$SECONDS

[ -e .venv/ready ] || ci/setup.sh
[ "$(id -u)" = 0 ] || { echo "sandboxes: run this as root: it starts a Docker engine" >&2; exit 2; }
need=()
command -v dockerd >/dev/null || need+=(docker.io iptables ca-certificates)
command -v crun >/dev/null || need+=(crun)
command -v unshare >/dev/null || need+=(util-linux)
if [ ${#need[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || { echo "sandboxes: install ${need[*]}: they are missing, and there is no apt-get" >&2; exit 2; }
  echo "installing ${need[*]}"
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
fi

# The extras, beside .venv and not in it: `make test` has to pass without them.
mkdir -p "$out"
venv=$out/venv
python=$venv/bin/python
[ -x "$python" ] || .venv/bin/python -m venv "$venv"
main=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$main" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
"$python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt docker e2b
echo "ready after $((SECONDS - began)) s"

# A socket's path is short, and overlay2 needs a real disk.
engine=$(mktemp -d "${TMPDIR:-/tmp}/farm-docker.XXXXXX")
trap 'rm -rf "$engine"' EXIT
export PYTHONPATH=$root ROLLOUT_FARM_BACK_ENDS=docker,e2b
unset DOCKER_HOST E2B_API_KEY E2B_API_URL E2B_SANDBOX_URL E2B_DOMAIN E2B_DEBUG
if [ $# -gt 0 ]; then
  tests=("$@")
else
  tests=(tests/back_ends tests/contracts/test_sandbox_provider.py)
fi
"$python" tests/support/docker_engine.py "$engine" \
  "$python" -m pytest -p no:xdist --durations 5 "${tests[@]}"
echo "sandboxes: passed in $((SECONDS - began)) s"
