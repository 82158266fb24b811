#!/usr/bin/env bash
# All tests, with the set-up they need: linters, types, unit tests, then real Horovod under mpirun and horovodrun.
#   usage: test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/clang-format --dry-run --Werror $(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu')
exec .venv/bin/python -m pytest "$@"
