#!/usr/bin/env bash
# Sets up, then trains a small convolutional network on scikit-learn's handwritten digits with NP ranks under mpirun: dense,
# with Horovod's fp16, and with five compressed methods. Prints accuracy, loss and cost of each, and the time of every stage.
#   usage: train.sh [NP]      4 ranks by default; results, one line a method, in results/train/runs.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."
np=${1:-4}
setup=$(bash scripts/setup.sh --train)
begin=$SECONDS
printf '\033[1m%s\033[0m\n' "train: $np ranks, seven methods (about 80 s)" >&2
bash scripts/run.sh "$np" scripts/experiments/train_methods.py results/train
echo "It took: ${setup:+$setup, }training $((SECONDS - begin)) s, in all $SECONDS s."
