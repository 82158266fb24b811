#!/usr/bin/env bash
# One binary, several torches: runs the operators' tests with the extension that is already built, unchanged, under
# the torch of another python (which needs pytest and hypothesis, and torch >= 2.11).
#   scripts/abi_check.sh PYTHON [EXTENSION]     (default: hvd_compress/_C*.so)
set -euo pipefail
cd "$(dirname "$0")/.."
if (($# < 1)); then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
python=$(realpath -s "$(command -v "$1")")  # not what it links to: a virtual environment is found by its own path
binary=${2:-$(find hvd_compress -maxdepth 1 -name '_C.*so' | head -n 1)}
if [[ ! -f $binary ]]; then
  echo "no extension: build it first (pip install --no-build-isolation -e .)" >&2
  exit 1
fi

# A copy of the package's operators and nothing else: neither a rebuild nor another installation can slip in.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/hvd_compress" "$copy/tests"
cp -r hvd_compress/{ops,reference,_version.py} "$copy/hvd_compress/"
cp "$binary" "$copy/hvd_compress/_C.abi3.so"
touch "$copy/hvd_compress/__init__.py"
cp tests/operators/*.py "$copy/tests/"
cd "$copy"

echo "sha256 $(sha256sum hvd_compress/_C.abi3.so | cut -c1-16)"
# libtorch_python would bind the binary to one Python, C++ symbols of c10 or at to one torch.
if nm -D --undefined-only hvd_compress/_C.abi3.so | c++filt | grep -E ' U (c10|at|torch)::| U Py|THP'; then
  echo "the binary uses symbols outside the stable ABI (above)" >&2
  exit 1
fi
export PYTHONPATH=$copy
"$python" - <<'PY'
import torch
from hvd_compress import ops

assert ops.COMPILED, "the extension did not load"
print("torch", torch.__version__)
PY
"$python" -m pytest -q -p no:cacheprovider --rootdir "$copy" tests
