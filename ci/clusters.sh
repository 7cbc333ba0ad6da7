#!/usr/bin/env bash
# Runs the cluster contract, and what each kind of cluster promises beyond it, on real ones that this script sets up on
# this machine: hosts of sshd's (ssh), networks that are cut (netns) and a Slurm of one node (slurm). There is no real
# Kubernetes here: real kubectl talks to a local double, and objects are checked against the published schemas
# (kubernetes).
#
#   ci/clusters.sh [KIND ...] [-- PYTEST ARGUMENTS]       KIND: ssh, netns, slurm, kubernetes; default: all
#
# Needs root and a Debian or Ubuntu, because it installs what is missing with apt-get. It opens no port beyond loopback and
# its own network namespaces, uses keys that it makes, and leaves nothing running. About twenty minutes on two idle cores;
# Slurm holds a requeued job back for two of them.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/build/clusters
python=$out/venv/bin/python
began=$SECONDS
known=(ssh netns slurm kubernetes)

# One function for each kind: what must be there. It may export what its tests need, and add to `need`.
need=()
packages=(cryptography)
around=()
prepare_ssh() {
  [ -x /usr/sbin/sshd ] || need+=(openssh-server)
  command -v ssh >/dev/null || need+=(openssh-client)
}
prepare_netns() {  # hosts of sshd's too, each in a network of its own
  prepare_ssh
  command -v ip >/dev/null || need+=(iproute2)
}
prepare_slurm() {
  command -v slurmctld >/dev/null || need+=(slurmctld)
  command -v slurmd-wlm >/dev/null || command -v slurmd >/dev/null || need+=(slurmd)
  command -v sbatch >/dev/null || need+=(slurm-client)
  command -v munged >/dev/null || need+=(munge)
  unset SLURM_CONF
  around=("$python" tests/support/slurm_cluster.py "$(mktemp -d "${TMPDIR:-/tmp}/farm-slurm.XXXXXX")")  # a short path
}
prepare_kubernetes() {
  command -v kubectl >/dev/null || need+=(kubernetes-client)
  packages+=(kubernetes-validate==1.37.0)  # it carries the schemas
  unset KUBECONFIG
}

kinds=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  declare -F "prepare_$1" >/dev/null || { echo "clusters: unknown kind $1; there are: ${known[*]}" >&2; exit 2; }
  kinds+=("$1")
  shift
done
[ "${1:-}" != -- ] || shift
[ ${#kinds[@]} -gt 0 ] || kinds=("${known[@]}")

[ -e .venv/ready ] || ci/setup.sh
[ "$(id -u)" = 0 ] || { echo "clusters: run this as root: it starts servers and makes network namespaces" >&2; exit 2; }
for kind in "${kinds[@]}"; do "prepare_$kind"; done
if [ ${#need[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || { echo "clusters: install ${need[*]}: they are missing, and there is no apt-get" >&2; exit 2; }
  echo "installing ${need[*]}"
  # Its servers must not start by themselves.
  policy=/usr/sbin/policy-rc.d
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy && trap 'rm -f $policy' EXIT; }
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
fi

# The extra `cluster`, beside .venv and not in it: `make test` has to pass without it.
mkdir -p "$out"
[ -x "$python" ] || .venv/bin/python -m venv "$out/venv"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
main=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$PWD" "$main" >"$site/main.pth"  # workers run this python, and get no PYTHONPATH
"$python" -m pip --disable-pip-version-check install --quiet --constraint constraints.txt "${packages[@]}"
echo "ready after $((SECONDS - began)) s"

export ROLLOUT_FARM_CLUSTERS=$(IFS=,; echo "${kinds[*]}")
if [ $# -gt 0 ]; then
  tests=("$@")
else
  tests=(tests/clusters tests/contracts/test_cluster.py)
fi
${around[@]+"${around[@]}"} "$python" -m pytest -p no:xdist --durations 5 "${tests[@]}"
echo "clusters: passed in $((SECONDS - began)) s"
