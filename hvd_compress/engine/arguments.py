"""What every compressor is given: checked before anything is built from it."""

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def whole_number(seed: Any) -> int:
    """A seed. Raises ``TypeError`` for what is none."""
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be a whole number, the same on all ranks, got {seed!r:.80}") from None


def named_pairs(named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
    """All of them. Raises ``TypeError`` where they are not pairs, ``ValueError`` where there are none, or one twice."""
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
    count = Counter(name for name, _ in named)
    twice = sorted(name for name in count if count[name] > 1)
    if twice:
        raise ValueError(f"parameter names must be unique; more than once: {', '.join(twice)}")
    first: dict[int, str] = {}
    for name, parameter in named:
        other = first.setdefault(id(parameter), name)
        if other != name:
            raise ValueError(f"{other} and {name} are one parameter; model.named_parameters() lists each once")
    return named
