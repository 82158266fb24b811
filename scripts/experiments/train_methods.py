#!/usr/bin/env python3
"""Trains a small convolutional network on scikit-learn's digits with several methods, one after the other in one launch
of Horovod: what docs/choosing.md puts first, dense, Horovod's fp16, and others. Prints their table.

    bash scripts/run.sh 4 scripts/experiments/train_methods.py results/train     runs.jsonl, as train.py writes
"""

import contextlib
import io
import os
import sys
from pathlib import Path

import table
import torch
import train
from experiment import hosts
from experiment.files import script_parser
from experiment.result_file import write_run

COMMON = "--data digits --model cnn --epochs 12 --batch-size 16"
#: What differs between the trainings: options of train.py, with a learning rate that suits the method.
RUNS = {
    "low_bit, Muon": "--compression quantized --bits 2 --local-steps 3 --unsent buffer --optimizer muon --lr 3e-3",
    "DeMo": "--compression demo --density 1/64 --lr 3e-3",
    "IWP": "--compression iwp --density 1/64 --lr 0.1",
    "dense": "--compression none --lr 0.1",
    "fp16": "--compression fp16 --lr 0.1",
    "FFT": "--compression fft --density 1/64 --lr 0.1",
    "MIPD": "--compression mipd --density 1/64 --lr 0.1",
}


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="for the results")
    folder = parser.parse_args().folder
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    host, rows, equal = hosts.start("horovod"), [], True
    for name, options in RUNS.items():
        run = train.Run(train.parse([*COMMON.split(), *options.split()]), host)
        with contextlib.redirect_stdout(io.StringIO()):  # a line of each epoch
            result = run.train()
        rows.append(table.row(name, [result]))
        equal &= result["replicas_equal"]
        if host.rank == 0:
            print(f"{name}: test accuracy {result['test_accuracy']:.3f}, {result['seconds']:.0f} s", flush=True)
            write_run(folder / "runs.jsonl" / name, result)
    if host.rank == 0:
        print(table.markdown(rows))
        if not equal:
            print("The weights differ between ranks.", file=sys.stderr)
    return host.close(0 if equal else 1)


if __name__ == "__main__":
    sys.exit(main())
