#!/usr/bin/env bash
# The tests of the package, with the set-up they need: linters, types, unit tests, Horovod under mpirun and horovodrun,
# torch DDP and FSDP2.
#   usage: test.sh [--scripts] [--all] [pytest arguments]
#     --scripts: in their place those that guard scripts, figures, the wheel, and kernels in the emulator
#     --all: also those marked slow
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
# A run starts some hundred interpreters: where this is set, each would compile the package and its tests again.
export PYTHONDONTWRITEBYTECODE=
parts=(parallel faults "trainers examples peers" "methods codecs selection carriers guards engine"
  "checkpoints hosts local operators" "")
scripts=(emulation experiments "docs/test_figures.py docs/test_pages.py docs/test_site.py docs/test_stated.py"
  "test_cuda_build.py test_launch.py test_torch_versions.py test_wheel.py torch_ddp" lab)
linters() {
  .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy &&
    find csrc tests/emulation scripts/lab -regex '.*\.\(h\|cpp\|cu\)' -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror
}
chosen=("${parts[@]}") first=linters files=()
if [[ ${1:-} == --scripts ]]; then
  shift
  chosen=("${scripts[@]}") first=true files=($(printf 'tests/%s ' ${scripts[*]}))
fi
[[ -z $* || $* == --all ]] || { $first; exec .venv/bin/python -m pytest "$@" "${files[@]}"; }

# Three jobs at a time, for two cores: ranks often wait for each other or for a timeout. The longest begin first, and
# "tests" is what no other part has; the lab, whose networks and pauses are timed, is alone. Each prints when it has
# ended.
logs=$(mktemp -d) status=0
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT
part() { # PYTEST_ARGUMENTS...
  local code=0 log=$logs/$BASHPID
  .venv/bin/python -m pytest "$@" > "$log" 2>&1 || code=$?
  cat "$log"
  return $code
}
wait_for_less_than() { # JOBS
  while (($(jobs -rp | wc -l) >= $1)); do wait -n || status=$?; done
}
$first &
for rooms in "${chosen[@]}"; do
  wait_for_less_than "$([[ $rooms == lab ]] && echo 1 || echo 3)"
  if [[ $rooms ]]; then files=($(printf 'tests/%s ' $rooms))
  else files=(tests $(printf -- '--ignore=tests/%s ' ${scripts[*]} ${parts[*]})); fi
  part "$@" "${files[@]}" &
done
while wait -n || { code=$?; ((code != 127)) && status=$code; }; do :; done
exit $status
