#!/usr/bin/env bash
# A cluster on one machine: hosts hvdhost0, hvdhost1, ... are network namespaces at 10.77.0.1, .2, ..., joined by a bridge, each
# with its egress shaped to a rate. MPI and Gloo use TCP over these links; the processors are shared. (root; Debian's iproute2)
#   netlab.sh [--lab NAME] up HOSTS RATE [DELAY] [--up RATE] [--down RATE]   RATE in kbit, mbit or gbit (100mbit,
#                                                             2.5gbit), or none; --up, --down: of what a host sends and
#                                                             receives, as homes have. DELAY: one way, as 25ms. With any
#                                                             of these, links.cpp joins the hosts
#   netlab.sh [--lab NAME] run [--ddp] HOSTS[xRANKS] SCRIPT ARGS...   RANKS ranks (1) on each of the first HOSTS hosts, in
#                                                             .venv: of Horovod under mpirun, or with torchrun's variables for
#                                                             torch DDP
#   netlab.sh [--lab NAME] cut|mend HOST                      HOST (0, 1, ...) loses all packets, until it is mended; its
#                                                             connections stay
#   netlab.sh [--lab NAME] down                               removes the hosts and kills what still runs there
# Labs of different names (by default hvd; at most 9 letters and digits) can exist at once: NAMEhost0, ... on their own bridge.
# The bytes that a rank sent: /sys/class/net/eth0/statistics/tx_bytes, read inside the rank.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) bin=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin
lab=hvd ranks=() attached=()
usage() { sed -n '2,15s/^# \?//p' "$0" >&2; exit 2; }
number() { [[ $1 =~ ^[1-9][0-9]?$ ]] || { echo "netlab.sh: HOSTS must be 1 to 99, got '$1'" >&2; exit 2; }; }

down() {
  local host link
  # Links are removed with their namespaces, but later: the next `up` would find their names taken.
  for link in $(ip -o link show master "${lab}lab" 2>/dev/null | awk -F '[:@ ]+' '{print $2}'); do
    ip link del "$link" 2>/dev/null || true
  done
  for host in $(ip netns list | awk -v "name=^${lab}host[0-9]+\$" '$1 ~ name {print $1}'); do
    # A process that is left of a killed job keeps its namespace alive.
    ip netns pids "$host" | xargs -r kill -9 2>/dev/null || true
    ip netns del "$host"
    rm -rf "/etc/netns/$host"
  done
  ip link del "${lab}lab" 2>/dev/null || true
  rm -f "/run/${lab}lab"
}

# A rate in bit/s; 0 for none.
bits() {
  local -A unit=([kbit]=1e3 [mbit]=1e6 [gbit]=1e9)
  [[ $1 != none ]] || { echo 0; return; }
  [[ ${1,,} =~ ^([0-9]*\.?[0-9]+)([kmg]bit)$ ]] ||
    { echo "netlab.sh: RATE must be none, or a number and kbit, mbit or gbit, as 100mbit; got '$1'" >&2; exit 2; }
  awk "BEGIN { printf \"%.0f\", ${BASH_REMATCH[1]} * ${unit[${BASH_REMATCH[2]}]} }"
}

up() {
  local hosts=$1 rate=$2 delay='' i host sent received burst
  shift 2
  sent=$(bits "$rate") received=$sent
  while (($#)); do
    case $1 in
      --up) sent=$(bits "${2:-}"); shift 2 ;;
      --down) received=$(bits "${2:-}"); shift 2 ;;
      *) [[ -z $delay && $1 =~ ^([0-9]*\.?[0-9]+)ms$ ]] || { echo "netlab.sh: DELAY must be as 25ms, got '$1'" >&2; exit 2; }
        delay=${BASH_REMATCH[1]}; shift ;;
    esac
  done
  # What a link may send at once after a pause: 2 ms of its rate, so that small messages are shaped, too.
  burst=$((sent / 4000 > 32000 ? sent / 4000 : 32000))
  down
  for ((i = 0; i < hosts; i++)); do
    host=${lab}host$i
    ip netns add "$host"
    ip -n "$host" link set lo up
    # `ip netns exec` mounts a namespace's own /etc/hosts.
    mkdir -p "/etc/netns/$host"
    { echo "127.0.0.1 localhost"; for ((j = 0; j < hosts; j++)); do echo "10.77.0.$((j + 1)) ${lab}host$j"; done; } >"/etc/netns/$host/hosts"
  done
  if [[ $delay || $sent != "$received" ]]; then
    delayed "$hosts" "${delay:-0}" "$sent" "$received"
    return
  fi
  ip link add "${lab}lab" type bridge
  ip link set "${lab}lab" up
  for ((i = 0; i < hosts; i++)); do
    host=${lab}host$i
    ip link add "${lab}lab$i" type veth peer name eth0 netns "$host"
    ip link set "${lab}lab$i" master "${lab}lab" up
    ip -n "$host" addr add "10.77.0.$((i + 1))/24" dev eth0
    ip -n "$host" link set eth0 up
    ((sent == 0)) ||
      ip netns exec "$host" tc qdisc add dev eth0 root tbf rate "${sent}bit" burst "$burst" latency 100ms
  done
}

# Starts links.cpp, which ends with the hosts, and takes orders from a pipe.
delayed() {
  local said
  [[ $bin/lab-links -nt $here/links.cpp ]] || "${CXX:-c++}" -O2 -std=c++20 -o "$bin/lab-links" "$here/links.cpp"
  mkfifo "/run/${lab}lab"
  coproc setsid "$bin/lab-links" "$lab" "$2" "$3" "$4" "$1" <>"/run/${lab}lab" 2>&1
  read -r said <&"${COPROC[0]}" && [[ $said == ready ]] || { echo "netlab.sh: ${said:-links failed}" >&2; exit 1; }
}

# cut or mend a host's link.
order() {
  if [[ -p /run/${lab}lab ]]; then
    echo "$1 $2" 1<>"/run/${lab}lab"
  else
    bridge link set dev "${lab}lab$2" state "$([[ $1 == cut ]] && echo disabled || echo forwarding)"
  fi
}

run() {
  local launcher=--mpi hosts each=1 i list command
  [[ $1 == --ddp ]] && { launcher=$1; shift; }
  [[ $# -ge 2 ]] || usage
  [[ $1 =~ ^[^x]+x([1-9])$ ]] && each=${BASH_REMATCH[1]}
  hosts=${1%x*}; shift
  number "$hosts"
  list=${lab}host0:$each
  ip netns list | grep -q "^${lab}host$((hosts - 1))\b" || { echo "netlab.sh: no host ${lab}host$((hosts - 1)); run 'netlab.sh up $hosts RATE' first" >&2; exit 1; }
  for ((i = 1; i < hosts; i++)); do list+=,${lab}host$i:$each; done
  export PATH=$bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 HVD_NETLAB=$lab
  export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
  export HOROVOD_STALL_CHECK_TIME_SECONDS=${HOROVOD_STALL_CHECK_TIME_SECONDS:-60}
  export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=${HOROVOD_STALL_SHUTDOWN_TIME_SECONDS:-240}
  case $launcher in
    --ddp)
      export WORLD_SIZE=$((hosts * each)) MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 GLOO_SOCKET_IFNAME=eth0
      export LOCAL_WORLD_SIZE=$each
      for ((i = 0; i < hosts * each; i++)); do
        RANK=$i LOCAL_RANK=$((i % each)) ip netns exec "${lab}host$((i / each))" python "$@" &
        ranks+=($!)
      done
      trap 'kill "${ranks[@]}" 2>/dev/null || true' EXIT
      # The first rank that fails ends the others.
      for ((i = 0; i < hosts * each; i++)); do wait -n; done
      return ;;
    *)
      # Remote ranks stay in mpirun's session, or with HVD_NETLAB_SESSIONS=1 begin their own. Linux divides the cores between
      # sessions first; on Linux 6.18, two ranks that spin in hvd.synchronize() keep both cores from other sessions.
      [[ -n ${HVD_NETLAB_SESSIONS:-} ]] || attached=(--leave-session-attached)
      command=(mpirun --allow-run-as-root --prtemca plm ssh --prtemca plm_ssh_agent "$here/netlab_agent.sh" \
      --prtemca prte_if_include eth0 --mca btl tcp,self --mca btl_tcp_if_include eth0 --mca pml ob1 \
      "${attached[@]}" --bind-to none \
      -H "$list" -np "$((hosts * each))" -x PATH -x OMP_NUM_THREADS -x PYTHONUNBUFFERED -x HVD_NETLAB \
      -x HOROVOD_STALL_CHECK_TIME_SECONDS -x HOROVOD_STALL_SHUTDOWN_TIME_SECONDS python "$@") ;;
  esac
  exec "$here/netlab_agent.sh" "${lab}host0" "$(printf '%q ' "${command[@]}")"
}

if [[ ${1:-} == --lab ]]; then
  [[ ${2:-} =~ ^[a-z][a-z0-9]{0,8}$ ]] || usage
  lab=$2; shift 2
fi
case ${1:-} in
  up) [[ $# -ge 3 ]] || usage; number "$2"; up "${@:2}" ;;
  run) [[ $# -ge 3 ]] || usage; run "${@:2}" ;;
  cut | mend) [[ $# == 2 ]] || usage; order "$@" ;;
  down) down ;;
  *) usage ;;
esac
