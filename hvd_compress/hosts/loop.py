"""A training loop of the user's own as host: one call averages the gradients, between backward and the optimizers."""

from typing import Any, cast

import torch
from torch import Tensor

from ..engine.dense import DenseGradient, as_real
from ..engine.membership import Membership
from ..engine.modes import modes_off
from ..engine.shards import local
from .hooked import HookedHost
from .nested import refuse_inside_backward

_CALL = "average_gradients()"


@modes_off
def average_gradients(compression: Any) -> None:
    """Averages the gradients of a compressor's parameters over the ranks, in ``.grad``.

    For a plain model, in place of DistributedDataParallel and its hook, and for some parameters of a model whose others
    take local steps (``docs/many_ranks.md``). Nothing overlaps the backward pass. Call it on all ranks, once for each
    step of the optimizers, after the last backward pass and before gradients are unscaled or clipped.

    Example::

        compression = hvd_compress.Quantized(model, bits=8)  # after init_process_group()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            hvd_compress.average_gradients(compression)
            optimizer.step()

    With FSDP2, which averages inside the shard group, the compressor averages over the replicas, as with
    :func:`hvd_compress.register_fsdp_hooks`.

    A parameter without a gradient has zeros; its ``.grad`` stays None if no other rank has a gradient, either.

    Args:
        compression: a compressor, built after ``init_process_group()`` (and after ``fully_shard()``).

    Raises:
        RuntimeError: the compressor is bound to Horovod or to a ``torchft.Manager``, or it belongs to
            :class:`~hvd_compress.LocalSteps`; its gradients come by a hook; a gradient contains the last average, since
            it was not zeroed; inside a backward pass.
        ValueError: a DistributedDataParallel model or FSDP2 averages the gradients over the same ranks.
    """
    host = cast(HookedHost, compression.torch_host)
    refuse_inside_backward(_CALL)
    engine = compression.engine
    if isinstance(engine.collectives, Membership):
        raise RuntimeError(f"{_CALL} does not support a torchft.Manager: use ddp_hook or register_fsdp_hooks()")
    host.comes_by(_CALL)
    if not engine.peer.compared:
        host.check_loop()
    with engine.entered:
        try:
            _average(host, engine.parameters)
        except BaseException:
            host.step.reset()
            raise


def _average(host: HookedHost, parameters: list[torch.nn.Parameter]) -> None:
    dense, unused = list[DenseGradient](), list[tuple[torch.nn.Parameter, Tensor]]()
    for number in reversed(range(len(parameters))):  # as backward makes them
        parameter = parameters[number]
        if not parameter.requires_grad:
            continue
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter)
            unused.append((parameter, grad))
        arrived = host.step.arrive(number, as_real(local(grad)), parameter.grad)
        if isinstance(arrived, DenseGradient):
            dense.append(arrived)
    host.exchange(dense)
    for parameter, average in unused:
        if bool(local(average).any()):
            parameter.grad = average
