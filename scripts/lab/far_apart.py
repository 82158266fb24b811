#!/usr/bin/env python3
"""Seconds of an exchange between hosts whose links have a delay, by method, on hosts of netlab.sh (root).

    .venv/bin/python scripts/lab/far_apart.py --hosts 4 --delay 0 5 25 --millions 1.05 --json FILE.jsonl/NAME

A model of four square matrices, with --biases also their biases, is trained by every rank without computing. Columns:
the sum by torch.distributed alone, in float32 and in float16; local steps of period 1: DiLoCo (float32), low_bit (2
bits), and low_bit with period 3 in 3 fragments, each a call late, after --pause seconds of computing a call (the three
calls, without the pauses). With --steps: a training step under DDP, without compression and by methods at their
defaults. A figure is the median over --times exchanges, without pauses, from the begin of the last rank to the end of
the last one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import table
from experiment import metrics
from experiment.netlab import up
from experiment.result_file import run_path, write_run

import hvd_compress
from hvd_compress import recipes
from hvd_compress.cli.processes import exit_on_signals

#: Exchanges before those that count.
FIRST = 3
METHODS = {
    "TopK": hvd_compress.TopK,
    "DeMo": hvd_compress.DeMo,
    "IWP": hvd_compress.IWP,
    "FFT": hvd_compress.FFT,
    "MIPD": hvd_compress.MIPD,
    "Quantized": hvd_compress.Quantized,
    "PowerSGD": hvd_compress.PowerSGD,
}


class Matrices(nn.Module):
    """Its gradients need no computing."""

    def __init__(self, entries, biases):
        super().__init__()
        width = round((entries / 4) ** 0.5)
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=biases) for _ in range(4)])

    def forward(self):
        return torch.stack([(p * 1e-3).sum() for p in self.parameters()]).sum()


def seconds(call, given, after=lambda: None):
    """The median from the begin of the last rank to the end of the last one. All hosts have this machine's clock."""
    found = []
    for _ in range(FIRST + given.times):
        distributed.barrier()
        begin = time.monotonic()
        call()
        found.append((begin, time.monotonic()))
        after()
    last = torch.tensor(found[FIRST:], dtype=torch.float64)
    distributed.all_reduce(last, op=distributed.ReduceOp.MAX)  # a barrier ends at another time on each rank
    return statistics.median((last[:, 1] - last[:, 0]).tolist())


def sums(model, dtype, given):
    payload = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=dtype)
    return seconds(lambda: distributed.all_reduce(payload), given)


def local_steps(build, given, calls=1):
    """Of ``calls`` calls of step(), after a pause each if there are several."""
    model = Matrices(given.entries, given.biases)
    for p in model.parameters():
        distributed.broadcast(p.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    local, generator = build(model, optimizer), torch.Generator().manual_seed(distributed.get_rank())

    def compute():
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    spent = []

    def one():
        for _ in range(calls):
            compute()
            if calls > 1:
                time.sleep(given.pause)
            begin = time.perf_counter()
            local.step()
            spent.append(time.perf_counter() - begin)

    if calls > 1:
        for _ in range(FIRST + given.times):
            one()
        whole = [sum(spent[i : i + calls]) for i in range(FIRST * calls, len(spent), calls)]
        slowest = torch.tensor(whole)
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        return statistics.median(slowest.tolist())
    compute()
    return seconds(local.step, given, compute)


def ddp_step(build, given):
    ddp = DistributedDataParallel(Matrices(given.entries, given.biases))
    if build is not None:
        compression = build(ddp.module)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step():
        ddp().backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step, given)


def exchanges(given):
    """By name, functions that measure."""
    model = Matrices(given.entries, given.biases)
    late = dict(fragments=3, delay=1, bucket_mb=given.entries / 2**20)  # a bucket for each matrix
    return {
        "float32": lambda: sums(model, torch.float32, given),
        "float16": lambda: sums(model, torch.float16, given),
        "DiLoCo": lambda: local_steps(lambda m, o: recipes.diloco(m, o, 1), given),
        "low_bit": lambda: local_steps(lambda m, o: recipes.low_bit(m, o, 1), given),
        "low_bit, late": lambda: local_steps(lambda m, o: recipes.low_bit(m, o, 3, **late), given, calls=3),
    }


def steps(given):
    return {name: partial(ddp_step, build, given) for name, build in {"DDP": None, **METHODS}.items()}


def rank(text):
    """One rank: rank 0 prints what it has measured, a line each."""
    given = argparse.Namespace(**json.loads(text))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    columns = (steps if given.steps else exchanges)(given)
    for name, measure in columns.items():
        if given.only and name not in given.only:
            continue
        value = measure()
        if distributed.get_rank() == 0:
            print(json.dumps([name, value]), flush=True)
    sys.stdout.flush()
    distributed.barrier()
    os._exit(0)  # nobody waits for the ends of connections


def measured(command, given):
    """What the ranks print: seconds by name."""
    order = json.dumps(vars(given))
    done = subprocess.run(
        [*command, __file__, "--rank", order], stdout=subprocess.PIPE, text=True, timeout=given.timeout, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode:
        sys.exit(f"far_apart.py: the ranks ended with {done.returncode} after {lines}")
    return dict(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4])
    parser.add_argument("--delay", type=float, nargs="+", default=[0, 5, 25, 50, 100], help="one way, in ms")
    parser.add_argument("--rate", nargs="+", default=["1gbit"])
    parser.add_argument("--millions", type=float, nargs="+", default=[1.05], help="of weights")
    parser.add_argument("--biases", action="store_true")
    parser.add_argument("--steps", action="store_true", help="measure steps under DDP")
    parser.add_argument("--only", nargs="*", metavar="COLUMN")
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", type=run_path, metavar="FILE.jsonl/NAME")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        return rank(given.rank)
    rows, found = [], []
    for hosts in given.hosts:
        for rate in given.rate:
            for delay in given.delay:
                with up(hosts, rate, "ddp", delay=f"{delay:g}ms" if delay else None) as command:
                    for millions in given.millions:
                        settings = {name: value for name, value in vars(given).items() if name not in ("json", "rank")}
                        asked = argparse.Namespace(**{**settings, "entries": millions * 1e6})
                        values = measured(command, asked)
                        where = {"hosts": hosts, "rate": rate, "round trip, ms": 2 * delay, "weights, M": millions}
                        found.append({**where, "seconds": values})
                        rows.append({**where, **{name: f"{value:.3f}" for name, value in values.items()}})
                        print(rows[-1], file=sys.stderr, flush=True)
    print(table.markdown(rows, left=2))
    write_run(given.json, {"config": metrics.environment(), "biases": given.biases, "measured": found})


if __name__ == "__main__":
    with exit_on_signals():
        main()
