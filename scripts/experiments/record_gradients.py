#!/usr/bin/env python3
"""Train without compression, as train.py does, and keep each rank's own gradients of a few steps; with --local-steps,
how far its weights have come when they are exchanged.

    bash scripts/run.sh 4 scripts/experiments/record_gradients.py --data digits --model cnn --out results/gradients

It takes train.py's options and writes `OUT/step000042.rank0.pt` for each rank and recorded step, a dict: `step`, the
number of updates before; `gradients`, name -> the rank's gradient before averaging, flat, in the parameter's memory
order; `shapes` and `strides`, of the parameters: gradients[name].as_strided(shapes[name], strides[name]). Recorded are
the parameters that a method compresses: two dimensions or more, 1024 entries or more. --count records that many
consecutive steps, or exchanges, from each moment on."""

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


class DifferenceRecorder(Recorder):
    """Copies the differences of large parameters since the last exchange, when the optimizer has stepped."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self.on, self._begin = True, dict[str, Tensor]()
        optimizer.register_step_pre_hook(self._note_begin)
        optimizer.register_step_post_hook(self._note_difference)

    def _record(self, name: str, parameter: Tensor) -> None:
        """Gradients are not kept."""

    def _note_begin(self, *_: object) -> None:
        if not self._begin:
            self._begin = {name: p.detach().clone() for name, p in self.parameters.items()}

    def _note_difference(self, *_: object) -> None:
        for name, p in self.parameters.items():
            difference = p.detach() - self._begin[name]
            self.gradients[name] = difference.cpu().as_strided((p.numel(),), (1,))

    def exchanged(self) -> None:
        """The next step begins a new difference."""
        self._begin = {}


class RecordedRun(train.Run):
    """A run that writes the gradients of the steps at `--moments`."""

    def __init__(self, args: argparse.Namespace, host: Host) -> None:
        super().__init__(args, host)
        period = args.local_steps or 1
        last = self.total_steps // period - 1
        first = [min(int(moment * (last + 1)), last) for moment in args.moments]
        #: The steps after which there is something to write.
        self.recorded = {period * (f + i + 1) - 1 for f in first for i in range(args.count) if f + i <= last}
        args.out.mkdir(parents=True, exist_ok=True)

    def build_compression(self, optimizer: torch.optim.Optimizer) -> Any:
        # Its hooks come before Horovod's.
        local = self.args.local_steps
        self.recorder = DifferenceRecorder(self.model, optimizer) if local else Recorder(self.model)
        return super().build_compression(optimizer)

    def train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        step = self.step
        self.recorder.on = step in self.recorded
        loss = super().train_step(images, labels)
        if self.recorder.on:
            torch.save(self.recorder.content(step), self.args.out / f"step{step:06d}.rank{self.host.rank}.pt")
        if isinstance(self.recorder, DifferenceRecorder) and self.step % self.args.local_steps == 0:
            self.recorder.exchanged()
        return loss


def parse(argv: list[str]) -> argparse.Namespace:
    own = argparse.ArgumentParser(description=__doc__, add_help=False)
    own.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the gradients here")
    moments = dict(type=lambda text: [float(part) for part in text.split(",")], default=[0.05, 0.5, 0.95])
    own.add_argument("--moments", **moments, metavar="LIST", help="shares of all steps")
    own.add_argument("--count", type=int, default=1, help="of consecutive steps or exchanges at each moment")
    args = train.parse(argv, own)
    if args.compression != "none" or not all(0 <= moment <= 1 for moment in args.moments):
        own.error("gradients are recorded without compression, at moments from 0 to 1")
    return args


if __name__ == "__main__":
    sys.exit(train.main(parse(sys.argv[1:]), RecordedRun))
