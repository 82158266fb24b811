#!/usr/bin/env bash
# Runs NP ranks of a Python script in .venv on this machine, under mpirun, or under horovodrun with Gloo.
#   usage: run.sh [--gloo] NP SCRIPT ARGS...
# The options that matter: ranks that wait give up their core (mpi_yield_when_idle; without it a wait costs ten times as much
# when ranks share cores), more ranks than cores are allowed, one thread a rank, and a stalled collective ends the job and is named.
set -euo pipefail
bin=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
gloo=false
[[ ${1:-} == --gloo ]] && { gloo=true; shift; }
[[ ${1:-} =~ ^[0-9]+$ && $# -ge 2 ]] || { sed -n '2,3s/^# \?//p' "$0" >&2; exit 2; }
np=$1; shift
[[ -x $bin/python ]] || { echo "run.sh: no .venv yet; run scripts/setup.sh first" >&2; exit 1; }

export PATH=$bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
export HOROVOD_STALL_CHECK_TIME_SECONDS=${HOROVOD_STALL_CHECK_TIME_SECONDS:-30}
export HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=${HOROVOD_STALL_SHUTDOWN_TIME_SECONDS:-120}
if $gloo; then
  exec horovodrun -np "$np" --gloo --network-interfaces lo python "$@"
fi
root=()
((EUID == 0)) && root=(--allow-run-as-root)
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
exec mpirun "${root[@]}" --oversubscribe --bind-to none -np "$np" python "$@"
