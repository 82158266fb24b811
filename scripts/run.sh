#!/usr/bin/env bash
# Runs NP ranks of a Python script in .venv on this machine: with Horovod under mpirun (default) or horovodrun and Gloo, or,
# without Horovod, under torchrun.
#   usage: run.sh [--gloo | --ddp] NP SCRIPT ARGS...
# Ranks may outnumber the cores: each has one thread, and waiting ranks yield their core (mpi_yield_when_idle; without it a
# wait takes ten times as long on shared cores). A stalled Horovod collective is reported and ends the job. Gloo's own
# limit, 30 s, is that of the stall, too, since ranks on shared cores may be slow.
set -euo pipefail
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
launcher=--mpi
[[ ${1:-} == --gloo || ${1:-} == --ddp ]] && { launcher=$1; shift; }
[[ ${1:-} =~ ^[0-9]+$ && $# -ge 2 ]] || { sed -n '4s/^# \?//p' "$0" >&2; exit 2; }
np=$1; shift
[[ -x $bin/python ]] || { echo "run.sh: no .venv yet; run scripts/setup.sh first" >&2; exit 1; }

export PATH=$bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export HOROVOD_STALL_CHECK_TIME_SECONDS=${HOROVOD_STALL_CHECK_TIME_SECONDS:-30}
export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=${HOROVOD_STALL_SHUTDOWN_TIME_SECONDS:-120}
export HOROVOD_GLOO_TIMEOUT_SECONDS=${HOROVOD_GLOO_TIMEOUT_SECONDS:-$HOROVOD_STALL_SHUTDOWN_TIME_SECONDS}
case $launcher in
  --ddp)
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
    exec python -m torch.distributed.run --nnodes 1 --nproc-per-node "$np" --master-addr 127.0.0.1 \
      --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 "$@" ;;
  --gloo) exec horovodrun -np "$np" --gloo --network-interfaces lo python "$@" ;;
esac
root=()
((EUID == 0)) && root=(--allow-run-as-root)
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
exec mpirun "${root[@]}" --oversubscribe --bind-to none -np "$np" python "$@"
