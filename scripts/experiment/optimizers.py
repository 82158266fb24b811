"""The optimizers of the experiments and their learning rate."""

import argparse
import math
from collections.abc import Iterable

import torch
from torch import nn

#: Settings of each optimizer and their defaults.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9},
    "adamw": {"lr": 3e-3, "weight_decay": 0.01},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def defaults(name: str) -> str:
        return ", ".join(f"{settings[name]:g} with {key}" for key, settings in OPTIMIZERS.items() if name in settings)

    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument(
        "--lr", type=float, help=f"peak learning rate, for the global batch (default: {defaults('lr')})"
    )
    parser.add_argument("--lr-warmup-epochs", type=float, default=1, help="epochs of linear rise; then a cosine to 0")
    parser.add_argument("--momentum", type=float, help=f"(default: {defaults('momentum')})")
    parser.add_argument("--weight-decay", type=float, help=f"(default: {defaults('weight_decay')})")


def complete(args: argparse.Namespace) -> None:
    """Sets what was not given to the optimizer's defaults. ``ValueError`` for a setting that the optimizer has not."""
    defaults = OPTIMIZERS[args.optimizer]
    for name in ("lr", "weight_decay", "momentum"):
        if name in defaults and getattr(args, name) is None:
            setattr(args, name, defaults[name])
        elif name not in defaults and getattr(args, name) is not None:
            raise ValueError(f"--optimizer {args.optimizer} has no --{name.replace('_', '-')}")


def build(args: argparse.Namespace, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.SGD(parameters, lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay)


def learning_rate(step: int, peak: float, warmup_steps: float, total_steps: int) -> float:
    """Linear to ``peak`` over the warm-up, then half a cosine that reaches 0 after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / (math.floor(warmup_steps) + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))
