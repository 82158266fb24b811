"""A training loop of the user's own as host: one call averages the gradients, between backward and the optimizers."""

from typing import Any, cast

import torch
from torch import Tensor

from ..engine.arguments import refuse_flattened
from ..engine.dense import as_real, written_out
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.place import check_gradient
from ..engine.shards import is_sharded, local
from ..guards.averaging import refuse_ddp
from .nested import refuse_inside_backward
from .torch_host import LOOP, TorchHost


@modes_off
def average_gradients(compression: Any) -> None:
    """Averages the gradients of a compressor's parameters over the ranks, in ``.grad``.

    For a plain model, in place of DistributedDataParallel and its hook; also for one part of a model of which another
    part takes local steps (``docs/local_steps.md``). Nothing overlaps the backward pass. Call it on all ranks, once for
    each step of the optimizers, after the last backward pass and before gradients are unscaled or clipped.

    Example::

        compression = hvd_compress.Quantized(model, bits=8)  # after init_process_group()
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            hvd_compress.average_gradients(compression)
            optimizer.step()

    With FSDP2, which averages inside the shard group, the compressor averages over the replicas, as with
    :func:`hvd_compress.register_fsdp_hooks`.

    A missing gradient counts as zeros, and is the average afterwards, as with Horovod. Gradients should be None between
    steps (``zero_grad()`` does that). If the call fails, all ranks may repeat it: gradients that were taken are zero
    then, and in the residuals.

    Nothing else in the loop may differ between the ranks: do not clip by a norm to which gradients belong that are each
    rank's own. At step 0, 1, 10 and multiples of 100 some of the weights are compared, and a warning says if they have
    drifted apart.

    Args:
        compression: a compressor, built after ``init_process_group()`` (and after ``fully_shard()``).

    Raises:
        RuntimeError: the compressor is bound to Horovod or to a ``torchft.Manager``, or it belongs to
            :class:`~hvd_compress.LocalSteps`; its gradients come from a hook; a gradient is sparse; a gradient contains
            the last average, which it was added to, unless that does no harm; inside a backward pass.
        TypeError, ValueError: see :meth:`~hvd_compress.Compressor.compress`.
        ValueError: a DistributedDataParallel model or FSDP2 averages the gradients over the same ranks.
    """
    host = cast(TorchHost, compression.use(TorchHost))
    refuse_inside_backward(LOOP)
    engine = compression.engine
    if host.source is None:
        refuse_ddp(engine.parameters)
    host.take_from(LOOP)
    grads = {number: _gradient(engine, number) for number, p in enumerate(engine.parameters) if p.requires_grad}
    with host.inside():
        for number in reversed(grads):  # as backward makes them
            host.arrive(number, as_real(local(grads[number])))
        host.exchange()


def _gradient(engine: Engine, number: int) -> Tensor:
    """The gradient of a parameter, in ``.grad``; checked, before anything is sent."""
    parameter, name = engine.parameters[number], engine.names[number]
    grad = parameter.grad
    if grad is None:
        grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    refuse_flattened(name, parameter)
    if grad.is_sparse:
        raise RuntimeError(f"{name}: hvd_compress does not support sparse gradients with {LOOP}")
    parameter.grad = grad = grad.resolve_conj() if is_sharded(grad) else written_out(grad.resolve_conj())
    check_gradient(name, as_real(local(grad)), engine.place_of[number])
    return grad
