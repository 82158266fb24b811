"""``torch.distributed`` as the carrier of bytes.

It matches collectives by the order of the calls, which must not depend on timing.
"""

import math

import torch
from torch import Tensor, distributed

from ..engine.collectives import Handle, HostName, Request
from ..engine.registry import Registry
from .polling import wait_until

_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13


def backends() -> list[str]:
    """The backends that this torch can use here."""
    if not distributed.is_available():
        return []
    found = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
    found |= {"mpi": distributed.is_mpi_available, "ucc": distributed.is_ucc_available}
    return [name for name, available in found.items() if available()]


class _TorchHandle:
    def __init__(self, work: distributed.Work, output: Tensor, on_stream: bool) -> None:
        self._work, self._output, self._on_stream = work, output, on_stream

    def done(self) -> bool:
        # NCCL: waiting blocks the stream, not the host. Gloo: completion depends on timing, which differs between ranks
        # and must not decide the order of collectives.
        return self._on_stream

    def result(self, timeout: float = math.inf) -> Tensor:
        if not math.isinf(timeout):
            wait_until(self._work.is_completed, timeout, "torch.distributed")
        self._work.wait()
        return self._output


class TorchCollectives:
    """``torch.distributed`` on a process group (default: the whole world)."""

    host: HostName = "ddp"
    ordered = True
    active = True

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        self.group = distributed.group.WORLD if process_group is None else process_group
        if distributed.get_rank(self.group) < 0:
            raise ValueError("this process is not in process_group")

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group)

    @property
    def size(self) -> int:
        return distributed.get_world_size(self.group)

    def generation(self) -> object:
        return self.group

    def registry(self) -> Registry:
        return Registry()  # collectives have no names

    def start(self, request: Request, name: str) -> Handle:
        tensor = request.tensor
        if request.verb == "allreduce":
            output = tensor.clone()
            work = distributed.all_reduce(output, group=self.group, async_op=True)
        elif request.verb == "allgather":
            output = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
            work = _all_gather(output, tensor, group=self.group, async_op=True)
        else:
            output = torch.empty_like(tensor)
            work = distributed.all_to_all_single(output, tensor, group=self.group, async_op=True)
        assert work is not None
        return _TorchHandle(work, output, output.is_cuda and "nccl" in distributed.get_backend(self.group))
