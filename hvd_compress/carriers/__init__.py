"""Carriers of the bytes of exchanges: Horovod, torch.distributed, torchft, threads (for tests), and simulated ranks."""

import sys
from contextvars import ContextVar
from typing import Any

from ..engine.collectives import Collectives
from .horovod import HorovodCollectives
from .threads import ThreadWorld
from .torch_collectives import TorchCollectives
from .torchft import TorchftCollectives, is_manager

#: Whether without a host this process is the only rank: trainers initialise torch.distributed if there are several.
one_rank_without_host = ContextVar("one_rank_without_host", default=False)


def default_collectives(process_set: Any, process_group: Any) -> Collectives:
    """The collectives of Horovod, if it is initialised or a ``process_set`` is given, or of torch.distributed, likewise
    with a ``process_group``. Raises ``ValueError`` if both are given, or none is and not exactly one is initialised."""
    if process_set is not None and process_group is not None:
        raise ValueError("give process_set= (Horovod) or process_group= (torch DDP), not both")
    from torch import distributed

    # Not imported here: a program that has initialised Horovod has imported it.
    hvd = sys.modules.get("horovod.torch")
    horovod = hvd is not None and hvd.is_initialized()
    ddp = distributed.is_available() and distributed.is_initialized()
    if process_set is None and process_group is None and horovod == ddp:
        if one_rank_without_host.get() and not ddp:
            return ThreadWorld(1).collectives(0)
        raise ValueError(
            "both Horovod and torch.distributed are initialised: say which one calls this compressor with "
            "process_set=hvd.global_process_set or process_group=torch.distributed.group.WORLD"
            if ddp
            else "build the compressor after hvd.init() (Horovod) or torch.distributed.init_process_group() (DDP)"
        )
    if is_manager(process_group):
        return TorchftCollectives(process_group)
    if type(process_group).__name__ == "ManagedProcessGroup":
        raise ValueError("torchft's ranks come and go: give its Manager, process_group=manager, not a process group")
    if process_group is not None or (ddp and process_set is None):
        return TorchCollectives(process_group)
    return HorovodCollectives(process_set)
