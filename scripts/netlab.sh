#!/usr/bin/env bash
# A cluster on one machine: hosts hvdhost0, hvdhost1, ... are network namespaces at 10.77.0.1, .2, ..., joined by a bridge, each with its
# egress shaped to a rate. Real links, real MPI over TCP; only the processors are shared.      (root, and Debian's iproute2)
#   netlab.sh up HOSTS RATE             RATE as tc has it (100mbit, 1gbit), or none
#   netlab.sh run HOSTS SCRIPT ARGS...  a rank on each of the first HOSTS hosts, under mpirun, in .venv
#   netlab.sh down                      removes what `up` made
# What a rank really sent: /sys/class/net/eth0/statistics/tx_bytes, read inside the rank.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
usage() { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
number() { [[ $1 =~ ^[1-9][0-9]?$ ]] || { echo "netlab.sh: HOSTS must be 1 to 99, got '$1'" >&2; exit 2; }; }

down() {
  local host
  for host in $(ip netns list | awk '$1 ~ /^hvdhost[0-9]+$/ {print $1}'); do
    ip netns del "$host"
    rm -rf "/etc/netns/$host"
  done
  ip link del hvdlab 2>/dev/null || true
}

up() {
  local hosts=$1 rate=$2 i
  down
  ip link add hvdlab type bridge
  ip link set hvdlab up
  for ((i = 0; i < hosts; i++)); do
    ip netns add "hvdhost$i"
    ip link add "hvdlab$i" type veth peer name eth0 netns "hvdhost$i"
    ip link set "hvdlab$i" master hvdlab up
    ip -n "hvdhost$i" addr add "10.77.0.$((i + 1))/24" dev eth0
    ip -n "hvdhost$i" link set eth0 up
    ip -n "hvdhost$i" link set lo up
    [[ $rate == none ]] || ip netns exec "hvdhost$i" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 100ms
    # `ip netns exec` shows a namespace its own /etc/hosts, by which the hosts know each other.
    mkdir -p "/etc/netns/hvdhost$i"
    { echo "127.0.0.1 localhost"; for ((j = 0; j < hosts; j++)); do echo "10.77.0.$((j + 1)) hvdhost$j"; done; } >"/etc/netns/hvdhost$i/hosts"
  done
}

run() {
  local hosts=$1 i list=hvdhost0:1; shift
  ip netns list | grep -q "^hvdhost$((hosts - 1))\b" || { echo "netlab.sh: no host hvdhost$((hosts - 1)); run 'netlab.sh up $hosts RATE' first" >&2; exit 1; }
  for ((i = 1; i < hosts; i++)); do list+=,hvdhost$i:1; done
  export PATH=$bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
  export HOROVOD_STALL_CHECK_TIME_SECONDS=${HOROVOD_STALL_CHECK_TIME_SECONDS:-60}
  export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=${HOROVOD_STALL_SHUTDOWN_TIME_SECONDS:-240}
  local command=(mpirun --allow-run-as-root --prtemca plm ssh --prtemca plm_ssh_agent "$here/netlab_agent.sh" \
    --prtemca prte_if_include eth0 --mca btl tcp,self --mca btl_tcp_if_include eth0 --mca pml ob1 \
    --bind-to none --mca mpi_yield_when_idle 1 -H "$list" -np "$hosts" -x PATH -x OMP_NUM_THREADS -x PYTHONUNBUFFERED \
    -x HOROVOD_STALL_CHECK_TIME_SECONDS -x HOROVOD_STALL_SHUTDOWN_TIME_SECONDS python "$@")
  exec "$here/netlab_agent.sh" hvdhost0 "$(printf '%q ' "${command[@]}")"
}

case ${1:-} in
  up) [[ $# == 3 ]] || usage; number "$2"; up "$2" "$3" ;;
  run) [[ $# -ge 3 ]] || usage; number "$2"; run "${@:2}" ;;
  down) down ;;
  *) usage ;;
esac
