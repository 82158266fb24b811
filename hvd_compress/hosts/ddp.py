"""torch DistributedDataParallel as host: its communication hook on one side, the engine on the other.

DDP calls the hook once per DDP bucket, with the same buckets in the same order on all ranks; DDP's buckets are not the
engine's. torch.distributed matches collectives by the order of the calls, which must not depend on timing:

- Gloo: a bucket's first collective starts when its last gradient arrives, the others in the last hook of the step, one
  per exchange in turn.
- NCCL, where waiting blocks a stream, not the host: the whole exchange runs when the last gradient arrives, on a side
  stream.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket
from torch.futures import Future
from torch.optim import Optimizer

from ..engine.bucket import is_dense
from ..engine.collectives import Handle, Request, allreduce
from ..engine.dense import DenseGradient
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.profiling import stage
from .polling import wait_until

_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13


def backends() -> list[str]:
    """The backends that this torch can use here."""
    if not distributed.is_available():
        return []
    found = {"gloo": distributed.is_gloo_available, "nccl": distributed.is_nccl_available}
    found |= {"mpi": distributed.is_mpi_available, "ucc": distributed.is_ucc_available}
    return [name for name, available in found.items() if available()]


def ddp_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook for ``DistributedDataParallel.register_comm_hook(compression, ddp_hook)``.

    Args:
        state: a compressor, such as :class:`hvd_compress.IWP`, built after ``init_process_group()`` from the model's
            named parameters.
        bucket: passed by DDP.

    Raises:
        RuntimeError: the compressor is bound to Horovod, or the model is in ``join()``.
    """
    return cast(DDPHost, state.ddp_host).hook(bucket)


#: A parameter, its gradient before DDP's callback and that tensor's version, and the averaged gradient.
_Result = tuple[Tensor, Tensor | None, int, Tensor]


class DDPHost:
    """The hook of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = {id(parameter): number for number, parameter in enumerate(engine.parameters)}
        self._futures: list[tuple[Future[Tensor], Tensor]] = []
        self._results: list[_Result] = []
        self._dense: list[tuple[list[DenseGradient | Tensor], Handle]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Takes the gradients of a DDP bucket. The futures of a step's buckets are completed in its last hook."""
        if torch._C._current_graph_task_id() == -1:  # called by DDP's join(), not by backward
            raise RuntimeError(
                "hvd_compress does not support DistributedDataParallel.join(): give every rank equally many batches"
            )
        engine, buffer = self._engine, bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError("hvd_compress does not support sparse gradients with DistributedDataParallel")
        if bucket.index() == 0 and self._futures:
            self._abandon()
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        self._futures.append((future, buffer))
        with engine.entered(), self._side_stream(buffer.device):
            try:
                self._take(bucket)
                if bucket.is_last():
                    self._finish()
            except BaseException:
                self._abandon()
                raise
        return future

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Warns if the optimizer's step applies gradients and none has passed through the hook."""
        if self._engine.watch.bypassed_by(optimizer):
            self._engine.warn(
                f"{type(optimizer).__name__} steps, but this compressor has received no gradient: is "
                "model.register_comm_hook(compression, hvd_compress.ddp_hook) missing?"
            )

    def _abandon(self) -> None:
        self._engine.reset()
        text = "a backward pass failed or overlapped with another (one compressor serves one DDP model): start again"
        for future, _ in self._futures:
            future.set_exception(RuntimeError(text))  # type: ignore[arg-type]
        self._clear()

    def _clear(self) -> None:
        self._futures, self._dense, self._results = [], [], []

    def _take(self, bucket: GradBucket) -> None:
        engine, dense = self._engine, list[DenseGradient | Tensor]()
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if is_dense(parameter):  # as DDP reads its buckets; gradients() does not
                grad = grad.as_strided(parameter.shape, parameter.stride())
            before = parameter.grad
            self._results.append((parameter, before, -1 if before is None else before._version, grad))
            number = self._numbers.get(id(parameter))
            if number is None:
                engine.warn(
                    f"a gradient of shape {tuple(grad.shape)} belongs to none of this compressor's parameters and is "
                    "sent uncompressed; give the compressor all of the model's named parameters"
                )
                dense.append(grad)
                continue
            arrived = engine.arrive(number, grad)
            if isinstance(arrived, DenseGradient):
                dense.append(arrived)
        if dense:
            with stage("dense"):
                payload = torch.cat([_payload(d).flatten() for d in dense])
                self._dense.append((dense, engine.collectives.start(allreduce(payload), "dense")))

    def _finish(self) -> None:
        engine = self._engine
        engine.finish_step()
        for gradients, handle in self._dense:
            with stage("wait"):
                total = handle.result()
            with stage("dense"):
                self._store(gradients, total * (1.0 / engine.collectives.size))
        for place in engine.places:
            if place.bucket.originals[place.position] is not None:
                place.bucket.result(place.position)
        for future, buffer in self._futures:
            future.set_result(buffer)
        # Twice, to run after DDP's own callback, which is queued after this hook.
        results, queue = self._results, torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: _fill_unused(results)))
        self._clear()

    def _store(self, gradients: list[DenseGradient | Tensor], average: Tensor) -> None:
        parts = torch.split(average, [_payload(g).numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            if isinstance(gradient, DenseGradient):
                gradient.store(part)
                self._engine.method.dense_averaged(gradient.number, gradient.grad)
            else:
                gradient.copy_(part.view_as(gradient))

    def _side_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """On a GPU, a stream that waits for the gradients: exchanges do not delay the rest of backward."""
        if device.type != "cuda":
            return nullcontext()
        if (stream := self._streams.get(device)) is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)


@modes_off
def _fill_unused(results: list[_Result]) -> None:
    """DDP leaves the gradient of a parameter that no rank has used; what was sent of its residual must still arrive."""
    for parameter, before, version, average in results:
        grad = parameter.grad
        if grad is not before or (grad is not None and grad._version != version):
            continue  # DDP has stored the average
        if grad is None and bool(average.any()):
            parameter.grad = average.clone()
        elif grad is not None and grad.data_ptr() != average.data_ptr():
            grad.copy_(average)  # DDP has put the old gradient into the bucket


def _payload(gradient: DenseGradient | Tensor) -> Tensor:
    return gradient.payload if isinstance(gradient, DenseGradient) else gradient


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

    ordered = True
    active = True

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        self._group = distributed.group.WORLD if process_group is None else process_group
        if distributed.get_rank(self._group) < 0:
            raise ValueError("this process is not in process_group")

    @property
    def rank(self) -> int:
        return distributed.get_rank(self._group)

    @property
    def size(self) -> int:
        return distributed.get_world_size(self._group)

    def generation(self) -> object:
        return self._group

    def start(self, request: Request, name: str) -> Handle:
        tensor = request.tensor
        if request.verb == "allreduce":
            output = tensor.clone()
            work = distributed.all_reduce(output, group=self._group, async_op=True)
        elif request.verb == "allgather":
            output = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
            work = _all_gather(output, tensor, group=self._group, async_op=True)
        else:
            output = torch.empty_like(tensor)
            work = distributed.all_to_all_single(output, tensor, group=self._group, async_op=True)
        assert work is not None
        return _TorchHandle(work, output, output.is_cuda and "nccl" in distributed.get_backend(self._group))

    def check_optimizer(self, optimizer: Any) -> None:
        """Every optimizer fits."""
