#!/usr/bin/env bash
# All tests, with the set-up they need: linters, types, unit tests, then real Horovod under mpirun and horovodrun.
#   usage: test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
find csrc -type f -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror
exec .venv/bin/python -m pytest "$@"
