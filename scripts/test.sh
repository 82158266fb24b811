#!/usr/bin/env bash
# Sets up, then runs linters, the type checker and the tests: unit tests, and ranks under mpirun, horovodrun and torchrun.
#   usage: test.sh [--all] [pytest arguments]
#   --all: every method and option on 2 to 4 ranks, and the long runs. Hours on 2 cores; without it, a quarter of an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
find csrc -type f -print0 | xargs -0 .venv/bin/clang-format --dry-run --Werror
exec .venv/bin/python -m pytest "$@"
