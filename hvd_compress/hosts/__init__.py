"""Hosts, which pass gradients in: Horovod, torch DistributedDataParallel or FSDP2."""

from typing import Any

from ..engine.engine import Engine
from ..engine.shards import is_sharded
from ..gradients.step import GradScaler
from .ddp import DDPHost
from .fsdp import FSDPHost
from .horovod import HorovodHost


def host_of(engine: Engine, grad_scaler: GradScaler | None) -> DDPHost | FSDPHost | HorovodHost:
    """The host's side of an engine. ``grad_scaler``: a ``torch.amp.GradScaler``, or None."""
    if any(map(is_sharded, engine.parameters)):
        return FSDPHost(engine, grad_scaler)
    return DDPHost(engine, grad_scaler) if engine.collectives.ordered else HorovodHost(engine, grad_scaler)
