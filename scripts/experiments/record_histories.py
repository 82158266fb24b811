#!/usr/bin/env python3
"""Train small networks with MP2 without prediction, and record the predictor's inputs and targets: the examples for
train_predictor.py.

    python scripts/experiments/record_histories.py --out results/histories [--data-dir DATA_DIR]

Networks are scikit-learn's digits and synthetic images with mlp, cnn and resnet20, and with --data-dir CIFAR-10 too;
with and without momentum correction. From every compressed layer a few windows of 256 entries are taken at random
steps, equally many in each third of the training. OUT/RUN.safetensors holds `seen`, float16 (n, 6, 256), see
hvd_compress/methods/predictor.py; `next`, float16 (n, 256): the mean gradient of the following period, in the same
unit; and as metadata, in JSON, the run, and the layer, its kind and depth, and the phase of every example. One
process, without Horovod: the average is the gradient of the whole batch."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from experiment import data as datasets
from experiment import models
from experiment.files import script_parser
from experiment.images import CIFAR_FOLDER
from safetensors.torch import save_file
from torch import Tensor

from hvd_compress import MP2
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.bucket import Bucket, Piece
from hvd_compress.methods.sparse_work import Sending, SparseWork

RUNS = [
    # data, model, momentum, batch, epochs, learning rate
    ("digits", "mlp", 0.0, 64, 12, 0.1),
    ("digits", "mlp", 0.9, 64, 12, 0.05),
    ("digits", "cnn", 0.0, 64, 12, 0.1),
    ("digits", "cnn", 0.9, 64, 12, 0.05),
    ("synthetic", "cnn", 0.9, 128, 3, 0.05),
    ("digits", "resnet20", 0.9, 128, 8, 0.1),
    ("synthetic", "resnet20", 0.0, 128, 1, 0.1),
    ("synthetic", "resnet20", 0.9, 128, 1, 0.1),
]
CIFAR = [("cifar10", "cnn", 0.9, 128, 1, 0.05), ("cifar10", "resnet20", 0.9, 128, 1, 0.1)]
A_LAYER = 6  # windows of a layer at a moment
MOMENTS = 30  # a third of the training


class Recorder(MP2):
    """Predicts zero, and records its inputs."""

    def __init__(self, *args: Any, **options: Any):
        self.open: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self.wanted = False
        self.random = torch.Generator().manual_seed(0)
        super().__init__(*args, prediction=True, values="fp32", **options)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        work: Any = super().sparse_work(bucket, sending)
        accumulate = work.accumulate

        def recorded() -> None:
            self._follow(work)
            accumulate()

        work.prediction.predict, work.accumulate = partial(self._predict, work), recorded
        work.prediction.opened = lambda: [True] * len(bucket.pieces)
        return work

    def _predict(self, work: Any, index: int, windows: Tensor, seen: Tensor) -> Tensor:
        if self.wanted and float(seen.abs().sum()):
            piece = work.bucket.pieces[index]
            unit = piece.of(work.prediction.arrived)[: piece.numel].square().mean().sqrt() + 1e-12
            for i in torch.randperm(len(windows), generator=self.random)[:A_LAYER].tolist():
                example = {"piece": piece, "window": int(windows[i]), "unit": unit, "seen": seen[i].clone()}
                self.open.append({**example, "sum": torch.zeros(256), "steps": 0, "period": work.period})
        return torch.zeros_like(seen[:, 0])

    def _follow(self, work: Any) -> None:
        for piece, grad in zip(work.bucket.pieces, work.bucket.gradients, strict=True):
            for example in self.open:
                if example["piece"] is piece:
                    example["sum"] += _increment(work, piece, grad, example["window"])
                    example["steps"] += 1
                    if example["steps"] == example["period"]:
                        self.done.append(example)
        self.open = [example for example in self.open if example["steps"] < example["period"]]


def _increment(work: Any, piece: Piece, grad: Tensor, window: int) -> Tensor:
    """What this step adds to the residual."""
    here = slice(window * 256, window * 256 + 256)
    part = grad.as_strided((grad.numel(),), (1,))[here].float()
    part = F.pad(part, (0, 256 - part.numel()))
    velocity = work.velocity
    return part if velocity.memory is None else part + velocity.momentum * piece.of(velocity.memory)[here]


def record(run: tuple[str, str, float, int, int, float], folder: Path | None, seed: int) -> list[dict[str, Any]]:
    name, network, momentum, batch, epochs, rate = run
    data = datasets.load(name, folder)
    torch.manual_seed(seed)
    model = models.build(network, *data.shape)
    # As most users with convolutions; windows follow the memory order.
    model = model.to(memory_format=torch.channels_last)
    recorder = Recorder(model.named_parameters(), momentum=momentum, collectives=ThreadWorld(1).collectives(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    total = epochs * data.steps_per_epoch(batch, 1)
    third = total // 3
    moments = {
        part * third + int(step)
        for part in range(3)
        for step in torch.randperm(max(third - 18, 1), generator=torch.Generator().manual_seed(part))[:MOMENTS] + 9
    }
    depth = {n: i for i, (n, p) in enumerate((n, p) for n, p in model.named_parameters() if p.dim() >= 2)}
    examples, step = [], 0
    for epoch in range(epochs):
        for images, labels in data.train_batches(batch, 0, 1, seed, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(images.contiguous(memory_format=torch.channels_last)), labels).backward()
            recorder.wanted = step in moments
            parameters = [p for p in model.parameters() if p.grad is not None]
            pending = [(p, *recorder.compress(p.grad)) for p in parameters]
            for p, payload, ctx in pending:
                p.grad = recorder.decompress(payload, ctx)
            optimizer.step()
            for example in recorder.done:
                piece = example["piece"]
                kind = "linear" if len(piece.shape) == 2 else f"conv{piece.shape[-1]}"
                examples.append(
                    {
                        "seen": example["seen"],
                        "next": (example["sum"] / example["period"] / example["unit"]).clamp(-1e4, 1e4),
                        "about": [piece.name, kind, depth[piece.name], min(3 * step // total, 2)],
                    }
                )
            recorder.done.clear()
            step += 1
    return examples


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data-dir", type=Path, help=f"folder that holds {CIFAR_FOLDER}/")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for run in RUNS + (CIFAR if args.data_dir else []):
        file = args.out / f"{run[0]}-{run[1]}-{run[2]:g}-{args.seed}.safetensors"
        if file.exists():
            continue
        examples = record(run, args.data_dir, args.seed)
        tensors = {key: torch.stack([e[key] for e in examples]).half() for key in ("seen", "next")}
        about = {"run": json.dumps(run), "about": json.dumps([e["about"] for e in examples])}
        save_file(tensors, file, metadata=about)
        print(f"{file}: {len(examples)} windows", flush=True)


if __name__ == "__main__":
    main()
