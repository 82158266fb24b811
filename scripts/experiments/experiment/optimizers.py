"""The optimizers of the experiments and their learning rate."""

import argparse
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import hvd_compress
from experiment.models import hidden_matrices
from hvd_compress.methods.orthogonal import orthogonalize
from hvd_compress.trainers import CombinedOptimizer

#: Settings of each optimizer and their defaults.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9},
    "adamw": {"lr": 3e-3, "weight_decay": 0.01},
    # SGD without momentum, for a method that has its own and sends signs: learning rates as for AdamW.
    "plain": {"lr": 6e-3, "weight_decay": 0.01},
    "muon": {"lr": 8e-3, "weight_decay": 0.01, "momentum": 0.95},
    # torch.optim.Muon of the hidden matrices and AdamW of the others, as README has them.
    "muon-adamw": {"lr": 6e-3},
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


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024): parameters of groups that are ``orthogonal`` move by the nearest orthogonal matrix of
    their Nesterov momentum, with root mean square 1, others by its sign. Weight decay is decoupled.

    All settings are in the groups: Horovod makes an optimizer anew from these alone.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: float) -> None:
        super().__init__(groups, {"dampening": 0.0, **settings})  # the momentum is a sum, as SGD's

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:  # on averaged gradients, between exchanges
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad)
                update = p.grad.add(velocity, alpha=group["momentum"])
                if group["orthogonal"]:
                    orthogonalize(update, 1.0)
                else:
                    update.sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def build(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    parameters, settings = model.parameters(), {"lr": args.lr, "weight_decay": args.weight_decay}
    if args.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    if args.optimizer == "muon-adamw":
        matrices, others = hvd_compress.hidden_matrices(model)
        muon = torch.optim.Muon(matrices.values(), lr=args.lr, adjust_lr_fn="match_rms_adamw")
        return CombinedOptimizer([muon, torch.optim.AdamW(others.values(), lr=args.lr)])
    if args.optimizer == "muon" and getattr(args, "averaged_gradients", False):
        groups = matrices_apart(model, "orthogonal")
        return CombinedOptimizer([Muon([group], momentum=args.momentum, **settings) for group in groups])
    if args.optimizer == "muon":
        return Muon(matrices_apart(model, "orthogonal"), momentum=args.momentum, **settings)
    return torch.optim.SGD(parameters, momentum=args.momentum or 0.0, **settings)


def matrices_apart(model: nn.Module, key: str) -> list[dict[str, Any]]:
    """Two parameter groups: the hidden matrices, with ``key`` true, and the other parameters."""
    matrices, named = set(hidden_matrices(model)), list(model.named_parameters())
    return [
        {"params": [p for name, p in named if (name in matrices) is is_one], key: is_one} for is_one in (True, False)
    ]


def learning_rate(step: int, peak: float, warmup_steps: float, total_steps: int) -> float:
    """Linear to ``peak`` over the warm-up, then half a cosine that reaches 0 after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / (math.floor(warmup_steps) + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1)))
