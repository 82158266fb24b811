"""torch's modes, which a caller may have turned on and which would change the state and the results of a compressor.

Autocast rounds matrix products, inference mode makes tensors that no later step may write to, and autograd records the
step. They are off wherever the package is entered. The default dtype and the default device have no effect either:
every tensor is made with its own (``tests/test_rooms.py``).
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Where the operators run.
_DEVICES = ("cpu", "cuda")


class TurnedOff:
    """Modes that :func:`turn_off` has turned off in this thread."""

    def __init__(self) -> None:
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:  # first: it turns autograd on
            self._inference.__enter__()
        self._autocast = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        for device in self._autocast:
            torch.set_autocast_enabled(device, False)
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def turn_on(self) -> None:
        torch.set_grad_enabled(self._grad)
        for device in self._autocast:
            torch.set_autocast_enabled(device, True)
        if self._inference is not None:
            self._inference.__exit__(None, None, None)


def turn_off() -> TurnedOff | None:
    """Turns autocast, inference mode and autograd off; None if none was on. Used for every gradient, so it must cost
    little, in backward's hooks above all, where usually none is on."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICES)):
        return TurnedOff()
    return None


def modes_off(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: the modes are off in ``function``."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        off = turn_off()
        try:
            return function(*args, **kwargs)
        finally:
            if off is not None:
                off.turn_on()

    return wrapped
