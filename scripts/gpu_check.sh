#!/usr/bin/env bash
# Everything that needs a GPU, in one go, without internet: builds the CUDA operators, compares them with the reference,
# runs compute-sanitizer and the benchmark, then trains two Horovod ranks on the one card. Prints a Markdown page
# (to be committed as docs/gpu.md) on standard output, and what the steps print on standard error.
#   scripts/gpu_check.sh > docs/gpu.md
# Needs python3 with a CUDA torch >= 2.11, setuptools and ninja, and nvcc of the same CUDA. From .carry/, if it is there:
# wheels (*.whl: pytest, hypothesis and what they need; cmake, cffi, cloudpickle, psutil, pyyaml) and Horovod's sdist.
#   PYTHON=python3   another interpreter        GPU_CHECK_LIMIT=540   seconds for one step
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
root=$PWD
limit=${GPU_CHECK_LIMIT:-540}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=()
failed=0

say() { echo "== $*" >&2; }

# row STEP RESULT REMARK
row() {
  rows+=("| $1 | $2 | ${3//|/\/} |")
  say "$1: $2 ($3)"
}

# step NAME LOG COMMAND...: runs it within the limit, and notes how it went and its last line.
step() {
  local name=$1 log=$work/$2 start=$SECONDS code=0
  shift 2
  say "$name"
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 || code=$?
  cat "$log" >&2
  local last
  last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c1-160)
  if ((code == 0)); then
    row "$name" "passed" "$((SECONDS - start)) s; $last"
  else
    row "$name" "**failed** ($code)" "$last"
    failed=1
  fi
  return "$code"
}

page() {
  echo "# On a GPU"
  echo
  echo "Written by \`scripts/gpu_check.sh\`, $(date -u +%Y-%m-%d). $1"
  echo
  echo "| step | result | remark |"
  echo "|---|---|---|"
  printf '%s\n' "${rows[@]}"
  if [[ -s $work/bench.log ]]; then
    echo
    cat "$work/bench.log"
  fi
}

# --- the machine -----------------------------------------------------------------------------------------------------
card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [[ -z $card ]]; then
  echo "no GPU: nvidia-smi shows none" >&2
  exit 1
fi
base=$(command -v "${PYTHON:-python3}")
# An environment of its own over the machine's packages: nothing is installed into those.
"$base" -m venv --system-site-packages "$work/venv" >&2 || exit 1
python=$work/venv/bin/python
if ! "$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"'; then
  exit 1
fi
shopt -s nullglob
wheels=("$root"/.carry/*.whl)
sdists=("$root"/.carry/horovod-*.tar.gz)
shopt -u nullglob
if ((${#wheels[@]})); then
  # One by one: a wheel for another Python must not keep the others out.
  for wheel in "${wheels[@]}"; do
    "$python" -m pip install -q --no-index --no-deps "$wheel" >&2 || say "not installed: $wheel"
  done
fi

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
nvcc=${nvcc:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
# The nvcc on PATH may be a wrapper that lies outside its toolkit, so nvcc itself is asked where it is.
here=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p')
if [[ ! -x $here/nvcc ]]; then
  echo "no nvcc: set CUDA_HOME" >&2
  exit 1
fi
export CUDA_HOME=${here%/bin} PATH=$here:$PATH
versions=$("$python" - <<'PY'
import platform

import torch

nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
print(f"Python {platform.python_version()}, torch {torch.__version__}, NCCL {nccl}")
PY
)
toolkit=$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
about="Card and driver: $card. $versions, nvcc $toolkit."

# --- the operators ---------------------------------------------------------------------------------------------------
# Built in a copy: neither an installed package nor an older build can slip in, and the tree stays clean.
copy=$work/tree
mkdir "$copy"
cp -r csrc hvd_compress scripts tests setup.py "$copy"
rm -f "$copy"/hvd_compress/*.so "$copy"/tests/conftest.py
cd "$copy" || exit 1
export PYTHONPATH=$copy
if ! step "build" build.txt env HVD_COMPRESS_CUDA=1 MAX_JOBS="$(nproc)" "$python" setup.py build_ext --inplace; then
  page "$about"
  exit 1
fi
step "loads" loads.txt "$python" -c \
  'from hvd_compress import ops; assert ops.COMPILED and ops.COMPILED_CUDA; print("both extensions")'

pytest=("$python" -m pytest -q -p no:cacheprovider --rootdir "$copy")
tests=(tests/operators)
step "operators on cuda = reference" ops.txt "${pytest[@]}" "${tests[@]}" -k "cuda"
step "operators on cpu = reference" cpu.txt "${pytest[@]}" "${tests[@]}" -k "not cuda"

if command -v compute-sanitizer >/dev/null; then
  small="cuda and (every_number or unaligned or nothing_is_lost or more_tensors or goes_back)"
  for tool in memcheck racecheck; do
    # torch's caching allocator would hide an access beyond a tensor inside its own pool.
    step "compute-sanitizer $tool" "$tool.txt" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      compute-sanitizer --tool "$tool" --error-exitcode 9 "${pytest[@]}" "${tests[@]}" -k "$small"
  done
else
  row "compute-sanitizer" "not run" "it is not in $CUDA_HOME/bin"
fi

for bench in bench_ops bench_codes; do
  if step "$bench" "$bench.txt" "$python" "scripts/$bench.py" --device cuda; then
    cat "$work/$bench.txt" >>"$work/bench.log"
  fi
done

# --- Horovod ---------------------------------------------------------------------------------------------------------
if ((${#sdists[@]} == 0)); then
  row "Horovod" "not run" "no .carry/horovod-*.tar.gz"
  page "$about"
  exit "$failed"
fi

# torch's own NCCL, laid out as Horovod's CMake looks for it (a wheel has libnccl.so.2 only).
nccl=$("$python" -c 'import importlib.util as u; print(next(iter(u.find_spec("nvidia.nccl").submodule_search_locations)))')
mkdir -p "$work/nccl/lib"
if [[ -f $nccl/lib/libnccl.so.2 ]]; then
  ln -s "$nccl/include" "$work/nccl/include"
  ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
  ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so.2"
fi
export LD_LIBRARY_PATH=$work/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')

# build_horovod VARIABLE=VALUE...: into the environment.
# shellcheck disable=SC2329  # called by the shells below
build_horovod() {
  env CMAKE_TOOLCHAIN_FILE="$root/scripts/horovod-build.cmake" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    MAKEFLAGS="-j$(nproc)" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 "$@" \
    "$python" -m pip install --no-index --no-deps --no-build-isolation --no-cache-dir --force-reinstall "$sdist"
}
sdist=${sdists[0]}
export -f build_horovod  # for the shells that timeout starts
export root python sdist work

# Two ranks on one card: NCCL takes them for two hosts if each has a host id of its own, and then has to use sockets.
cat >"$work/rank.sh" <<'RANK'
#!/usr/bin/env bash
if [[ $1 == hosts ]]; then
  export NCCL_HOSTID=rank$HOROVOD_RANK NCCL_NET=Socket NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
elif [[ $1 == shared ]]; then
  export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=2 NCCL_NVLS_ENABLE=0
fi
shift
exec "$@"
RANK
chmod +x "$work/rank.sh"

# shellcheck disable=SC2329
train() {
  env HOROVOD_STALL_CHECK_TIME_SECONDS=20 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=60 NCCL_DEBUG=WARN \
    "$work/venv/bin/horovodrun" --gloo -np 2 "$work/rank.sh" "$1" "$python" tests/parallel/check_training.py iwp fft mipd iwp-lanes4:plain iwp-lloyd4:plain iwp-range8:plain \
    fft-gather:plain mipd-compensated:plain
}
export -f train

with_nccl=0
with=(HOROVOD_GPU_OPERATIONS=NCCL "HOROVOD_NCCL_HOME=$work/nccl" HOROVOD_NCCL_LINK=SHARED
  "HOROVOD_CUDA_HOME=$CUDA_HOME" "HOROVOD_BUILD_CUDA_CC_LIST=$capability")
if step "build Horovod with NCCL" horovod.txt bash -c "build_horovod \"\$@\"" _ "${with[@]}"; then
  for way in hosts shared; do
    if step "2 ranks on one card, NCCL ($way)" "train_$way.txt" bash -c "train $way"; then
      with_nccl=1
      break
    fi
  done
fi
if ((with_nccl == 0)); then
  if step "build Horovod with Gloo only" gloo.txt bash -c build_horovod; then
    step "2 ranks on one card, Gloo" train_gloo.txt bash -c "train gloo"
  fi
fi

page "$about"
exit "$failed"
