#!/usr/bin/env bash
# Sets up, then trains a small convolutional network on scikit-learn's handwritten digits with 4 ranks under mpirun: dense,
# with Horovod's fp16, and with three methods at density 1/64. Prints accuracy and cost of each.
#   usage: train.sh [NP]      results, one JSON file a run, in results/train/
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
np=${1:-4} out=results/train
mkdir -p "$out"
for method in none fp16 iwp fft mipd; do
  options=(--compression "$method")
  [[ $method == none || $method == fp16 ]] || options+=(--density 1/64)
  bash scripts/run.sh "$np" scripts/train.py --data digits --model cnn --epochs 12 --batch-size 16 --lr 0.1 \
    --json "$out/$method.json" "${options[@]}"
done
.venv/bin/python scripts/table.py "$out"/{none,fp16,iwp,fft,mipd}.json
