#!/usr/bin/env bash
# All tests, with the set-up they need: linters, types, unit tests, then Horovod under mpirun and horovodrun, and torch DDP.
#   usage: test.sh [--all] [pytest arguments]     --all: also those marked slow
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
find csrc tests/emulation -regex '.*\.\(h\|cpp\|cu\)' -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror
[[ -z $* || $* == --all ]] || exec .venv/bin/python -m pytest "$@"

# All tests: those of one process at a time, on one core, beside those that start several. The former print at the end.
alone=(tests/{carriers,checkpoints,codecs,emulation,engine,hosts,local,methods,operators,selection})
log=$(mktemp)
.venv/bin/python -m pytest "$@" "${alone[@]}" > "$log" 2>&1 &
trap 'kill $! 2>/dev/null || true; rm -f "$log"' EXIT
status=0
.venv/bin/python -m pytest "$@" tests "${alone[@]/#/--ignore=}" || status=$?
wait $! || status=$?
cat "$log"
exit $status
