#!/usr/bin/env python3
"""Train without compression, as train.py does, and keep each rank's own gradients of a few steps.

    bash scripts/run.sh 4 scripts/experiments/record_gradients.py --data digits --model cnn --out results/gradients

It takes train.py's options and writes `OUT/step000042.rank0.pt` for each rank and recorded step, a dict: `step`, the
number of updates before; `gradients`, name -> the rank's gradient before averaging, flat, in the parameter's memory
order; `shapes` and `strides`, of the parameters: gradients[name].as_strided(shapes[name], strides[name]). Recorded are
the parameters that a method compresses: two dimensions or more, 1024 entries or more."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import train
from experiment.hosts import Host
from torch import Tensor


class Recorder:
    """Copies the gradients of large parameters as backward makes them, before anything else sees them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.dim() >= 2 and p.numel() >= 1024}
        self.gradients: dict[str, Tensor] = {}
        self.on = False
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._record(name, p))

    def _record(self, name: str, parameter: Tensor) -> None:
        if self.on:
            like = torch.empty_like(parameter, device="cpu")
            self.gradients[name] = like.copy_(parameter.grad).as_strided((parameter.numel(),), (1,))

    def content(self, step: int) -> dict[str, Any]:
        named = self.parameters.items()
        content = {"shapes": {name: tuple(p.shape) for name, p in named}, "strides": {n: p.stride() for n, p in named}}
        return {"step": step, "gradients": self.gradients, **content}


class RecordedRun(train.Run):
    """A run that writes the gradients of the steps at `--moments`."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        super().__init__(args, host)
        self.recorded = {min(int(moment * self.total_steps), self.total_steps - 1) for moment in args.moments}
        args.out.mkdir(parents=True, exist_ok=True)

    def build_compression(self, optimizer: torch.optim.Optimizer) -> Any:
        self.recorder = Recorder(self.model)  # its hooks come before Horovod's
        return super().build_compression(optimizer)

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        step = self.step
        self.recorder.on = step in self.recorded
        loss = super().train_step(images, labels)
        if self.recorder.on:
            torch.save(self.recorder.content(step), self.args.out / f"step{step:06d}.rank{self.host.rank}.pt")
        return loss


def parse(argv: list[str]) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__, add_help=False)
    own.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the gradients here")
    moments = dict(type=lambda text: [float(part) for part in text.split(",")], default=[0.05, 0.5, 0.95])
    own.add_argument("--moments", **moments, metavar="LIST", help="shares of all steps")
    args = train.parse(argv, own)
    if args.compression != "none" or not all(0 <= moment <= 1 for moment in args.moments):
        own.error("gradients are recorded without compression, at moments from 0 to 1")
    return args


if __name__ == "__main__":
    sys.exit(train.main(parse(sys.argv[1:]), RecordedRun))
