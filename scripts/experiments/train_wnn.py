#!/usr/bin/env python3
"""Train the weight nowcaster (experiment/extrapolation.py) on small trainings, and write its weights.

    python scripts/experiments/train_wnn.py [--weights FILE.safetensors]

It trains scikit-learn's digits with mlp, cnn and resnet20, without compression and in one process, and follows random
weights of every layer over all epochs. Every window of ten epochs is an example: five as input, the tenth as target.
The last network is held out. Printed is the held-out error, the sum of |predicted - true| relative to that of
predicting no change, for the nowcaster and for the least-squares line."""

from pathlib import Path

import torch
import torch.nn.functional as F
from experiment import data as datasets
from experiment import models
from experiment.extrapolation import AHEAD, SEEN, WEIGHTS, Line, Nowcaster
from experiment.files import script_parser
from safetensors.torch import save_file
from torch import Tensor

# model, learning rate, momentum, seed
RUNS = [
    ("mlp", 0.05, 0.9, 0), ("mlp", 0.1, 0.0, 1), ("cnn", 0.05, 0.9, 0), ("cnn", 0.1, 0.0, 1), ("cnn", 0.02, 0.9, 2),
    ("resnet20", 0.05, 0.9, 0),
]  # fmt: skip
HELD_OUT = ("resnet20", 0.1, 0.9, 1)
EPOCHS = 30
PER_LAYER = 2000


def history(run: tuple[str, float, float, int]) -> Tensor:
    """Some weights after every epoch: float32 (weights, EPOCHS)."""
    network, rate, momentum, seed = run
    data = datasets.load("digits")
    torch.manual_seed(seed)
    model = models.build(network, *data.shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, weight_decay=5e-4)
    total = EPOCHS * data.steps_per_epoch(64, 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    chosen = [torch.randperm(p.numel())[:PER_LAYER] for p in model.parameters()]
    epochs = []
    for epoch in range(EPOCHS):
        for images, labels in data.train_batches(64, 0, 1, seed, epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
        epochs.append(torch.cat([p.detach().flatten()[c] for p, c in zip(model.parameters(), chosen, strict=True)]))
    print(f"{network} with learning rate {rate:g} and momentum {momentum:g}", flush=True)
    return torch.stack(epochs, 1)


def examples(histories: list[Tensor]) -> tuple[Tensor, Tensor]:
    windows = torch.cat([h.unfold(1, SEEN + AHEAD, 1).reshape(-1, SEEN + AHEAD) for h in histories])
    return windows[:, :SEEN].contiguous(), windows[:, -1].contiguous()


def error(predicted: Tensor, past: Tensor, true: Tensor) -> float:
    return float((predicted - true).abs().sum() / (past[:, -1] - true).abs().sum())


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--steps", type=int, default=6000)
    args = parser.parse_args()
    torch.manual_seed(0)
    past, true = examples([history(run) for run in RUNS])
    test_past, test_true = examples([history(HELD_OUT)])
    network = Nowcaster()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    for step in range(args.steps):
        rows = torch.randint(len(past), (2048,))
        # A weight's error counts in units of how much it moves, as in the paper's normalisation.
        unit = past[rows].amax(1) - past[rows].amin(1) + 1e-5
        loss = ((network(past[rows]) - true[rows]) / unit).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        ours, line = network(test_past), Line([]).extrapolate(test_past)
    args.weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, args.weights)
    print(f"{len(past):,} examples, {len(test_past):,} held out; error relative to predicting no change:")
    print(f"WNN {error(ours, test_past, test_true):.3f}, line {error(line, test_past, test_true):.3f}")


if __name__ == "__main__":
    main()
