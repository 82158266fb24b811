"""Checks of arguments."""

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: An argument as the user has passed it: of any type.
Given: TypeAlias = Any
#: ``(name, parameter)`` pairs, or a model, of which the named parameters are meant.
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]] | torch.nn.Module

# Parts of names that torch.compile, checkpointing, FSDP1 and Fabric insert, and that the model's own names lack.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
_BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def check_integer(name: str, value: Given, low: int | None = None, high: int | None = None, *, other: str = "") -> int:
    """``value`` as an int, from ``low`` to ``high``; None is no limit. ``other``: what else is allowed, for errors.

    Raises ``TypeError`` if it is a bool, or no integer as ``operator.index`` defines it; ``ValueError`` out of range.
    """
    limits = "" if low is None else f", at least {low}" if high is None else f", {low} to {high}"
    allowed = f"an integer{limits}" + (f", or {other}" if other else "")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(_must_be(name, allowed, value)) from error
    if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise TypeError(_must_be(name, allowed, value))
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(_must_be(name, allowed, value))
    return number


def check_number(name: str, value: Given, *, infinite: bool = False, **bounds: float) -> float:
    """``value`` as a float, within ``bounds``: ``above``, ``at_least``, ``below``, ``at_most``.

    Raises ``TypeError`` if it is not a real number (strings, tensors and bools are none, NumPy's numbers are);
    ``ValueError`` out of range, for NaN, and for infinities unless ``infinite``.
    """
    words = " and ".join(f"{bound.replace('_', ' ')} {limit}" for bound, limit in bounds.items())
    allowed = ("a number" if infinite else "a finite number") + (f", {words}" if words else "")
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real:
        raise TypeError(_must_be(name, allowed, value))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    inside = all(_BOUNDS[bound](number, limit) for bound, limit in bounds.items())
    if math.isnan(number) or not inside or (math.isinf(number) and not infinite):
        raise ValueError(_must_be(name, allowed, value))
    return number


def check_flag(name: str, value: Given) -> bool:
    """``value`` as a bool. Raises ``TypeError`` if it is neither a bool nor 0 or 1: the string ``"False"`` is true."""
    try:
        known = value in {False, True}
    except TypeError:  # it has no hash
        known = False
    if not known:
        raise TypeError(_must_be(name, "True or False", value))
    return bool(value)


def _must_be(name: str, allowed: str, value: Given) -> str:
    return f"{name} must be {allowed}, got {value!r:.80}"


def named_pairs(named_parameters: NamedParameters, call: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The pairs as a list, with names as in the model without wrappers (:func:`plain_names`).

    Raises:
        TypeError: not ``(name, parameter)`` pairs; it shows the ``call`` to write.
        ValueError: there are none, a name or a parameter occurs twice, or FSDP1 has flattened a parameter.
    """
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    listed = isinstance(named_parameters, Iterable) and not isinstance(named_parameters, str | Mapping)
    named = list(named_parameters) if listed else []
    if wrong := [item for item in named if not _is_pair(item)] if listed else [named_parameters]:
        got = repr(wrong[0]) if isinstance(wrong[0], str | tuple) else type(wrong[0]).__name__
        raise TypeError(f"named_parameters must be the model or (name, parameter) pairs: write {call}; got {got:.80}")
    if not named:
        raise ValueError("named_parameters is empty: was the iterator used up? Give the model")
    if duplicates := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise ValueError(f"parameter names must be unique; more than once: {', '.join(sorted(duplicates))}")
    first: dict[int, str] = {}
    for name, parameter in named:
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise ValueError(f"{other} and {name} are one parameter; model.named_parameters() lists each once")
        refuse_flattened(name, parameter)
    return list(zip(plain_names([name for name, _ in named]), (parameter for _, parameter in named), strict=True))


def refuse_flattened(name: str, parameter: Tensor) -> None:
    """Raises ``ValueError`` for a parameter that FSDP1 has flattened: ranks have other parts, maybe of one shape."""
    if getattr(parameter, "_fsdp_flattened", False):
        raise ValueError(
            f"{name} belongs to FSDP1 (FullyShardedDataParallel), which is not supported: shard the model by "
            "torch.distributed.fsdp.fully_shard()"
        )


def _is_pair(item: object) -> bool:
    if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
        return False
    # What a state_dict() has are tensors without gradients.
    return isinstance(item[1], torch.nn.Parameter) or (isinstance(item[1], Tensor) and item[1].requires_grad)


def plain_names(names: list[str]) -> list[str]:
    """The names that the parameters have in the model without wrappers, so that a state fits the model with and without
    them. First the parts that wrappers insert anywhere are removed, then ``module.`` at the beginning; not if two names
    became equal, or one empty."""
    for strip in (_without_inserted, _without_module):
        stripped = [strip(name) for name in names]
        if not all(stripped) or len(set(stripped)) < len(names):
            break
        names = stripped
    return names


def find_name(name: str, names: Collection[str]) -> str | None:
    """The one of ``names``, all plain, of a parameter called ``name`` in the model, in wrappers or not; or None."""
    inner = _without_inserted(str(name))
    return next((found for found in (name, inner, _without_module(inner)) if found in names), None)


def _without_inserted(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _without_module(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
