"""Whether a backward pass is running, and those inside another one, as of reentrant checkpointing."""

import sys
from types import FrameType
from typing import cast

import torch
from torch.autograd.function import BackwardCFunction


def backward_depth() -> int:
    """The number of Python autograd functions whose backward is running in this thread, one inside the other."""
    depth, frame = 0, cast(FrameType | None, sys._getframe())
    while frame is not None:
        depth += frame.f_code is BackwardCFunction.apply.__code__
        frame = frame.f_back
    return depth


def refuse_inside_backward(call: str) -> None:
    """Raises ``RuntimeError`` inside a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"{call} inside a backward pass, whose gradients would be averaged in part: call it after")
