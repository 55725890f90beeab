#!/usr/bin/env bash
# Makes two machines out of this one, joins them to a Ray cluster of one declared GPU each, and runs
# a command on the first:
#
#   PATH=$PWD/.venv/bin:$PATH scripts/two_nodes.sh python examples/ray_tp.py
#   scripts/two_nodes.sh --check    # says what is missing, if anything is
#
# Linux namespaces give each a network interface, a loopback device, a host name, shared memory and
# /run of its own, with Ray's files in it; the disk and the processors are shared. They end with
# this script however it ends, and with them every process, interface and file of Ray.
# The exit status is the command's; 2 if something is missing.
set -euo pipefail

readonly subnet=10.77.0
readonly device=eth0 ray_port=6379
readonly store_bytes=$((128 << 20))  # of Ray's objects: configs only

missing() { echo "two_nodes.sh: $1" >&2; exit 2; }

check() {
  local tool said
  [ "$(id -u)" = 0 ] || missing "wanted root, which may make namespaces; got user $(id -un)"
  for tool in ip mount setpriv unshare; do
    command -v "$tool" >/dev/null || missing "wanted $tool (packages iproute2, util-linux) on PATH"
  done
  command -v ray >/dev/null || missing "wanted ray on PATH: pip install 'ray==2.60.0'"
  said=$(in_namespaces ip link add "$device" type veth peer name other 2>&1) ||
    missing "wanted a kernel and a container that allow namespaces and veth devices: $said"
}

# To be called in a subshell, which becomes the command: a child of this script, killed with it.
in_namespaces() {
  exec setpriv --pdeathsig KILL \
    unshare --net --mount --ipc --uts --pid --fork --kill-child --mount-proc "$@"
}

become() {  # node's name, its address
  hostname "$1"
  mount -t tmpfs shm /dev/shm
  mount -t tmpfs run /run
  ip link set lo up
  export VLLM_HOST_IP=$2 GLOO_SOCKET_IFNAME=$device NCCL_SOCKET_IFNAME=$device
  export TMPDIR=/run  # sockets of one node are out of the other's reach
  own_node=(--node-ip-address="$2" --temp-dir=/run/ray --num-gpus=1 --disable-usage-stats
    --object-store-memory="$store_bytes")
}

start_first() {
  # Ray asks for a token where this user has one, and another node brings it only when told to.
  RAY_AUTH_TOKEN=$(cat /proc/sys/kernel/random/uuid)
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  become first "$subnet.1"
  ip netns add second
  ip link add "$device" type veth peer name "$device" netns second
  ip address add "$subnet.1/24" dev "$device"
  ip -n second address add "$subnet.2/24" dev "$device"
  ip link set "$device" up
  ip -n second link set "$device" up
  ray start --head --port="$ray_port" --include-dashboard=false "${own_node[@]}"
}

start_second() {
  become second "$subnet.2"
  ray start --address="$subnet.1:$ray_port" "${own_node[@]}"
}

case ${1:-} in
  "") missing "wanted a command to run" ;;
  --check) check ;;
  --first)
    start_first >&2
    ip netns exec second unshare --mount --ipc --uts "$0" --second >&2
    export RAY_ADDRESS=$subnet.1:$ray_port
    "${@:2}"
    ;;
  --second) start_second ;;
  *)
    check
    in_namespaces "$0" --first "$@" &
    trap 'kill -KILL $! 2>/dev/null || true' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    wait $!
    ;;
esac
