"""Checks of arguments."""

import inspect
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

#: An argument as the user has passed it: of any type.
Given: TypeAlias = Any
#: ``(name, parameter)`` pairs, or a model, of which the named parameters are meant.
NamedParameters = Iterable[tuple[str, torch.nn.Parameter]] | torch.nn.Module

# Parts of names that torch.compile, activation checkpointing, FSDP1 and Lightning Fabric insert, and that are not in
# the state_dict() of the model.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}


def check_integer(name: str, value: Given, low: int | None = None, high: int | None = None, *, other: str = "") -> int:
    """``value`` as an int, in [low, high].

    Args:
        name: of the argument, for errors.
        low, high: the range; without ``high``, or both, it has no limit.
        other: what is allowed besides an integer, for errors.

    Raises:
        TypeError: not an integer, as ``operator.index`` defines it; a bool is none.
        ValueError: out of range.
    """
    allowed = "" if low is None else _at_least(low) if high is None else f"in {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
        raise TypeError(_must(name, _comma("be an integer", allowed), other, f"{value!r:.80}"))
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(_must(name, _verb(allowed), other, str(number)))
    return number


def check_number(
    name: str,
    value: Given,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    infinite: bool = False,
    other: str = "",
) -> float:
    """``value`` as a float, in a range.

    Args:
        name: of the argument, for errors.
        above, at_least: the lower bound, open or closed, at most one of both.
        below, at_most: the upper bound, open or closed, beside a lower one.
        infinite: whether infinities are allowed.
        other: what is allowed besides a number, for errors.

    Raises:
        TypeError: not a real number; strings, tensors and bools are none, NumPy's numbers are.
        ValueError: out of range, NaN or infinite.
    """
    low, high = at_least if above is None else above, at_most if below is None else below
    left, right = "[" if above is None else "(", "]" if below is None else ")"
    if high is not None:
        allowed = f"in {left}{low}, {high}{right}"
    else:
        allowed = f"above {low}" if above is not None else "" if low is None else _at_least(low)
    known = isinstance(value, Real) and not isinstance(value, bool)
    if not known:
        raise TypeError(_must(name, _comma("be a number", allowed), other, f"{value!r:.80}"))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    inside = (low is None or number > low or number == at_least) and (
        high is None or number < high or number == at_most
    )
    if math.isnan(number) or not inside:
        raise ValueError(_must(name, _verb(allowed or "a number"), other, str(number)))
    if math.isinf(number) and not infinite:
        raise ValueError(_must(name, "be finite", other, str(number)))
    return number


def check_fraction(name: str, value: Given) -> float:
    """:func:`check_number` in [0, 1]."""
    return check_number(name, value, at_least=0, at_most=1)


def check_flag(name: str, value: Given) -> bool:
    """``value`` as a bool. Raises ``TypeError`` if it is neither a bool nor 0 or 1: the string ``"False"`` is true."""
    try:
        known = value in {False, True}
    except TypeError:  # it has no hash
        known = False
    if not known:
        raise TypeError(_must(name, "be True or False", "", f"{value!r:.80}"))
    return bool(value)


def _at_least(low: float) -> str:
    return f"at least {low}" if low else "not negative"


def _verb(allowed: str) -> str:
    if allowed == "not negative":
        return "not be negative"
    return f"lie {allowed}" if allowed.startswith("in ") else f"be {allowed}"


def _comma(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _must(name: str, what: str, other: str, got: str) -> str:
    return f"{name} must {_comma(what, other and f'or {other}')}, got {got}"


def by_name(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates ``function`` so that too many positional arguments raise a ``TypeError`` that shows the call to
    write."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = next((f"{p.name}=..." for p in parameters if p.kind is p.KEYWORD_ONLY), "...")
    bound = int(places[:1] == ["self"])

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(places):
            name = type(args[0]).__name__ if bound else function.__name__
            most = len(places) - bound
            raise TypeError(
                f"{name} takes {most} argument{'s' * (most != 1)} by position, got {len(args) - bound}: give others by "
                f"name, as {name}({', '.join([*places[bound:], named])})"
            )
        return function(*args, **kwargs)

    return wrapped


def named_pairs(named_parameters: NamedParameters, call: str) -> list[tuple[str, torch.nn.Parameter]]:
    """The pairs as a list, with names as in the model without wrappers (:func:`plain_names`).

    Raises:
        TypeError: not ``(name, parameter)`` pairs; it shows the ``call`` to write.
        ValueError: there are none, a name or a parameter occurs twice, or FSDP1 has flattened a parameter.
    """
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    named, wrong = list[tuple[str, torch.nn.Parameter]](), list[object]()
    if isinstance(named_parameters, str | Mapping) or not isinstance(named_parameters, Iterable):
        wrong = [named_parameters]
    else:
        named = list(named_parameters)
        wrong = [item for item in named if not _is_pair(item)]
    if wrong:
        got = repr(wrong[0]) if isinstance(wrong[0], str | tuple) else type(wrong[0]).__name__
        raise TypeError(
            "named_parameters must be the model or (name, parameter) pairs, as model.named_parameters() yields: write "
            f"{call}; got {got:.80}"
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
        refuse_flattened(name, parameter)
    return list(zip(plain_names([name for name, _ in named]), (parameter for _, parameter in named), strict=True))


def refuse_flattened(name: str, parameter: Tensor) -> None:
    """Raises ``ValueError`` for a parameter that FSDP1 has flattened: each rank has another part of it, maybe of one
    shape."""
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
    """The one of ``names``, which are plain, that belongs to the parameter called ``name`` in the model with or without
    wrappers; None if there is none."""
    inner = _without_inserted(str(name))
    return next((found for found in (name, inner, _without_module(inner)) if found in names), None)


def _without_inserted(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _without_module(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
