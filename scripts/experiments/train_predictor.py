#!/usr/bin/env python3
"""Train MP2's predictor on what record_histories.py kept, and write its weights and a model card.

    python scripts/experiments/train_predictor.py HISTORIES_DIR [--weights FILE.safetensors] [--card FILE.md]

Some runs are held out (`--held-out`, by data and network): nothing is tuned on them, and the card's figures are of
them alone. The loss is the squared error in units of a layer's root mean square, with the largest targets clipped.
MP2's gain depends on the cosine of prediction and truth: the card has it by kind of layer and by phase, beside the
cosines of the simplest predictors: the smoothed value, and the value received last."""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import table
import torch
from experiment.files import script_parser
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import hvd_compress
from hvd_compress.methods.predictor import Predictor

# Channels of `seen`; see hvd_compress.methods.predictor.fields.
ARRIVED, SMOOTHED = 3, 4
LARGEST = 8.0  # a target, in units of its layer
BATCH = 128
PHASES = ("first", "second", "last")


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


def train(examples: Examples, held_out: Examples, epochs: int, rate: float) -> tuple[Predictor, float]:
    """The predictor after the last epoch, and its squared error on what was held out, relative to predicting 0."""
    predictor = Predictor()
    optimizer = torch.optim.Adam(predictor.parameters(), lr=rate)
    steps = epochs * -(-len(examples.seen) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    nothing = float(held_out.next.square().mean())
    for epoch in range(epochs):
        for chosen in torch.randperm(len(examples.seen)).split(BATCH):
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


def card(predictor: Predictor, error: float, examples: Examples, held_out: Examples, args: argparse.Namespace) -> str:
    predicted = predictions(predictor, held_out)
    about = pd.DataFrame(held_out.about, columns=["layer", "kind", "depth", "phase"])
    groups = {"all": about.index, **about.groupby("kind").groups}
    groups |= {f"{PHASES[phase]} third of training": index for phase, index in about.groupby("phase").groups.items()}
    rows = []
    for label, index in groups.items():
        chosen = torch.tensor(index)
        seen, following = held_out.seen[chosen].sinh(), held_out.next[chosen]
        guesses = {"predictor": predicted[chosen], "smoothed": seen[:, SMOOTHED], "received last": seen[:, ARRIVED]}
        cosines = {name: f"{cosine(guess, following):.3f}" for name, guess in guesses.items()}
        rows.append({"held-out windows": label, "count": str(len(chosen)), **cosines})
    parameters = sum(p.numel() for p in predictor.parameters())
    return (
        f"""# The predictor's model card

Written by `scripts/experiments/train_predictor.py` (hvd_compress {hvd_compress.__version__}, torch
{torch.__version__}) from the data of `scripts/experiments/record_histories.py`: {len(examples.seen):,} windows of 256
entries for training, and {len(held_out.seen):,} held out (all runs of {args.held_out}).

- **What it is**: {parameters:,} parameters: two convolutions, channel attention, max pooling, one convolution
  (`hvd_compress/methods/predictor.py`; the architecture is MP2's, Liu et al., Computer Networks 255, 2024; inputs and
  training are ours).
- **Output**: an entry's mean gradient of the next nine steps, from the received values of it and of its neighbours in
  memory.
- **Held-out error**: {error:.4f} of the squared error of predicting zero.
- **Training**: {args.epochs} epochs, Adam, peak rate {args.rate:g}, seed {args.seed}; nothing was tuned on the held-out
  data.
- **Limits**: trained for density 1/9 and on gradients of image classifiers only; elsewhere MP2's gate decides whether
  predictions are used.

Cosine of prediction and truth:

"""
        + table.markdown(rows)
        + "\n"
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("histories", type=Path, metavar="HISTORIES_DIR")
    parser.add_argument("--held-out", default="cifar10-resnet20", metavar="DATA-NETWORK")
    parser.add_argument("--weights", type=Path, default=Path("hvd_compress/weights/predictor.safetensors"))
    parser.add_argument("--card", type=Path, default=Path("docs/predictor.md"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    files = sorted(args.histories.glob("*.safetensors"))
    out = [file for file in files if file.name.startswith(args.held_out)]
    if not out or len(out) == len(files):
        parser.error(f"{args.histories} must hold {args.held_out} and something else")
    torch.manual_seed(args.seed)
    examples, held_out = load([file for file in files if file not in out]), load(out)
    predictor, error = train(examples, held_out, args.epochs, args.rate)
    args.weights.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in predictor.state_dict().items()}, args.weights)
    args.card.write_text(card(predictor, error, examples, held_out, args))
    print(args.card.read_text())


if __name__ == "__main__":
    main()
