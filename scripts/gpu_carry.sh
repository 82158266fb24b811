#!/usr/bin/env bash
# Builds beforehand, without a GPU, what gpu_check.sh would build on the machine that has one: the operators, and Horovod with
# NCCL and without GPU operations. Writes .carry/, a few MB, which git ignores and gpu_check.sh looks into.
#   usage: PYTHON=python3.12 gpu_carry.sh TORCH     TORCH: of that machine, as torch==2.11.0; PYTHON: of its version
# Needs nvcc of that torch's CUDA, and the packages of Horovod's build from the index of pip. ARCH=90: of the card.
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${1:-} root=$PWD arch=${ARCH:-90}
[[ $torch == torch* ]] || { sed -n '4s/^# \?//p' "$0" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
export PATH=$work/venv/bin:$PATH
python -m pip install -q "$torch" setuptools==80.9.0 wheel packaging cffi cloudpickle psutil pyyaml ninja cmake numpy
# The nvcc on PATH may be a wrapper outside its toolkit.
CUDA_HOME=$(nvcc --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=\(.*\)\/bin$/\1/p')
export CUDA_HOME
rm -rf .carry/*.so .carry/horovod-*
mkdir -p .carry

cp -r csrc setup.py "$work"
(cd "$work" && HVD_COMPRESS_CUDA=1 TORCH_CUDA_ARCH_LIST=${arch:0:1}.${arch:1} MAX_JOBS=$(nproc) \
  python setup.py build_ext --build-temp temp --build-lib lib)
strip --strip-unneeded "$work"/lib/hvd_compress/*.so
cp "$work"/lib/hvd_compress/*.so .carry
find csrc -type f | sort | xargs cat | cksum >.carry/csrc  # gpu_check.sh takes the operators for this source only

# torch's NCCL, in the layout that Horovod's CMake expects.
nccl=$(python -c 'from importlib.util import find_spec
print(next(iter(find_spec("nvidia.nccl").submodule_search_locations)))')
mkdir -p "$work/nccl/lib"
ln -s "$nccl/include" "$work/nccl/include"
ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
python -m pip download -q --no-deps --no-binary :all: --no-build-isolation -c scripts/constraints.txt -d "$work" horovod
horovod() { # NAME VARIABLE=VALUE...
  local name=$1
  shift
  env CMAKE_TOOLCHAIN_FILE="$root/scripts/horovod-build.cmake" CMAKE_POLICY_VERSION_MINIMUM=3.5 CMAKE_GENERATOR=Ninja \
    HOROVOD_CMAKE="$root/scripts/horovod-cmake.sh" HOROVOD_CUDA_HOME="$CUDA_HOME" HOROVOD_WITH_PYTORCH=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 "$@" \
    python -m pip wheel -q --no-deps --no-build-isolation --no-cache-dir -w ".carry/horovod-$name" "$work"/horovod-*.tar.gz
}
horovod nccl HOROVOD_GPU_OPERATIONS=NCCL "HOROVOD_NCCL_HOME=$work/nccl" HOROVOD_NCCL_LINK=SHARED \
  "HOROVOD_BUILD_CUDA_CC_LIST=$arch"
horovod gloo
du -sh .carry
