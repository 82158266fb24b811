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
exec .venv/bin/python -m pytest "$@"
