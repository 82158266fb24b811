#!/usr/bin/env python3
"""Train dense, as train.py does, and keep what each rank would have had to compress at a few moments.

    bash scripts/run.sh 4 scripts/record_gradients.py --data digits --model cnn --out results/gradients

It takes train.py's options, and writes one file a rank and moment, `OUT/step000042.rank0.pt`, a dict:

    meta        data, model, step (updates made before), total_steps, epoch, lr, rank, ranks, seed, batch_size
    gradients   name -> the rank's own gradient before it is averaged, flat, in the parameter's memory order
    weights     name -> the weights it was taken at, flat likewise
    shapes, strides   name -> those of the parameter: gradients[name].as_strided(shapes[name], strides[name])

for the parameters that a method compresses: two dimensions or more, 1024 entries or more.
`torch.load(file, weights_only=True)` reads it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import train
from experiment import compressors
from torch import Tensor, nn


class Recorder(compressors.Counted):
    """Horovod without compression; between `start` and `take` it keeps a copy of what Horovod hands it."""

    def __init__(self, model: nn.Module, ranks: int):
        super().__init__(hvd.Compression.none, ranks)
        self.parameters = {name: p for name, p in model.named_parameters() if p.dim() >= 2 and p.numel() >= 1024}
        self.recorded: dict[str, dict[str, Any]] | None = None

    def start(self) -> None:
        self.recorded = {"gradients": {}, "weights": {}, "shapes": {}, "strides": {}}

    def take(self) -> dict[str, dict[str, Any]]:
        recorded, self.recorded = self.recorded, None
        if recorded is None or recorded["gradients"].keys() != self.parameters.keys():
            raise RuntimeError("Horovod did not hand over the gradient of every large parameter")
        return recorded

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        if self.recorded is not None:
            # Horovod hands over p.grad itself, without the name.
            for name, parameter in self.parameters.items():
                if parameter.grad is tensor:
                    self._record(self.recorded, name, parameter, tensor)
        return super().compress(tensor)

    def _record(self, recorded: dict[str, dict[str, Any]], name: str, parameter: Tensor, gradient: Tensor) -> None:
        recorded["gradients"][name] = _flat(gradient, parameter)
        recorded["weights"][name] = _flat(parameter.detach(), parameter)  # the update comes after all gradients
        recorded["shapes"][name] = tuple(parameter.shape)
        recorded["strides"][name] = parameter.stride()


def _flat(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy of `tensor` on the CPU, flat, in the memory order of `like`."""
    return torch.empty_like(like, device="cpu").copy_(tensor).as_strided((tensor.numel(),), (1,))


class RecordedRun(train.Run):
    """A run that writes the gradients of the steps that lie at `--moments`."""

    compression: Recorder

    def __init__(self, args: argparse.Namespace):
        if hvd.size() == 1:  # Horovod then calls no compressor
            raise ValueError("recording needs two ranks or more")
        super().__init__(args)
        self.recorded_steps = {min(int(moment * self.total_steps), self.total_steps - 1) for moment in args.moments}
        args.out.mkdir(parents=True, exist_ok=True)

    def build_compression(self, setting: compressors.Setting) -> Recorder:
        return Recorder(setting.model, setting.ranks)

    def train_step(self, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
        step = self.step
        if step not in self.recorded_steps:
            return super().train_step(inputs)
        self.compression.start()
        loss = super().train_step(inputs)
        name = f"step{step:06d}.rank{hvd.rank()}.pt"
        torch.save({"meta": self.meta(step), **self.compression.take()}, self.args.out / name)
        return loss

    def meta(self, step: int) -> dict[str, Any]:
        args = self.args
        return {
            "data": args.data,
            "model": args.model,
            "step": step,
            "total_steps": self.total_steps,
            "epoch": step // self.steps_per_epoch + 1,
            "lr": self.optimizer.param_groups[0]["lr"],
            "rank": hvd.rank(),
            "ranks": hvd.size(),
            "seed": args.seed,
            "batch_size": args.batch_size * args.backward_passes_per_step,
        }


def moments(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return values


def parse(argv: list[str]) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__, add_help=False)
    own.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the gradients here")
    own.add_argument(
        "--moments", type=moments, default="0.05,0.5,0.95", metavar="LIST", help="shares of all steps, with commas"
    )
    args = train.parse(argv, own)
    if args.compression != "none":
        own.error("gradients are recorded in a dense run: leave --compression out")
    return args


if __name__ == "__main__":
    sys.exit(train.main(parse(sys.argv[1:]), RecordedRun))
