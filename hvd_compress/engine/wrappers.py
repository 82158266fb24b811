"""Optimizers around other ones, and nested values in their states."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from copy import copy
from typing import Any

from torch import Tensor
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
    container of several), also in dicts, lists and tuples. States, which are long, are not looked into."""
    held, seen = list[Any]([optimizer]), set[int]()
    for one in held:  # which grows
        if id(one) not in seen:
            seen.add(id(one))
            parts = {**vars(one), "state": 0, "param_groups": 0} if isinstance(one, Optimizer) else one
            if isinstance(parts, dict | list | tuple):
                held += parts.values() if isinstance(parts, dict) else parts
    return list(dict.fromkeys(one for one in held if isinstance(one, Optimizer) and "state" in vars(one)))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers, with their paths: also of classes that torch's pytree takes for leaves."""
    if isinstance(value, tuple | MutableMapping | MutableSequence):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(part, f"{path}.{type(key).__name__ if isinstance(key, Tensor) else key}")
    else:
        yield path, value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of nested containers, of the same classes, with the results of ``function`` in place of their leaves."""
    if isinstance(value, tuple):
        parts = [mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not isinstance(value, MutableMapping | MutableSequence):
        return function(value)
    found = copy(value)
    for key in [*value] if isinstance(value, Mapping) else range(len(value)):
        found[key] = mapped(function, value[key])
    return found
