#!/usr/bin/env python3
"""MP2's predictor: records its inputs and targets in trainings of small networks, and trains it on them.

    python scripts/experiments/train_predictor.py record results/histories [--data-dir DATA_DIR]
    python scripts/experiments/train_predictor.py train results/histories [--weights FILE.safetensors] > CARD.md

record: MP2 without prediction trains scikit-learn's digits and synthetic images with mlp, cnn and resnet20, and with
--data-dir CIFAR-10 too; with and without momentum correction, in one process. From every compressed layer a few windows
of 256 entries are taken at random steps, equally many in each third of the training. FOLDER/RUN.safetensors holds
`seen`, float16 (n, 6, 256), see hvd_compress/methods/predictor.py; `next`, float16 (n, 256): the mean gradient of the
following period, in the same unit; and as metadata, in JSON, the run, and the layer, its kind and depth, and the phase
of every example.

train: some runs are held out (--held-out, by data and network): nothing is tuned on them, and what is printed is of
them alone. The loss is the squared error in units of a layer's root mean square, with the largest targets clipped.
MP2's gain depends on the cosine of prediction and truth: printed by kind of layer and by phase, beside the cosines of
the simplest predictors: the smoothed value, and the value received last."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import table
import torch
import torch.nn.functional as F
from experiment import data as datasets
from experiment import models
from experiment.files import script_parser
from experiment.images import CIFAR_FOLDER
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hvd_compress import MP2
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.bucket import Bucket, Piece
from hvd_compress.methods.sparse import Sending, SparseWork
from hvd_compress.papers.predictor import Predictor

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

# Channels of `seen`; see hvd_compress.papers.predictor.fields.
ARRIVED, SMOOTHED = 3, 4
LARGEST = 8.0  # a target, in units of its layer
PHASES = ("first", "second", "last")


class Recorder(MP2):
    """Predicts zero, and records its inputs."""

    def __init__(self, *args: Any, **options: Any):
        self.open: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self.wanted = False
        self.random = torch.Generator().manual_seed(0)
        # This gate is always open.
        super().__init__(*args, prediction=True, gate=-1.0, values="fp32", check_interval=0, **options)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        work: Any = super().sparse_work(bucket, sending)
        accumulate = work.accumulate

        def recorded() -> None:
            self._follow(work)
            accumulate()

        work.prediction.predict, work.accumulate = partial(self._predict, work), recorded
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


class Examples(NamedTuple):
    """`seen` float32 (n, 6, 256), `next` float32 (n, 256), `about`: layer, kind, depth and phase of each."""

    seen: Tensor
    next: Tensor
    about: list[list[Any]]


def load(files: list[Path]) -> Examples:
    seen, following, about = [], [], []
    for file in files:
        with safe_open(file, "pt") as opened:
            seen.append(opened.get_tensor("seen").float())
            following.append(opened.get_tensor("next").float().clamp(-LARGEST, LARGEST))
            about += json.loads(opened.metadata()["about"])
    return Examples(torch.cat(seen), torch.cat(following), about)


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-12))


@torch.no_grad()
def predictions(predictor: Predictor, examples: Examples) -> Tensor:
    return torch.cat([predictor(part) for part in examples.seen.split(512)])


def train(
    examples: Examples, held_out: Examples, epochs: int = 10, rate: float = 3e-3, batch: int = 128
) -> tuple[Predictor, float]:
    """The predictor after the last epoch, and its squared error on what was held out, relative to predicting 0."""
    predictor = Predictor()
    optimizer = torch.optim.Adam(predictor.parameters(), lr=rate)
    steps = epochs * -(-len(examples.seen) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    nothing = float(held_out.next.square().mean())
    for epoch in range(epochs):
        for chosen in torch.randperm(len(examples.seen)).split(batch):
            seen, following = examples.seen[chosen], examples.next[chosen]
            # Gradients with the opposite sign are as likely.
            sign = torch.randint(0, 2, (len(chosen), 1)) * 2.0 - 1.0
            one = torch.ones_like(sign)
            signs = torch.cat([sign, one, one, sign, sign, sign], 1)[:, :, None]
            loss = (predictor(seen * signs) - following * sign).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        predicted = predictions(predictor, held_out)
        error = float((predicted - held_out.next).square().mean()) / nothing
        print(f"epoch {epoch}: held out {error:.4f}, cosine {cosine(predicted, held_out.next):.4f}", flush=True)
    return predictor, error


def cosines(predictor: Predictor, held_out: Examples) -> str:
    predicted = predictions(predictor, held_out)
    about = pd.DataFrame(held_out.about, columns=["layer", "kind", "depth", "phase"])
    groups = {"all": about.index, **about.groupby("kind").groups}
    groups |= {f"{PHASES[phase]} third of training": index for phase, index in about.groupby("phase").groups.items()}
    rows = []
    for label, index in groups.items():
        chosen = torch.tensor(index)
        seen, following = held_out.seen[chosen].sinh(), held_out.next[chosen]
        guesses = {"predictor": predicted[chosen], "smoothed": seen[:, SMOOTHED], "received last": seen[:, ARRIVED]}
        found = {name: f"{cosine(guess, following):.3f}" for name, guess in guesses.items()}
        rows.append({"held-out windows": label, "count": str(len(chosen)), **found})
    return table.markdown(rows)


def record_all(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    for run in RUNS + (CIFAR if args.data_dir else []):
        file = args.folder / f"{run[0]}-{run[1]}-{run[2]:g}-{args.seed}.safetensors"
        if file.exists():
            continue
        examples = record(run, args.data_dir, args.seed)
        tensors = {key: torch.stack([e[key] for e in examples]).half() for key in ("seen", "next")}
        about = {"run": json.dumps(run), "about": json.dumps([e["about"] for e in examples])}
        save_file(tensors, file, metadata=about)
        print(f"{file}: {len(examples)} windows", flush=True)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("command", choices=("record", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", type=Path, help=f"of record: folder that holds {CIFAR_FOLDER}/")
    parser.add_argument("--held-out", default="cifar10-resnet20", metavar="DATA-NETWORK")
    parser.add_argument("--weights", type=Path, default=Path("hvd_compress/weights/predictor.safetensors"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.command == "record":
        return record_all(args)
    files = sorted(args.folder.glob("*.safetensors"))
    out = [file for file in files if file.name.startswith(args.held_out)]
    if not out or len(out) == len(files):
        parser.error(f"{args.folder} must hold {args.held_out} and something else")
    torch.manual_seed(args.seed)
    examples, held_out = load([file for file in files if file not in out]), load(out)
    predictor, error = train(examples, held_out)
    args.weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in predictor.state_dict().items()}, args.weights)
    print(
        f"{len(examples.seen):,} windows, {len(held_out.seen):,} held out; {error:.4f} of the squared error of zero\n"
    )
    print(cosines(predictor, held_out))


if __name__ == "__main__":
    main()
