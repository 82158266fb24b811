"""The communication hook of a DistributedDataParallel model that a trainer has built.

DDP takes one hook, and its model may be trained several times: the state of the hook says who exchanges gradients now.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .ddp import DDPHost, ddp_hook
from .living import living


class GradientHook:
    """The state of the hook of one DDP model.

    Args:
        ddp: the model. While the gradients stay local, it is as in ``no_sync()``, and broadcasts no buffers. Where the
            program ends that (nanoGPT, Lightning's manual optimization), the hook returns the rank's own gradients.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._compression: Any = None
        self._broadcasts = ddp.broadcast_buffers
        ddp.register_comm_hook(self, _hook)

    @property
    def local(self) -> bool:
        """Whether the gradients stay local."""
        return self._compression is None

    @property
    def ddp_host(self) -> DDPHost:
        """For :func:`~hvd_compress.hosts.ddp.ddp_hook`."""
        host: DDPHost = self._compression.ddp_host
        return host

    def use(self, compression: Any, ddp: DistributedDataParallel) -> None:
        """From now on gradients are exchanged by a compressor, or, of None, by nobody."""
        self._compression = compression
        ddp.broadcast_buffers = self._broadcasts and not self.local
        ddp.require_backward_grad_sync = not self.local


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


def use_hook(model: torch.nn.Module, compression: Any) -> bool:
    """Registers the hook on all DDP models that hold parameters of ``model``, and gives it a compressor, or None.
    Returns whether there are any. Raises ``ValueError`` if one of them has another hook."""
    found = ddp_models(model.parameters())
    for ddp in found:
        hooks = [state for _, state in getattr(ddp, "_comm_hooks", ())]
        if hooks and not isinstance(hooks[0], GradientHook):
            raise ValueError(
                "the DistributedDataParallel model has a communication hook already, and takes only one: remove "
                "register_comm_hook(), ddp_comm_hook= (Lightning) or comm_hook= (Accelerate)"
            )
        (hooks[0] if hooks else GradientHook(ddp)).use(compression, ddp)
    return bool(found)


def ddp_models(parameters: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DDP models that hold one of the parameters."""
    ids = {id(p) for p in parameters}
    return [ddp for ddp in living(DistributedDataParallel) if any(id(p) in ids for p in ddp.parameters())]


def averages(ddp: DistributedDataParallel) -> bool:
    """Whether a DDP model averages gradients in its next backward pass."""
    local = any(isinstance(state, GradientHook) and state.local for _, state in getattr(ddp, "_comm_hooks", ()))
    return ddp.require_backward_grad_sync and not local


def _hook(state: GradientHook, bucket: GradBucket) -> Future[Tensor]:
    if not state.local:
        return ddp_hook(state, bucket)
    buffer = bucket.buffer()
    future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
    future.set_result(buffer)
    return future
