"""Optimizers around other ones."""

from typing import Any

from torch.optim import Optimizer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside wrappers, as Accelerate's and Lightning's, whose groups and state are those of their
    ``optimizer``. (Lookahead has such an attribute, too, and a state of its own.)"""
    found = optimizer
    while hasattr(found, "param_groups") and hasattr(found, "optimizer"):
        if isinstance(found, Optimizer) and not vars(found).keys().isdisjoint({"param_groups", "state"}):
            break
        found = found.optimizer
    return found


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers in ``optimizer`` that have states of their own: itself, and those that it holds (SAM, Lookahead, a
    container of several)."""
    held = [
        item for value in vars(optimizer).values() for item in (value if isinstance(value, list | tuple) else [value])
    ]
    own = [optimizer] if "state" in vars(optimizer) else []
    return [*own, *(part for item in held if isinstance(item, Optimizer) for part in inside(item))]
