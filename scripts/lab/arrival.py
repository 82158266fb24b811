#!/usr/bin/env python3
"""Measure what a gradient costs the processor when it arrives: many small tensors, one rank, no network.

    python scripts/lab/arrival.py
    PYTHONPATH=OTHER_CHECKOUT python scripts/lab/arrival.py

Processor time of the thread, the fastest of --steps steps: of all calls of `compress` (Horovod) or of the hook (DDP),
per tensor, and of the whole step, until the averages are there. The hook gets buckets of 25 MB, as DDP makes them, and
its last call, which completes the exchange, counts for the step only. Other ranks are simulated
(hvd_compress.carriers.mirror), in no time.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from fake_ddp import FakeBucket, in_backward
from torch import Tensor, nn

import hvd_compress
from hvd_compress import IWP, DeMo, ddp_hook
from hvd_compress.carriers.mirror import Mirror

RANKS, SHAPE, WARMUP, BUCKET_BYTES = 4, (4, 256), 4, 25 << 20
Step = Callable[[Any, list[nn.Parameter]], tuple[float, float]]


class DDPMirror(Mirror):
    ordered, host = True, "ddp"


def make_buckets(groups: list[list[nn.Parameter]]) -> list[FakeBucket]:
    """Of a step: a bucket with the gradients of each group."""
    flat = [torch.cat([p.grad.flatten() for p in group]) for group in groups]
    return [FakeBucket(i, group, flat[i], i == len(groups) - 1) for i, group in enumerate(groups)]


def horovod(compressor: Any, parameters: list[nn.Parameter]) -> tuple[float, float]:
    """Seconds in compress, which post-accumulate hooks call as Horovod's do, and of the step."""
    sent, arrived = [], 0.0

    def arrive(parameter: Tensor) -> None:
        nonlocal arrived
        begin = time.thread_time()
        sent.append(compressor.compress(parameter.grad))
        arrived += time.thread_time() - begin

    hooks = [p.register_post_accumulate_grad_hook(arrive) for p in parameters]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    torch.autograd.backward(parameters, gradients)
    for hook in hooks:
        hook.remove()
    begin = time.thread_time()
    for payload, context in sent:
        compressor.decompress(payload, context)
    return arrived, arrived + time.thread_time() - begin


def ddp(compressor: Any, parameters: list[nn.Parameter]) -> tuple[float, float]:
    """Seconds in the hooks but the last, and in all of them."""
    size = BUCKET_BYTES // (4 * parameters[0].numel())
    groups = [parameters[::-1][begin : begin + size] for begin in range(0, len(parameters), size)]
    groups[-1:] = [groups[-1][:-1], groups[-1][-1:]]  # so that the last call has one gradient only
    buckets, times = make_buckets(groups), []

    def hooks() -> None:
        for bucket in buckets:
            begin = time.thread_time()
            ddp_hook(compressor, bucket)
            times.append(time.thread_time() - begin)

    in_backward(hooks)
    return sum(times[:-1]), sum(times)


def measure(build: Any, step: Step, tensors: int, steps: int) -> tuple[float, float]:
    """The fastest of the steps, in seconds."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(SHAPE) * 0.02) for _ in range(tensors)]
    optimizer = torch.optim.SGD(parameters, lr=1e-6)
    named = [(str(number), p) for number, p in enumerate(parameters)]
    compressor = build(named, collectives=(DDPMirror if step is ddp else Mirror)(RANKS))
    found = []
    for _ in range(WARMUP + steps):
        for p in parameters:
            p.grad = torch.randn(SHAPE) * 0.01
        found.append(step(compressor, parameters))
        optimizer.step()
    arrival, whole = zip(*found[WARMUP:], strict=True)
    return min(arrival), min(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=4000, help="of 1,024 entries each")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{hvd_compress.__file__}: {args.tensors} tensors of {SHAPE[0] * SHAPE[1]} entries\n")
    print(f"{'method':8}{'host':10}{'us a tensor':>12}{'ms a step':>12}")
    for build in (IWP, DeMo):
        for step in (horovod, ddp):
            arrival, whole = measure(build, step, args.tensors, args.steps)
            print(f"{build.__name__:8}{step.__name__:10}{1e6 * arrival / args.tensors:12.1f}{1e3 * whole:12.1f}")


if __name__ == "__main__":
    main()
