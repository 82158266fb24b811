#!/usr/bin/env bash
# Runs the operators' tests with the extension that is already built under the torch of another Python (which needs
# pytest, hypothesis and torch >= 2.11).
#   scripts/abi_check.sh PYTHON [EXTENSION]     (default: hvd_compress/_C*.so)
set -euo pipefail
cd "$(dirname "$0")/.."
if (($# < 1)); then
  sed -n "2,4s/^# //p" scripts/abi_check.sh >&2
  exit 2
fi
python=$(realpath -s "$(command -v "$1")")  # without resolving links, so that a virtual environment is found
binary=${2:-$(find hvd_compress -maxdepth 1 -name '_C.*so' | head -n 1)}
if [[ ! -f $binary ]]; then
  echo "no extension: build it first (pip install --no-build-isolation -e .)" >&2
  exit 1
fi

# A copy of the package's operators only: no rebuild and no other installation is imported.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy/hvd_compress" "$copy/tests"
cp -r hvd_compress/{ops,reference,_version.py} "$copy/hvd_compress/"
cp "$binary" "$copy/hvd_compress/_C.abi3.so"
touch "$copy/hvd_compress/__init__.py"
cp tests/operators/*.py "$copy/tests/"
cd "$copy"

echo "sha256 $(sha256sum hvd_compress/_C.abi3.so | cut -c1-16)"
# Python's or torch's C++ symbols would bind the binary to one version.
if nm -D --undefined-only hvd_compress/_C.abi3.so | c++filt | grep -E ' U (c10|at|torch)::| U Py|THP'; then
  echo "the binary uses symbols outside the stable ABI (above)" >&2
  exit 1
fi
export PYTHONPATH=$copy
"$python" -c 'import torch; from hvd_compress import ops; assert ops.COMPILED; print("torch", torch.__version__)'
"$python" -m pytest -q -p no:cacheprovider --rootdir "$copy" tests
