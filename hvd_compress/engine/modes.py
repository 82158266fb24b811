"""Turns off torch's modes that would change the state and the results of a compressor.

Autocast rounds matrix products, inference mode makes tensors that no later step may write to, and autograd records the
step. They are off wherever the package is entered, and ``torch.compile`` of the caller leaves the package out. The
default dtype and device have no effect: every tensor is made with a dtype and a device (``tests/test_rooms.py``).
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Where the operators run.
_DEVICES = ("cpu", "cuda")
# torch.set_grad_enabled() makes an object.
_set_grad = torch._C._set_grad_enabled
_grad_on = partial(_set_grad, True)


def turn_off() -> Callable[[], object] | None:
    """Turns autocast, inference mode and autograd off in this thread. Returns a function that turns on again those that
    were on; None if none was. Used for every gradient, so it must cost little."""
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICES)):
        return _turn_all_off()
    if torch.is_grad_enabled():  # in backward's hooks it is not
        _set_grad(False)
        return _grad_on
    return None


def _turn_all_off() -> Callable[[], object]:
    stack = ExitStack()
    if torch.is_inference_mode_enabled():  # first: it turns autograd on
        stack.enter_context(torch.inference_mode(False))
    for device in filter(torch.is_autocast_enabled, _DEVICES):
        torch.set_autocast_enabled(device, False)  # faster than torch.autocast
        stack.callback(torch.set_autocast_enabled, device, True)
    stack.callback(_set_grad, torch.is_grad_enabled())
    _set_grad(False)
    return stack.close


def modes_off(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates ``function`` so that the modes are off in it, and ``torch.compile`` does not trace it."""

    @torch._disable_dynamo  # torch.compiler.disable imports Dynamo at once: 2 seconds
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        turn_on = turn_off()
        try:
            return function(*args, **kwargs)
        finally:
            if turn_on is not None:
                turn_on()

    return wrapped
