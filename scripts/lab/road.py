#!/usr/bin/env python3
"""How far a reader of a call walks: distinct files and functions of hvd_compress that it enters, and their lines.

    python scripts/lab/road.py

Steps are the third of two linear layers of 64 x 64, by rank 0 of two, the other simulated. Functions that torch or
contextlib call count too; comprehensions and lambdas belong to the function around them. The last columns are without
guards/, whose one call a reader of the algorithm may pass.
"""

import argparse
import inspect
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from arrival import DDPMirror, ddp, horovod
from torch import nn

import hvd_compress
from hvd_compress.carriers.mirror import Mirror

PACKAGE = str(Path(hvd_compress.__file__).parent)
STEPS = 3


class Road:
    """What this thread enters while it is active."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()

    def __enter__(self) -> "Road":
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.functions.add(code)

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}

    @property
    def lines(self) -> int:
        return sum(len(inspect.getsourcelines(code)[0]) for code in self.functions)

    def without(self, room: str) -> "Road":
        """The functions of other rooms."""
        other = Road()
        other.functions = {code for code in self.functions if f"/{room}/" not in code.co_filename}
        return other


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def step(build: Callable[..., Any], host: Callable[..., Any]) -> Road:
    """A step by :func:`arrival.horovod` or :func:`arrival.ddp`."""
    parameters = list((layers := model()).parameters())
    compressor = build(layers, collectives=(DDPMirror if host is ddp else Mirror)(2))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(STEPS):
        for p in parameters:
            p.grad = torch.randn(p.shape)
        with Road() as road:
            host(compressor, parameters)
            optimizer.step()
    return road


def local_step() -> Road:
    layers = model()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    local = hvd_compress.recipes.low_bit(layers, optimizer, 1, collectives=Mirror(2))
    for _ in range(STEPS):
        layers(torch.randn(4, 64)).sum().backward()
        with Road() as road, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the simulated ranks have the same gradients
            optimizer.step()
            local.step()
    return road


def load() -> Road:
    compressor = hvd_compress.IWP(model(), collectives=Mirror(2))
    state = compressor.state_dict()
    with Road() as road:
        compressor.load_state_dict(state)
    return road


TRIPS: dict[str, Callable[[], Road]] = {
    "a step of IWP, Horovod": lambda: step(hvd_compress.IWP, horovod),
    "a step of IWP, DDP": lambda: step(hvd_compress.IWP, ddp),
    "a local step that exchanges, recipes.low_bit": local_step,
    "load_state_dict, IWP": load,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"hvd_compress {hvd_compress.__version__}, {PACKAGE}\n")
    print(f"{'call':48}" + 2 * f"{'files':>6}{'functions':>10}{'lines':>7}")
    for name, trip in TRIPS.items():
        road = trip()
        both = road, road.without("guards")
        counts = (f"{len(found.files):6}{len(found.functions):10}{found.lines:7}" for found in both)
        print(f"{name:48}{''.join(counts)}")


if __name__ == "__main__":
    main()
