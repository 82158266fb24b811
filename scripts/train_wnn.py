#!/usr/bin/env python3
"""Train the weight nowcaster (hvd_compress.extrapolation.WNN) on histories of small trainings, and write its weights.

    python scripts/train_wnn.py [--weights FILE.safetensors]

Trains scikit-learn's digits with mlp, cnn and resnet20, densely and in one
process; a random few weights of every layer are followed over all epochs, and every window of ten epochs is an example:
five to see, the tenth to say. The last network is held out. It prints the held-out error, |said - came| summed, in
units of the error of saying that nothing changes, and the line's beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from experiment import data as datasets
from experiment import models
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from hvd_compress.methods.extrapolation import AHEAD, SEEN, Line, Nowcaster

# data, model, learning rate, momentum, seed
RUNS = [
    ("digits", "mlp", 0.05, 0.9, 0),
    ("digits", "mlp", 0.1, 0.0, 1),
    ("digits", "cnn", 0.05, 0.9, 0),
    ("digits", "cnn", 0.1, 0.0, 1),
    ("digits", "cnn", 0.02, 0.9, 2),
    ("digits", "resnet20", 0.05, 0.9, 0),
]
HELD_OUT = ("digits", "resnet20", 0.1, 0.9, 1)
EPOCHS = 30
A_LAYER = 2000


def history(run: tuple[str, str, float, float, int]) -> Tensor:
    """Some weights after every epoch: float32 (weights, EPOCHS)."""
    name, network, rate, momentum, seed = run
    data = datasets.load(name)
    torch.manual_seed(seed)
    model = models.build(network, data.channels, data.size, data.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=5e-4)
    total = EPOCHS * datasets.steps_per_epoch(len(data.train_labels), 64, 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    chosen = [torch.randperm(p.numel())[:A_LAYER] for p in model.parameters()]
    epochs = []
    for epoch in tqdm(range(EPOCHS), desc=f"{name} {network}", leave=False):
        for images, labels in datasets.train_batches(data, 64, 0, 1, seed, epoch, True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
        flat = [p.detach().flatten()[c] for p, c in zip(model.parameters(), chosen, strict=True)]
        epochs.append(torch.cat(flat))
    return torch.stack(epochs, 1)


def examples(histories: list[Tensor]) -> tuple[Tensor, Tensor]:
    windows = torch.cat([h.unfold(1, SEEN + AHEAD, 1).reshape(-1, SEEN + AHEAD) for h in histories])
    return windows[:, :SEEN].contiguous(), windows[:, -1].contiguous()


def error(said: Tensor, past: Tensor, came: Tensor) -> float:
    return float((said - came).abs().sum() / (past[:, -1] - came).abs().sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("hvd_compress/weights/wnn.safetensors"))
    parser.add_argument("--steps", type=int, default=6000)
    args = parser.parse_args()
    torch.manual_seed(0)
    past, came = examples([history(run) for run in RUNS])
    test_past, test_came = examples([history(HELD_OUT)])
    network = Nowcaster()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    for step in (bar := tqdm(range(args.steps))):
        rows = torch.randint(len(past), (2048,))
        unit = past[rows].amax(1) - past[rows].amin(1) + 1e-5
        # A weight's error counts in units of how much it moves, as its paper's normalisation has it.
        loss = ((network(past[rows]) - came[rows]) / unit).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            bar.set_postfix(loss=f"{float(loss):.4f}")
    with torch.no_grad():
        ours, line = network(test_past), Line([]).extrapolate(test_past)
    args.weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, args.weights)
    print(f"{len(past):,} examples, {len(test_past):,} held out; error relative to saying that nothing changes:")
    print(f"WNN {error(ours, test_past, test_came):.3f}, line {error(line, test_past, test_came):.3f}")
    print(f"{args.weights}: {args.weights.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
