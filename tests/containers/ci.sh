#!/bin/bash
# Everything that `make test SUITE=containers` needs on a bare Debian 12 (root), and nothing left afterwards but a cache:
#
#   tests/containers/ci.sh [COMMAND …]            default: make test SUITE=containers
#
# Where an engine answers already, it is used as it is. Else Debian's is installed, started for this command alone, and
# stopped; its base images are made from Debian's packages, because a registry need not be in reach. The next run finds
# their layers, and those of PyTorch, unless another run has them at the time.
#
# env: LOCKSTEP_CI_CACHE  keeps the engine's images, the base image's files and the Python packages (~/.cache/lockstep)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
cache=${LOCKSTEP_CI_CACHE:-$HOME/.cache/lockstep}
[ $# -gt 0 ] || set -- make -C "$root" test SUITE=containers
mkdir -p "$cache"

state= made=()
# The machine is given back as it was: the engine closes the FORWARD chain, opens ip_forward and leaves its bridge; one
# that ran before keeps no image that was made here.
cleanup() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$state" ]; then
    # Layers that no run has used for a week go.
    [ -z "${ENGINE_DATA:-}" ] || docker builder prune --force --filter until=168h > /dev/null || true
    "$here/dockerd.sh" --stop "$state" || true
    ip link delete docker0 2> /dev/null || true
    iptables -P FORWARD "${policy:-ACCEPT}" 2> /dev/null || true
    echo "$forward" > /proc/sys/net/ipv4/ip_forward || true
  elif [ ${#made[@]} -gt 0 ]; then
    docker image rm --force "${made[@]}" > /dev/null || true
  fi
  exit "$status"
}
# have IMAGE: whether it is there.
have() { docker image inspect "$1" > /dev/null 2>&1; }
# have_or_pull IMAGE OURS: whether it is there, or a registry is that has it; none is asked where an earlier run has made OURS in its place.
have_or_pull() {
  have "$1" && return
  ! have "$2" && timeout 60 docker pull -q "$1" > /dev/null 2>&1 && made+=("$1")
}
# make_image NAME COMMAND…: makes an image that is gone afterwards, unless it is there.
make_image() {
  have "$1" && return
  made+=("$1")
  "${@:2}" > /dev/null
}
trap cleanup EXIT
trap 'exit 130' INT TERM

if ! docker version > /dev/null 2>&1 || ! docker compose version > /dev/null 2>&1; then
  # docker 28 may lie about without a daemon or plugins: Debian's own come first.
  export PATH=/usr/bin:$PATH
  if ! [ -x /usr/sbin/dockerd ] || ! docker compose version > /dev/null 2>&1; then
    "$here/install-docker.sh" > "$cache/install-docker.log" 2>&1 || { tail -n 20 "$cache/install-docker.log" >&2; exit 1; }
  fi
  command -v debootstrap curl > /dev/null || { apt-get update -qq && apt-get install -qy debootstrap curl > /dev/null; }
  forward=$(cat /proc/sys/net/ipv4/ip_forward) policy=$(iptables -S FORWARD | sed -n 's/^-P FORWARD //p')
  state=$(mktemp -d /tmp/lockstep-engine.XXXXXX)
  exec 9> "$cache/engine.lock" # the engine inherits it
  if flock --nonblock 9; then ENGINE_DATA=$(cd "$cache" && pwd)/engine && export ENGINE_DATA; fi
  # What a killed engine has left may keep the next one from starting.
  started=$("$here/dockerd.sh" "$state") || {
    "$here/dockerd.sh" --stop "$state"
    rm -rf "${ENGINE_DATA:-}"
    started=$("$here/dockerd.sh" "$state")
  }
  eval "$started"
  # A run that was killed leaves them.
  docker ps --all --quiet | xargs --no-run-if-empty docker rm --force > /dev/null
  docker network prune --force > /dev/null
  docker volume prune --all --force > /dev/null
  docker images --quiet --filter reference='lockstep-test*' | xargs --no-run-if-empty docker image rm --force > /dev/null
fi

if [ -z "${BASE_IMAGE:-}" ] && ! have_or_pull python:3.11-slim-bookworm lockstep-base:bookworm; then
  export BASE_IMAGE=lockstep-base:bookworm
  ROOTFS_CACHE=$cache/bookworm-rootfs.tar make_image "$BASE_IMAGE" "$here/base-image.sh" "$BASE_IMAGE"
fi
if [ -z "${PROMETHEUS_IMAGE:-}" ] && ! have_or_pull prom/prometheus:v3.5.0 lockstep-prometheus:debian; then
  export PROMETHEUS_IMAGE=lockstep-prometheus:debian
  make_image "$PROMETHEUS_IMAGE" docker build -q -t "$PROMETHEUS_IMAGE" ${BASE_IMAGE:+--build-arg BASE_IMAGE="$BASE_IMAGE"} - < "$here/services.Dockerfile"
fi
if [ -z "${WHEELS:-}" ]; then
  lock=$root/docker/requirements-cpu.txt
  export WHEELS=$cache/wheels-$(sha256sum < "$lock" | cut -c1-16)
  if ! [ -e "$WHEELS/.complete" ]; then
    download=(python3 -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version 3.11
      --require-hashes --dest "$WHEELS" -r "$lock")
    # What pip knows by itself first: where torch's own index is out of reach, each package would wait for it.
    "${download[@]}" 2> "$cache/download.log" || "${download[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
    touch "$WHEELS/.complete"
  fi
fi
"$@"
