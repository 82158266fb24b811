"""Horovod as host: its compressor protocol on one side, the engine on the other.

Horovod calls ``compress(p.grad)`` from the backward hooks, in an order that differs between ranks, and ``decompress``
only after every gradient of the step has passed through ``compress``. Nothing in ``compress`` may wait.
"""

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..carriers.horovod import HorovodCollectives, averaging_device, second_reference
from ..engine.dense import DenseGradient, as_real, written_out
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.place import Place
from ..gradients.step import GradientStep, GradScaler
from ..guards.averaging import was_given
from .lookup import GradientLookup


class HorovodHost(GradientStep):
    """``compress`` and ``decompress`` of one compressor, for ``horovod.torch.DistributedOptimizer``."""

    #: What the compressor is bound to, for errors.
    bound = (
        "is bound to Horovod: for DistributedDataParallel build it with process_group=, or in a program that "
        "initialises torch.distributed only"
    )
    #: Horovod's optimizer and the one that it wraps count as one.
    single, _averages_dense = True, True

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        super().__init__(engine, grad_scaler)
        self._lookup = GradientLookup(engine.parameters)
        self._nothing = cache(_nothing)
        self._references: list[Tensor] = []

    @modes_off
    def compress(self, tensor: Tensor) -> tuple[Tensor, Place | DenseGradient | None]:
        """See :meth:`hvd_compress.Compressor.compress`."""
        engine = self._engine
        with engine.entered:
            number = self._lookup.find(tensor)
            if number is None:
                self._explain(tensor)
                return tensor.contiguous(), None
            arrived = self.arrive(number, as_real(written_out(tensor.resolve_conj())))
            if isinstance(arrived, DenseGradient):
                payload = arrived.payload.detach().to(averaging_device(tensor.device))
                self._references.append(second_reference(payload))
                return payload, arrived
            return self._nothing(averaging_device(tensor.device))[0], arrived

    @modes_off
    def decompress(self, tensor: Tensor, ctx: Place | DenseGradient) -> Tensor:
        """See :meth:`hvd_compress.Compressor.decompress`."""
        engine = self._engine
        with engine.entered:
            if self.collecting:
                self.finish()
                self._lookup.clear()
                self._references.clear()
            if isinstance(ctx, Place):
                return ctx.work.bucket.result(ctx.index)
            ctx.store(tensor, engine.method)
            parameter = engine.parameters[cast(int, ctx.number)]
            if not parameter.is_complex():
                return ctx.grad
            average = torch.view_as_complex(ctx.grad)
            # Horovod keeps a lazy conjugation of p.grad, which copy_() follows.
            given = parameter.grad
            return given.copy_(average) if given is not None and given.is_conj() else average

    @property
    def alone(self) -> bool:
        """Whether this process exchanges nothing: no other rank, or not in the process set."""
        return not self._engine.collectives.active

    @property
    def active(self) -> bool:
        return not self.alone

    def check_optimizer(self, optimizer: Optimizer, bypassed: Callable[[], bool]) -> None:
        """Checks ``DistributedOptimizer`` only. Raises ``ValueError`` for an op or a process set that does not fit,
        ``RuntimeError`` if the step would exchange averages. Warns if it applies gradients and none has passed through
        this compressor."""
        given = was_given(optimizer, self._engine.method)
        if given is None:
            return  # such as the optimizer that Horovod's wraps
        if isinstance(self._engine.collectives, HorovodCollectives):
            self._engine.collectives.check_optimizer(optimizer)
        exchanged = getattr(optimizer, "_synchronized", False) and getattr(optimizer, "_should_synchronize", True)
        if given and exchanged and not (self._engine.method.traits.linear or self._lookup.accumulated):
            grads = [p.grad for p in self._engine.parameters if p.grad is not None]
            if any(bool(grad.any()) for grad in grads):  # of which Horovod only warns
                raise RuntimeError(
                    "this step would exchange the last averages again, and with "
                    f"{type(self._engine.method).__name__} they would count twice: after optimizer.synchronize(), step "
                    "within optimizer.skip_synchronize(); if the gradients are new ones, which backward() has not "
                    "accumulated, call optimizer.synchronize() for them first"
                )
        if not given and bypassed():
            self._engine.warn(
                "DistributedOptimizer was not given this compressor, which has received no gradient: pass compression="
            )

    def _explain(self, tensor: Tensor) -> None:
        """Warns of a tensor that belongs to no parameter, and counts its bytes if a step is in progress."""
        engine = self._engine
        if self._lookup.is_parameter(tensor):
            engine.warn("Adasum passes parameters, not gradients: they are sent uncompressed")
        elif self.collecting:
            engine.warn(
                f"a gradient of shape {tuple(tensor.shape)} belongs to none of this compressor's parameters and is "
                "sent uncompressed; give the compressor all of the optimizer's named parameters"
            )
            engine.stats.count_dense(tensor.numel(), tensor.nbytes, engine.collectives.size, engine.nodes.ranks)


def _nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    """An empty tensor, for Horovod to reduce under a gradient's name, and a second reference to it."""
    empty = torch.empty(0, dtype=torch.float32, device=device)
    return empty, second_reference(empty)
