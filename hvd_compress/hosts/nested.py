"""Whether a backward pass is running, and those inside another one, as of reentrant checkpointing."""

import sys
from traceback import walk_stack

import torch
from torch.autograd.function import BackwardCFunction


def backward_depth() -> int:
    """The number of Python autograd functions whose backward is running in this thread, one inside the other."""
    return sum(frame.f_code is BackwardCFunction.apply.__code__ for frame, _ in walk_stack(sys._getframe()))


def refuse_inside_backward(call: str) -> None:
    """Raises ``RuntimeError`` inside a backward pass."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"{call} inside a backward pass, whose gradients would be averaged in part: call it after")
