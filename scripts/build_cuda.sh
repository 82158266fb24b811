#!/usr/bin/env bash
# Compiles every CUDA operator as setup.py does, and for sm_75, and shows registers and spills. Needs nvcc 13, but no GPU.
#   scripts/build_cuda.sh [PYTHON]     whose torch has the headers, also a CPU build's (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
nvcc=${nvcc:-$(command -v nvcc || true)}
[[ -x $nvcc ]] || { echo "no nvcc: set CUDA_HOME, or install the CUDA 13.0 toolkit" >&2; exit 1; }
# The nvcc on PATH may be a wrapper outside its toolkit.
here=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p')
if [[ ! -x $here/nvcc || ! -f ${here%/bin}/include/cuda_runtime.h ]]; then
  echo "$nvcc does not say where its toolkit is (got '$here')" >&2
  exit 1
fi
include=$("$python" -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))')
# What torch's extension builder adds to setup.py's flags.
read -ra flags < <("$python" -c 'from torch.utils.cpp_extension import COMMON_NVCC_FLAGS; print(*COMMON_NVCC_FLAGS)')
"$here/nvcc" --version | tail -n 2
"$python" -c 'import torch; print("headers of torch", torch.__version__)'

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for source in csrc/cuda/*.cu; do
  echo "== $source"
  "$here/nvcc" -c "$source" -o "$out/$(basename "$source" .cu).o" -isystem "$include" "${flags[@]}" \
    -std=c++20 -O3 -fmad=false -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020b000000000000 -Xcompiler -fPIC \
    -gencode=arch=compute_75,code=sm_75 -gencode=arch=compute_80,code=sm_80 "-gencode=arch=compute_90,code=[sm_90,compute_90]" \
    --threads 2 -Xptxas -v 2>&1 | tee "$out/log" |
    { grep -E "Compiling entry|registers|spill|error|warning" || true; } |
    sed -E "s/ptxas info *: //; s/.*Compiling entry function '([^']*)'/\1/" | { c++filt -p 2>/dev/null || cat; }
done
echo "compiled: $(find "$out" -name '*.o' | wc -l) objects"
