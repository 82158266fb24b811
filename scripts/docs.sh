#!/usr/bin/env bash
# Builds the documentation site from docs/ into build/docs (index.html), without a network. A warning is an error.
#   usage: docs.sh [OUT]            PYTHON=... docs.sh: another interpreter than .venv's
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python} out=${1:-build/docs}
"$python" -c 'import sphinx' 2>/dev/null || { echo "docs.sh: $python has no Sphinx; run scripts/setup.sh first" >&2; exit 1; }
exec "$python" -m sphinx -W --keep-going -q -E -b html -d "$out.doctrees" docs "$out"
