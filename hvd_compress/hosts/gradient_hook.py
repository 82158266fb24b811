"""The communication hook of a DistributedDataParallel model that a trainer has built.

DDP takes one hook, and its model may be trained several times: the state of the hook says who exchanges gradients now.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..guards.averaging import DDPState, ddp_models

#: Exchanges the gradients of a bucket of DDP.
Exchange = Callable[[GradBucket], Future[Tensor]]


class GradientHook(DDPState):
    """The state of the hook of one DDP model.

    Args:
        ddp: the model. While each rank keeps its own gradients, its forward passes are as in ``no_sync()``, and
            broadcast no buffers. Where the program prepares a backward pass itself (Lightning's manual optimization),
            the hook returns the rank's own gradients.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        # What exchanges gradients, or None for gradients of each rank's own, and whether that still holds.
        self._use: tuple[Exchange | None, Callable[[], bool]] | None = None
        self._ddp = weakref.ref(ddp)
        # DDP's own flags outside of a forward pass.
        self._flags: tuple[bool, bool] | None = None
        ddp.register_comm_hook(self, GradientHook.exchange)
        ddp.register_forward_pre_hook(self._begin_forward)
        ddp.register_forward_hook(self._end_forward, always_call=True)

    @property
    def own(self) -> bool:
        """Whether each rank keeps its own gradients."""
        return self._use is not None and self._use[0] is None

    def end(self) -> None:
        self._use = None

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """The communication hook of the model."""
        ddp, buffer = self._ddp(), bucket.buffer()
        if self._use is None:
            return allreduce_hook(None if ddp is None else ddp.process_group, bucket)  # type: ignore[arg-type]
        if self._use[0] is not None:
            return self._use[0](bucket)
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        future.set_result(buffer)
        return future

    def use(self, exchange: "Exchange | None", lasts: Callable[[], bool] = lambda: True) -> Callable[[], None]:
        """Lets ``exchange`` exchange the gradients from now on; without it each rank keeps its own. Ends when
        ``lasts()`` is false, which is asked before each forward pass of a training, to which all ranks come.

        Returns a function that lets DDP average them again. It does nothing after another call of ``use()``.
        """
        self._use = use = (exchange, lasts)

        def end() -> None:
            if self._use is use:
                self._use = None

        return end

    def _begin_forward(self, ddp: Any, inputs: object) -> None:
        if self._use is not None and ddp.training and torch.is_grad_enabled() and not self._use[1]():
            self._use = None
        if self.own:
            self._flags = ddp.require_backward_grad_sync, ddp.broadcast_buffers
            # A static graph's backward passes must all be synchronised, or torch asserts: there the hook does it alone.
            _set_flags(ddp, ddp.static_graph, False)

    def _end_forward(self, ddp: Any, inputs: object, outputs: object) -> None:
        flags, self._flags = self._flags, None
        if flags is not None:
            _set_flags(ddp, *flags)


def local_gradients(model: torch.nn.Module) -> None:
    """Leaves each rank its own gradients and buffers under DistributedDataParallel, for local steps in a program that
    wraps its model anyway.

    Without it, DDP averages the gradients in each step, and :class:`~hvd_compress.LocalSteps` raises an error. DDP
    still gives all ranks rank 0's weights when it is built.

    Example::

        model = DistributedDataParallel(model)
        hvd_compress.trainers.local_gradients(model)
        local = hvd_compress.recipes.low_bit(model.module, optimizer)

    Args:
        model: the DDP model.

    Raises:
        ValueError: the model is not in DDP, or has a communication hook already.
    """
    if not use_hook(model, None):
        raise ValueError(
            f"local_gradients() takes a model in DistributedDataParallel, got {type(model).__name__}, whose gradients "
            "nothing averages"
        )


def use_hook(model: torch.nn.Module, *use: Any) -> list[Callable[[], None]]:
    """Registers the hook on the DDP models in ``model``, or else on all that hold parameters of it, and calls
    :meth:`GradientHook.use`.

    Returns what that returns, of each of them. Raises ``ValueError`` if one has another hook."""
    ends, inside = [], [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for ddp in inside or ddp_models(model.parameters()):
        hooks = [state for _, state in getattr(ddp, "_comm_hooks", ())]
        if hooks and not isinstance(hooks[0], GradientHook):
            raise ValueError(
                "the DistributedDataParallel model has a communication hook already, and takes only one: remove "
                "register_comm_hook(), ddp_comm_hook= (Lightning) or comm_hook= (Accelerate)"
            )
        ends.append((hooks[0] if hooks else GradientHook(ddp)).use(*use))
    return ends


def _set_flags(ddp: DistributedDataParallel, synchronises: bool, broadcasts: bool) -> None:
    ddp.require_backward_grad_sync, ddp.broadcast_buffers = synchronises, broadcasts
