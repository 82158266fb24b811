#!/usr/bin/env bash
# All checks that need a GPU, without internet: builds the CUDA operators, compares them with the reference, runs
# compute-sanitizer and the benchmarks, and trains two ranks on one card, under DDP, FSDP2 and Horovod. Prints Markdown on
# standard output, of which docs/results/gpu/h200.md is made, and the steps' output on standard error.
#   scripts/gpu_check.sh [STAGE...] >gpu.md     of: build horovod fft operators ddp bench train sanitizer; all by default
# They run in this order, and every call builds first; the result is kept in build/gpu_check. A card that is lent for a
# quarter of an hour: scripts/gpu_carry.sh builds beforehand, where there is none, and then
#   GPU_CHECK_LIMIT=420 bash scripts/gpu_check.sh horovod operators >"$OUT/1.md"     next ddp bench, then sanitizer
# Needs python3 with a CUDA torch >= 2.11, setuptools and pip, and nvcc of the same CUDA. From .carry/, which git ignores,
# if it exists: compiled operators and Horovod's wheels (by gpu_carry.sh), or else Horovod's sdist, and wheels of what
# python3 lacks of pytest, hypothesis, pandas, tabulate, ninja, cmake, cffi, cloudpickle, psutil and pyyaml.
#   PYTHON=python3   another interpreter        GPU_CHECK_LIMIT=3600   seconds for a call
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
root=$PWD
limit=${GPU_CHECK_LIMIT:-3600}
every=(build horovod fft operators ddp bench train sanitizer)
stages=("$@")
((${#stages[@]})) || stages=("${every[@]}")
for name in "${stages[@]}"; do
  if [[ " ${every[*]} " != *" $name "* ]]; then
    echo "gpu_check.sh: there is no stage '$name', but ${every[*]}" >&2
    exit 2
  fi
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
running=
failed=0

say() { echo "== $*" >&2; }

# A step is a process group of its own (by timeout), to which signals must be passed on.
trap '[[ ! $running ]] || { kill "$running"; wait "$running"; }; exit 143' INT TERM

# stage NAME: whether it was asked for; if so, prints the head of its table.
stage() {
  [[ " ${stages[*]} " == *" $1 "* ]] || return 1
  printf '\n## %s\n\n| step | result | remark |\n|---|---|---|\n' "$1"
}

# row STEP RESULT REMARK
row() { echo "| $1 | $2 | ${3//|/\/} |"; say "$1: $2 ($3)"; }

# step NAME LOG COMMAND...: runs it within the limit, and within $most seconds; its row has the status and the last line.
step() {
  local name=$1 log=$work/$2 start=$SECONDS code=0 seconds=$((limit - SECONDS)) most=${most:-540} last
  shift 2
  if ((seconds < 1)); then
    row "$name" "**not run**" "no time was left"
    failed=1
    return 1
  fi
  say "$name"
  # In the background, so that signals are handled at once.
  timeout -k 10 "$((seconds < most ? seconds : most))" "$@" >"$log" 2>&1 &
  running=$!
  wait "$running" || code=$?
  running=
  cat "$log" >&2
  last=$(grep -v '^[[:space:]]*$' "$log" | tail -n 1 | cut -c1-160)
  if ((code == 0)); then
    row "$name" "passed" "$((SECONDS - start)) s; $last"
  else
    tail -qn 3 "${log%.txt}"_*.txt >&2 2>/dev/null  # of what it ran side by side
    row "$name" "**failed** ($code)" "$last"
    failed=1
  fi
  return "$code"
}

card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [[ -z $card ]]; then
  echo "no GPU: nvidia-smi shows none" >&2
  exit 1
fi
base=$(command -v "${PYTHON:-python3}")
# A virtual environment on top of the interpreter's packages, whose folders are listed in a .pth file: the interpreter may
# be a virtual environment itself, which --system-site-packages ignores. Its path is constant: it is part of what is built.
venv=$root/build/gpu_check/venv python=$root/build/gpu_check/venv/bin/python
"$base" -m venv --clear --without-pip "$venv" >&2 &&
  "$base" -c 'import sys
for folder in sys.path:
  if folder.endswith("-packages"): print(f"import site; site.addsitedir({folder!r})")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth" || exit 1
"$python" -c 'import torch; assert torch.cuda.is_available(), "torch sees no GPU"' || exit 1
shopt -s nullglob
wheels=("$root"/.carry/*.whl)
sdists=("$root"/.carry/horovod-*.tar.gz)
shopt -u nullglob
# One by one: a wheel for another Python must not prevent the others.
for wheel in "${wheels[@]}"; do
  "$python" -m pip install -q --no-index --no-deps "$wheel" >&2 || say "not installed: $wheel"
done

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
nvcc=${nvcc:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
# The nvcc on PATH may be a wrapper outside its toolkit.
here=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ _HERE_=//p')
[[ -x $here/nvcc ]] || { echo "no nvcc: set CUDA_HOME" >&2; exit 1; }
scripts=$("$base" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export CUDA_HOME=${here%/bin} PATH=$venv/bin:$here:$scripts:$PATH
versions=$("$python" -c 'import platform, torch
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
print(f"Python {platform.python_version()}, torch {torch.__version__}, NCCL {nccl}")')
toolkit=$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
echo "# On a GPU: ${stages[*]}"
echo
echo "Written by \`scripts/gpu_check.sh\`, $(date -u +%Y-%m-%d). Card and driver: $card. $versions, nvcc $toolkit."

# --- build
# The build folder is named by a checksum of all inputs; an interrupted build continues.
sources=$({ echo "$card $versions $toolkit"; find csrc setup.py scripts/horovod-* -type f | sort | xargs cat; } | cksum)
kept=$root/build/gpu_check/${sources%% *}
if [[ ! -d $kept ]]; then
  rm -rf "${kept%/*}"/[0-9]*
  mkdir "$kept.new"
  cp -r csrc setup.py "$kept.new"
  mv "$kept.new" "$kept"
fi
# Everything runs in a copy of the tree, so that no installed package is imported.
copy=$work/tree
mkdir "$copy"
cp -r hvd_compress scripts tests pyproject.toml "$copy"
rm -f "$copy"/hvd_compress/*.so
cd "$copy" || exit 1
export PYTHONPATH=$copy

# shellcheck disable=SC2329  # called by timeout's shell
build() {
  # What was built for this torch elsewhere.
  if [[ -f $root/.carry/csrc && $(<"$root/.carry/csrc") == "$(cd "$root" && find csrc -type f | sort | xargs cat | cksum)" ]]; then
    cp "$root"/.carry/*.so hvd_compress
    "$python" -c 'from hvd_compress import ops; assert ops.COMPILED and ops.COMPILED_CUDA; print("both load, as carried")' &&
      return
    rm hvd_compress/*.so
  fi
  # A compiler that finds no libstdc++.so would link a copy of its own, whose streams crash beside torch's.
  local runtime
  runtime=$("${CXX:-g++}" -print-file-name=libstdc++.so.6)
  if [[ $("${CXX:-g++}" -print-file-name=libstdc++.so) != /* && $runtime == /* ]]; then
    export LDFLAGS="-Wl,--no-as-needed,$runtime"
  fi
  env HVD_COMPRESS_CUDA=1 MAX_JOBS="$(nproc)" "$python" "$kept/setup.py" build_ext --build-temp temp --build-lib lib &&
    cp "$kept"/lib/hvd_compress/*.so hvd_compress &&
    "$python" -c 'from hvd_compress import ops; assert ops.COMPILED and ops.COMPILED_CUDA; print("both load")'
}
export -f build
export root work kept python
stages+=(build)
stage build
step "build" build.txt bash -c build || exit 1

# Two ranks on one card: with different host ids NCCL uses sockets between them. Both are local rank 0, of the one card.
cat >"$work/rank.sh" <<'RANK'
#!/usr/bin/env bash
export NCCL_HOSTID=rank${RANK:-$HOROVOD_RANK} NCCL_NET=Socket NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
export NCCL_SOCKET_IFNAME=lo LOCAL_RANK=0
exec ${UNDER:-} "$@"
RANK
chmod +x "$work/rank.sh"
# shellcheck disable=SC2329  # called by timeout's shell
under_torchrun() {
  "$python" -m torch.distributed.run --no-python --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 \
    --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 "$work/rank.sh" "$python" "$@"
}
# shellcheck disable=SC2329
under_horovodrun() {
  env HOROVOD_STALL_CHECK_TIME_SECONDS=20 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=40 NCCL_DEBUG=WARN \
    horovodrun --gloo -np 2 "$work/rank.sh" "$python" "$@"
}
# cases LAUNCHER HOST METHOD[:CASE,...]...: the cases of each method, four methods at a time; the output of those that
# failed. A line is there as soon as a method has ended, also if the step comes to its time limit.
# shellcheck disable=SC2329
cases() {
  local launcher=$1 host=$2 option
  shift 2
  [[ $host == horovod ]] || option="--host $host"  # horovodrun would take it for an option of its own
  printf '%s\n' "$@" | xargs -P 4 -I {} bash -c 'begin=$SECONDS item={} log=$work/'"$host"'_${item%%:*}.txt
    '"$launcher"' tests/parallel/check_training.py '"${option:-}"' --steps 6 --case-limit 100 {} >"$log" 2>&1 || { cat "$log"; exit 1; }
    passed=$(grep -c "\[rank 0\] ok" "$log"); echo "{}: $passed cases, $((SECONDS - begin)) s"; ((passed))'
}
export -f under_torchrun under_horovodrun cases

# --- horovod
# install_horovod NAME VARIABLE=VALUE...: the wheel in .carry/horovod-NAME, or one that is built and kept.
# shellcheck disable=SC2329
install_horovod() {
  local wheels=$kept/horovod-$1
  ! compgen -G "$root/.carry/horovod-$1/*.whl" >/dev/null || wheels=$root/.carry/horovod-$1
  shift
  if ! compgen -G "$wheels/*.whl" >/dev/null; then
    env CMAKE_TOOLCHAIN_FILE="$root/scripts/horovod-build.cmake" CMAKE_POLICY_VERSION_MINIMUM=3.5 \
      CMAKE_GENERATOR=Ninja HOROVOD_CMAKE="$root/scripts/horovod-cmake.sh" \
      HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
      HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_GLOO=1 "$@" \
      "$python" -m pip wheel --no-index --no-deps --no-build-isolation --no-cache-dir -w "$wheels" "$sdist" || return
  fi
  "$python" -m pip install --no-index --no-deps --force-reinstall "$wheels"/*.whl &&
    "$python" -c 'import horovod.torch as hvd; print("operations of", "NCCL" if hvd.nccl_built() else "the CPU")'
}
export -f install_horovod
export sdist=${sdists[0]:-}

# What Horovod fuses is enqueued at once; sums of large integers show whether it rounds them.
cat >"$work/sums.py" <<'SUMS'
import horovod.torch as hvd, torch
hvd.init()
ones = [torch.full((1000,), 2**60 + i, device="cuda") for i in range(8)]
alone = hvd.allreduce(ones[1], op=hvd.Sum, name="alone")
handles = [hvd.allreduce_async(x, op=hvd.Sum, name=f"sum.{i}") for i, x in enumerate(ones)]
wrong = sum(not torch.equal(hvd.synchronize(handle), hvd.size() * x) for handle, x in zip(handles, ones))
if hvd.rank() == 0:
    print(f"one alone is right: {torch.equal(alone, hvd.size() * ones[1])}; of 8 at once, wrong: {wrong}")
hvd.shutdown()
SUMS

# on_horovod KIND: the steps with one build of Horovod.
on_horovod() {
  most=60 step "sums of \`int64\` by Horovod itself, $1" "sums_$1.txt" bash -c 'under_horovodrun "$work/sums.py"'
  most=180 step "2 ranks on one card, $1: ${items[*]}" "horovod_$1.txt" bash -c 'cases "$@"' _ under_horovodrun horovod "${items[@]}"
}
# torch's NCCL, and what Horovod is built with.
prepare_horovod() {
  # torch's NCCL, in the layout that Horovod's CMake expects (the wheel has libnccl.so.2 only).
  nccl=$("$python" -c 'from importlib.util import find_spec
print(next(iter(find_spec("nvidia.nccl").submodule_search_locations)))')
  mkdir -p "$work/nccl/lib"
  if [[ -f $nccl/lib/libnccl.so.2 ]]; then
    ln -s "$nccl/include" "$work/nccl/include"
    ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
    ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so.2"
  fi
  export LD_LIBRARY_PATH=$work/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
  with=(HOROVOD_GPU_OPERATIONS=NCCL "HOROVOD_NCCL_HOME=$work/nccl" HOROVOD_NCCL_LINK=SHARED
    "HOROVOD_CUDA_HOME=$CUDA_HOME" "HOROVOD_BUILD_CUDA_CC_LIST=$capability")
}
if stage horovod; then
  prepare_horovod
  items=(none quantized:plain,local_steps iwp:plain,grad_scaler fft:plain,accumulation mipd:plain demo:plain,signs topk:plain
    powersgd:plain terngrad:plain slimdp:plain mp2:plain qsgd:plain dgc:plain)
  if [[ ! $sdist ]] && ! compgen -G "$root/.carry/horovod-*/*.whl" >/dev/null; then
    row "Horovod" "not run" "no .carry/horovod-*"
  else
    step "Horovod with NCCL" horovod.txt bash -c 'install_horovod nccl "$@"' _ "${with[@]}" && on_horovod NCCL
    step "Horovod without GPU operations" gloo.txt bash -c 'install_horovod gloo "HOROVOD_CUDA_HOME=$CUDA_HOME"' &&
      on_horovod Gloo
  fi
fi

# --- fft
# The illegal address that docs/results/gpu/h200.md tells of: the case with each of these settings, side by side and again
# while there is time; a line each, and the first words about the fault. What each setting decides:
#   COREDUMP, memcheck    the kernel: at full speed, by cuda-gdb; slowly, with torch's caching of memory and without
#   LAUNCH_BLOCKING       the operator, by Python's stack
#   iwp                   whether FFT alone has the fault, or any method in some runs
#   matrices              whether cuFFT takes part: products with matrices take its place
#   plans, EAGER          whether cuFFT may not make plans, or load kernels, while Horovod's thread calls CUDA: plans are
#                         made before hvd.init(); all kernels are loaded at once
#   no-cache              whether a plan may not be used again, on another stream or thread: each transform has its own
#   one-stream            whether streams are out of order: exchanges run on the caller's
#   THRESHOLD, MEMCOPIES  whether Horovod's copy kernel takes part, which by its source stays within its tensors
cat >"$work/fault.py" <<'FAULT'
import contextlib, os, runpy, sys, torch
from hvd_compress.engine.streams import StreamOrder
from hvd_compress.methods import spectrum

trying, cuda, basis = os.environ.get("TRY"), torch.device("cuda", 0), {}

def matrix(n):
    if n not in basis:
        table = torch.empty(n, n)
        forward(torch.eye(n), table)
        basis[n] = table.to(cuda)
    return basis[n]

forward = spectrum._forward
if trying == "plans":
    for n in (1152, 1728, 1920):
        flat, out = torch.randn(n, device=cuda), torch.empty(n, device=cuda)
        spectrum.forward(flat, out)
        spectrum.inverse(out, flat)
    torch.cuda.synchronize()
elif trying == "no-cache":
    torch.backends.cuda.cufft_plan_cache[0].max_size = 0
elif trying == "matrices":
    spectrum._forward = lambda rows, out: out.copy_(rows.float() @ matrix(rows.shape[1]))
    spectrum._inverse = lambda rows: rows @ matrix(rows.shape[1]).T
elif trying == "one-stream":
    StreamOrder.exchange_stream = lambda self: contextlib.nullcontext()
sys.path.insert(0, "tests/parallel")  # as of a script that is started
runpy.run_path("tests/parallel/check_training.py", run_name="__main__")
FAULT
# shellcheck disable=SC2329
fault() {
  local memcheck='compute-sanitizer --tool memcheck --report-api-errors no --target-processes all --print-limit 5'
  local settings=("PYTORCH_NO_CUDA_MEMORY_CACHING=1;UNDER=$memcheck" "UNDER=$memcheck" AS=it-is
    CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_LAUNCH_BLOCKING=1 ITEM=iwp:plain TRY=matrices TRY=plans
    CUDA_MODULE_LOADING=EAGER TRY=no-cache TRY=one-stream HOROVOD_FUSION_THRESHOLD=0 HOROVOD_BATCH_D2D_MEMCOPIES=0
    PYTORCH_NO_CUDA_MEMORY_CACHING=1)
  # Of the GPU's core file, the state of its threads only.
  export CUDA_COREDUMP_GENERATION_FLAGS=skip_nonrelocated_elf_images,skip_global_memory,skip_shared_memory,skip_local_memory
  export until=$((EPOCHSECONDS + 170))  # none begins later, or the step would end by its limit, as failed
  printf '%s\n' "${settings[@]}" "${settings[@]:2}" "${settings[@]:2}" | xargs -P 7 -I {} bash -c '
      ((EPOCHSECONDS < until)) || exit 0
      IFS=";" read -ra settings <<<"{}"
      log=$work/fft_$$.txt begin=$SECONDS
      env ITEM=fft:plain CUDA_COREDUMP_FILE="$work/core.$$.%p" "${settings[@]}" \
        bash -c "under_horovodrun \"\$work/fault.py\" --steps 6 --case-limit 200 \$ITEM" >"$log" 2>&1
      status=$?
      for core in "$work/core.$$."*; do
        [[ -e $core ]] && cuda-gdb -batch -ex "target cudacore $core" -ex "info cuda kernels" >>"$log" 2>&1
      done
      says=$(grep -m 1 "CUDA Exception" "$log" || grep -m 1 -E "Invalid|illegal" "$log")
      echo "{}: status $status, $((SECONDS - begin)) s; ${says:0:150}"
      grep -E -A 12 "Invalid|illegal|CUDA Exception" "$log" | head -60 >&2'
}
export -f fault
if stage fft; then
  prepare_horovod
  step "Horovod with NCCL" horovod.txt bash -c 'install_horovod nccl "$@"' _ "${with[@]}" &&
    most=230 step "FFT on Horovod with NCCL" fft.txt bash -c fault
fi

# --- operators
pytest=("$python" -m pytest -p no:cacheprovider --rootdir "$copy")
if stage operators; then
  step "operators on cuda = reference" ops.txt "${pytest[@]}" tests/operators -k "cuda"
  step "operators on cpu = reference" cpu.txt "${pytest[@]}" tests/operators -k "not cuda"
fi

# --- ddp
methods=(iwp fft mipd slimdp mp2 topk dgc quantized qsgd terngrad powersgd demo none)
if stage ddp; then
  most=240 step "DDP, 2 ranks on one card, NCCL: ${methods[*]}" ddp.txt bash -c 'cases "$@"' _ under_torchrun ddp "${methods[@]}"
  most=200 step "FSDP2, the same: iwp quantized demo" fsdp.txt bash -c 'cases "$@"' _ under_torchrun fsdp iwp quantized demo
fi

# --- bench
if stage bench; then
  for bench in bench_ops bench_codes; do
    step "$bench" "$bench.txt" "$python" "scripts/lab/$bench.py" --device cuda
  done
  for bench in bench_ops bench_codes; do
    echo
    cat "$work/$bench.txt"
  done
fi

# --- train
# gpt NAME OPTIONS...: 60 steps of a GPT of 124 M, two ranks of 16 windows; its row.
gpt() {
  local log=$work/train_$1.txt name=$1
  shift
  step "GPT, 124 M, DDP: $name" "${log##*/}" bash -c 'under_torchrun scripts/experiments/train.py "$@"' _ --host ddp \
    --device cuda --model gpt-124m --data text --context 256 --batch-size 16 --epochs 1 --max-steps 60 --lr-warmup-epochs 0.2 --amp bf16 "$@"
  rows+=("$name$(sed -n 's/.*bits_per_byte \([0-9.]*\),.* seconds \([0-9.]*\), wire_bytes_per_step \([0-9.e+]*\),.*/ | \1 | \3 | \2/p' "$log")")
}
if stage train; then
  rows=()
  gpt dense --optimizer muon --lr 1e-3
  gpt "low_bit, 3 steps, 2 bits" --optimizer muon --lr 1e-3 --compression quantized --local-steps 3 --bits 2 \
    --dense-values fp16 --unsent buffer
  gpt "low_bit, 5 steps, 1 bit" --optimizer muon --lr 1e-3 --compression quantized --local-steps 5 --bits 1 \
    --dense-values fp16 --unsent buffer
  gpt DeMo --lr 1e-3 --compression demo
  printf '\n| 60 steps of 32 windows, NCCL over sockets | bits per byte | bytes a step | seconds |\n|---|---:|---:|---:|\n'
  printf '| %s |\n' "${rows[@]}"
fi

# --- sanitizer
# sanitize TOOL WORDS FILES OPTION...: the CUDA tests of FILES whose names contain one of WORDS.
sanitize() {
  local tool=$1 some="cuda and (${2// / or })" words=$2 files found word
  read -ra files <<<"$3"
  shift 3
  found=$("${pytest[@]}" "${files[@]}" --collect-only -k "$some")
  for word in $words "${files[@]}"; do  # a renamed test must not be skipped silently
    [[ $found == *"$word"* ]] || { row "compute-sanitizer $tool" "**not run**" "no CUDA test of $word"; failed=1; return 1; }
  done
  # torch's caching allocator would hide an access outside a tensor but inside its pool.
  step "compute-sanitizer $tool" "$tool.txt" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$@" "${pytest[@]}" "${files[@]}" -k "$some"
}

if stage sanitizer; then
  if command -v compute-sanitizer >/dev/null; then
    # Every operator: on few entries, on unaligned memory, and on more entries than a thread block. torch itself makes CUDA
    # calls that fail, so these are not reported.
    sanitize memcheck "opcheck other_memory unaligned many" "$(grep -l "^test_opcheck" tests/operators/test_*.py | xargs)" \
      --report-api-errors no
    # Only the operators on codes use shared memory.
    sanitize racecheck "opcheck other_memory many" "$(echo tests/operators/test_{lanes,codebook,range}.py)"
  else
    row "compute-sanitizer" "not run" "it is not in $CUDA_HOME/bin"
  fi
fi
exit "$failed"
