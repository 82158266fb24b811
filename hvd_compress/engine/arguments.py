"""Checks of the arguments that all compressors share."""

import operator
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

#: ``(name, parameter)`` pairs, or a model, whose named parameters they are.
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]] | torch.nn.Module

# Parts of names that torch.compile, activation checkpointing, FSDP1 and Lightning Fabric insert, and that are not in
# the state_dict() of the model.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}


def check_common(min_numel: int, bucket_mb: float, dense_values: str, grad_scaler: Any, start_timeout: float) -> None:
    """Raises ``ValueError`` or ``TypeError`` if an argument of :class:`hvd_compress.Compressor` is not allowed."""
    if bucket_mb <= 0:
        raise ValueError(f"bucket_mb must be above 0, got {bucket_mb}")
    if dense_values not in ("fp16", "fp32"):
        raise ValueError(f"dense_values must be fp16 or fp32, got {dense_values!r}")
    if not start_timeout > 0.0:
        raise ValueError(f"start_timeout must be above 0, got {start_timeout}")
    if min_numel < 1:
        raise ValueError(f"min_numel must be at least 1, got {min_numel}")
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {grad_scaler!r:.80}")


def integer_seed(seed: Any) -> int:
    """``seed`` as an int. Raises ``TypeError`` if it is not an integer."""
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an integer, the same on all ranks, got {seed!r:.80}") from None


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int. Raises ``TypeError`` if it is not an integer (a bool is none), ``ValueError`` if it is out
    of range."""
    allowed = f"at least {low}" if high is None else f"in {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, {allowed}, got {value!r:.80}")
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {allowed}, got {number}")
    return number


def check_fraction(name: str, value: float) -> None:
    """Raises ``ValueError`` if ``value`` is not in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def named_pairs(named_parameters: NamedParameters) -> list[tuple[str, torch.nn.Parameter]]:
    """The pairs as a list, by the names without wrappers (:func:`plain_names`). Raises ``TypeError`` if they are not
    ``(name, parameter)`` pairs, ``ValueError`` if there are none or a name or a parameter occurs twice."""
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    named = list(named_parameters)
    for item in named:
        if not (
            isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Tensor)
        ):
            raise TypeError(
                "named_parameters must yield (name, parameter) pairs, as model.named_parameters() does; "
                f"got {item!r:.80}"
            )
    if not named:
        raise ValueError(
            "named_parameters is empty (was the iterator used up? model.named_parameters() makes a new one)"
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(f"parameter names must be unique; more than once: {', '.join(duplicates)}")
    first: dict[int, str] = {}
    for name, parameter in named:
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise ValueError(f"{other} and {name} are one parameter; model.named_parameters() lists each once")
    return list(zip(plain_names([name for name, _ in named]), (parameter for _, parameter in named), strict=True))


def plain_names(names: list[str]) -> list[str]:
    """The names that parameters have in the model without wrappers, so that a state fits the model with and without
    them: without the parts that wrappers insert anywhere, then without ``module.`` at the beginning. A step that would
    make two names equal, or one empty, is left out, with those after it."""
    for strip in (_without_inserted, _without_module):
        stripped = [strip(name) for name in names]
        if not all(stripped) or len(set(stripped)) < len(names):
            break
        names = stripped
    return names


def find_name(name: str, names: Collection[str]) -> str | None:
    """Which of these plain names is meant by the name of a parameter in the model with or without wrappers; None if
    none is."""
    inner = _without_inserted(str(name))
    return next((found for found in (name, inner, _without_module(inner)) if found in names), None)


def _without_inserted(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _without_module(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
