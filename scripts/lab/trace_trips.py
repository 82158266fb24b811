#!/usr/bin/env python3
"""Count how often a call of a compressor passes from one file of the package to another.

    python scripts/lab/trace_trips.py

A move is a call or a return between two files of hvd_compress; code between them that is not ours (torch, contextlib)
does not count. Rank 0 of two ranks on threads is traced in its step 3. The model is two linear layers of 64 x 64 with
biases; both weights lie in one bucket, whose exchange begins with the last gradient. DDP has a bucket for each layer.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from arrival import make_buckets
from fake_ddp import in_backward
from torch import nn

import hvd_compress
from hvd_compress import IWP, DeMo, ddp_hook
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import allreduce

PACKAGE = str(Path(hvd_compress.__file__).parent)
STEP = 3


class Trace:
    """Counts the moves of this thread while it is active."""

    def __init__(self) -> None:
        self.moves, self.files = 0, set[str]()
        self._stack: list[str] = []

    def __enter__(self) -> "Trace":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or event not in ("call", "return"):
            return
        if event == "call":
            self.files.add(file)
            self.moves += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        else:
            self._stack.pop()
            self.moves += bool(self._stack) and self._stack[-1] != file


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


class Ranks:
    """Two ranks with a replica and a compressor each."""

    def __init__(self, build: Callable[..., Any], ordered: bool = False) -> None:
        self.world = ThreadWorld(2, ordered=ordered)
        self.models = [model() for _ in range(2)]
        self.collectives = [self.world.collectives(rank) for rank in range(2)]
        self.compressors = [
            build(layers.named_parameters(), collectives=collectives)
            for layers, collectives in zip(self.models, self.collectives, strict=True)
        ]

    def run(self, exchange: Callable[[int, int], list[Trace]]) -> list[Trace]:
        """Calls ``exchange(rank, step)`` in every step. Returns rank 0's last traces."""

        def steps(rank: int) -> list[Trace]:
            parameters = list(self.models[rank].parameters())
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            for step in range(STEP + 1):
                generator = torch.Generator().manual_seed(2 * step + rank)
                for p in parameters:
                    p.grad = torch.randn(p.shape, generator=generator)
                traces = exchange(rank, step)
                optimizer.step()
            return traces

        return self.world.run(steps)[0]


def horovod(build: Callable[..., Any]) -> list[Trace]:
    """Traces of compress, from the last parameter to the first, and then of decompress."""
    ranks = Ranks(build)

    def exchange(rank: int, step: int) -> list[Trace]:
        compressor, traces, sent = ranks.compressors[rank], [], []
        for number, p in enumerate(reversed(list(ranks.models[rank].parameters()))):
            with torch.no_grad(), Trace() as trace:
                payload, context = compressor.compress(p.grad)
            traces.append(trace)
            handle = ranks.collectives[rank].start(allreduce(payload), f"horovod.{step}.{number}")
            sent.append((p, context, handle))
        for p, context, handle in sent:
            average = handle.result() / 2
            with Trace() as trace:
                p.grad = compressor.decompress(average, context)
            traces.append(trace)
        return traces

    return ranks.run(exchange)


def ddp(build: Callable[..., Any]) -> Trace:
    """The trace of all hooks of a step."""
    ranks = Ranks(build, ordered=True)

    def exchange(rank: int, step: int) -> list[Trace]:
        layers, trace = ranks.models[rank], Trace()
        buckets = make_buckets([list(layer.parameters())[::-1] for layer in reversed(layers)])

        def hooks() -> None:
            for bucket in buckets:
                with trace:
                    ddp_hook(ranks.compressors[rank], bucket)

        in_backward(hooks)
        return [trace]

    return ranks.run(exchange)[0]


def load(build: Callable[..., Any]) -> Trace:
    compressor = Ranks(build).compressors[0]
    state = compressor.state_dict()
    with Trace() as trace:
        compressor.load_state_dict(state)
    return trace


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    calls = horovod(IWP)
    trips = {
        "compress, IWP: a gradient that begins no step and no exchange": calls[1],
        "compress, IWP: the gradient that begins the exchange": calls[3],
        "decompress, DeMo: the first": horovod(DeMo)[4],
        "decompress, DeMo: the second": horovod(DeMo)[5],
        "all DDP hooks of a step, IWP": ddp(IWP),
        "load_state_dict, IWP": load(IWP),
    }
    print(f"hvd_compress {hvd_compress.__version__}, {PACKAGE}\n")
    print(f"{'trip':64}{'moves':>6}{'files':>6}")
    for name, trace in trips.items():
        print(f"{name:64}{trace.moves:6}{len(trace.files):6}")


if __name__ == "__main__":
    main()
