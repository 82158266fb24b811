"""The communication hook of a DistributedDataParallel model that a trainer has built.

DDP takes one hook, and its model may be trained several times: the state of the hook says who exchanges gradients now.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .ddp import DDPHost, ddp_hook
from .living import living


class GradientHook:
    """The state of the hook of one DDP model.

    Args:
        ddp: the model. While each rank keeps its own gradients, it is as in ``no_sync()``, and broadcasts no buffers.
            Where the program ends that (nanoGPT, Lightning's manual optimization), the hook returns the rank's own
            gradients.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        #: Whether each rank keeps its own gradients.
        self.own = False
        self._compression: Any = None
        self._broadcasts = ddp.broadcast_buffers
        self._use: object = None
        self._ddp = weakref.ref(ddp)
        ddp.register_comm_hook(self, _hook)

    @property
    def compresses(self) -> bool:
        """Whether a compressor exchanges the gradients."""
        return self._compression is not None

    @property
    def process_group(self) -> Any:
        """That of the model."""
        ddp = self._ddp()
        return None if ddp is None else ddp.process_group

    @property
    def ddp_host(self) -> DDPHost:
        """For :func:`~hvd_compress.hosts.ddp.ddp_hook`."""
        host: DDPHost = self._compression.ddp_host
        return host

    def use(self, compression: Any) -> Callable[[], None]:
        """From now on gradients are exchanged by a compressor, or, of None, by nobody.

        Returns a function that lets DDP average them again. It does nothing after another call of ``use()``.
        """
        use = object()
        self._set(use, compression, own=compression is None)

        def end() -> None:
            if self._use is use:
                self._set(None, None, own=False)

        return end

    def _set(self, use: object, compression: Any, *, own: bool) -> None:
        self._use, self._compression, self.own = use, compression, own
        ddp = self._ddp()
        if ddp is not None:
            ddp.broadcast_buffers = self._broadcasts and not own
            # A static graph's backward passes must all be synchronised, or torch asserts: there the hook does it alone.
            ddp.require_backward_grad_sync = ddp.static_graph or not own


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


def use_hook(model: torch.nn.Module, compression: Any) -> list[Callable[[], None]]:
    """Registers the hook on all DDP models that hold parameters of ``model``, and gives it a compressor, or None.
    Returns what :meth:`GradientHook.use` returns, of each of them. Raises ``ValueError`` if one has another hook."""
    ends = []
    for ddp in ddp_models(model.parameters()):
        hooks = [state for _, state in getattr(ddp, "_comm_hooks", ())]
        if hooks and not isinstance(hooks[0], GradientHook):
            raise ValueError(
                "the DistributedDataParallel model has a communication hook already, and takes only one: remove "
                "register_comm_hook(), ddp_comm_hook= (Lightning) or comm_hook= (Accelerate)"
            )
        ends.append((hooks[0] if hooks else GradientHook(ddp)).use(compression))
    return ends


def ddp_models(parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DDP models that hold one of the parameters, and do not ignore it."""
    ids = {id(p) for p in parameters}

    def holds(ddp: DistributedDataParallel) -> bool:
        return any(id(p) in ids for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore)

    return [ddp for ddp in living(DistributedDataParallel) if holds(ddp)]


def averages(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP model averages gradients in its next backward pass."""
    own = any(isinstance(state, GradientHook) and state.own for _, state in getattr(ddp, "_comm_hooks", ()))
    return ddp.require_backward_grad_sync and not own


def _hook(state: GradientHook, bucket: GradBucket) -> Future[Tensor]:
    if state.compresses:
        return ddp_hook(state, bucket)
    if not state.own:
        return allreduce_hook(state.process_group, bucket)
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
    future.set_result(buffer)
    return future
