"""Who calls the engine: Horovod, torch DistributedDataParallel or FSDP2."""

from ..engine.engine import Engine
from ..engine.shards import is_sharded
from .ddp import DDPHost
from .fsdp import FSDPHost
from .horovod import HorovodHost


def host_of(engine: Engine) -> DDPHost | FSDPHost | HorovodHost:
    """The host's side of an engine."""
    if any(map(is_sharded, engine.parameters)):
        return FSDPHost(engine)
    return DDPHost(engine) if engine.collectives.host == "ddp" else HorovodHost(engine)
