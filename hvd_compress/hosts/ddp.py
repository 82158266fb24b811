"""torch DistributedDataParallel as host: its communication hook on one side, the engine on the other.

DDP calls the hook once per DDP bucket, with the same buckets in the same order on all ranks; DDP's buckets are not the
engine's. torch.distributed matches collectives by the order of the calls, which must not depend on timing:

- Gloo: a bucket's first collective starts when its last gradient arrives, the others in the last hook of the step, one
  per exchange in turn.
- NCCL, where waiting blocks a stream, not the host: the whole exchange runs when the last gradient arrives, on a side
  stream.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed import GradBucket
from torch.futures import Future

from ..carriers.torch_collectives import TorchCollectives
from ..engine.bucket import is_dense
from ..engine.dense import as_real
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..gradients.step import GradScaler
from ..guards.averaging import check_ranks, hooked_models
from .nested import backward_depth
from .torch_host import TorchHost


@modes_off
def ddp_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """A communication hook for ``DistributedDataParallel.register_comm_hook(compression, ddp_hook)``.

    Example::

        compression = hvd_compress.IWP(model)  # after init_process_group()
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        state: a compressor, such as :class:`hvd_compress.IWP`, built after ``init_process_group()`` from the model's
            named parameters.
        bucket: passed by DDP.

    Raises:
        RuntimeError: the compressor is bound to Horovod, or the model is in ``join()``.
        ValueError: in the first step, the compressor works on another process group than the model.
    """
    return cast(DDPHost, state.use(DDPHost)).hook(bucket)


#: A parameter; its ``.grad`` before DDP's callback, and that tensor's version; the average, in DDP's bucket.
_Result = tuple[Tensor, Tensor | None, int, Tensor]


class DDPHost(TorchHost):
    """The communication hook of one compressor."""

    registration = "model.register_comm_hook(compression, hvd_compress.ddp_hook)"
    bound = (
        f"is bound to torch.distributed, and its parameters are not sharded: use {registration}; for FSDP2 build it "
        "after fully_shard(), for Horovod with process_set="
    )

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        super().__init__(engine, grad_scaler)
        self._numbers = {id(parameter): number for number, parameter in enumerate(engine.parameters)}
        self._futures: list[tuple[Future[Tensor], Tensor]] = []
        self._results: list[_Result] = []
        self._stream_of = cache(torch.cuda.Stream)
        #: The index of the step's last bucket so far, and the backward pass to which it belongs.
        self._index, self._backward = -1, -1
        #: Whether DDP skips buckets that no rank has used.
        self._skips = False

    def hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Takes the gradients of a DDP bucket. The futures of a step's buckets are completed in its last hook, or, if
        DDP skips the last buckets, which no rank has used, at the end of backward."""
        backward = torch._C._current_graph_task_id()
        if backward == -1:  # called by DDP's join(), not by backward
            raise RuntimeError(
                "hvd_compress does not support DistributedDataParallel.join(): give every rank equally many batches"
            )
        self.take_from("ddp_hook")
        engine, buffer = self._engine, bucket.buffer()
        if buffer.is_sparse:
            raise RuntimeError("hvd_compress does not support sparse gradients with DistributedDataParallel")
        if not engine.comparison.done:
            self._look_at_model()
        if self._futures and bucket.index() <= self._index and backward != self._backward:
            self._reset(overwritten=True)
        if self._skips and backward != self._backward:
            self._await_end()
        self._index, self._backward = bucket.index(), backward
        future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()
        self._futures.append((future, buffer))
        with self._engine.entered, self._side_stream(buffer.device), self.inside():
            self._take(bucket)
            if bucket.is_last():
                self._finish()
        return future

    def _reset(self, overwritten: bool = False) -> None:
        self.reset(overwritten=overwritten)
        text = (
            "a backward pass failed, ended early or overlapped with another (one compressor serves one DDP model): "
            "start again"
        )
        for future, _ in self._futures:
            future.set_exception(RuntimeError(text))  # type: ignore[arg-type]
        self._clear()

    def _clear(self) -> None:
        self._futures, self._results, self._index = [], [], -1

    def _look_at_model(self) -> None:
        """Raises ``ValueError`` if the DDP model works on other ranks than the compressor, and finds out whether it
        skips buckets."""
        collectives = self._engine.collectives
        if not isinstance(collectives, TorchCollectives):
            return
        models = hooked_models(self._engine.method, self._engine.parameters)
        self._skips = any(getattr(model, "skip_all_reduce_unused_params", False) for model in models) or not models
        for model in models:
            check_ranks(distributed.get_process_group_ranks(model.process_group), collectives.ranks)

    def _await_end(self) -> None:
        """Lets the step end with the backward pass if the last bucket is skipped, for which DDP calls no hook. DDP's
        own callback, which waits for the futures, is queued after this one."""
        if backward_depth():
            raise RuntimeError(
                "hvd_compress does not support skip_all_reduce_unused_params=True with a backward pass inside another "
                "one: checkpoint with use_reentrant=False"
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    @modes_off
    def _end_of_backward(self) -> None:
        if self._futures:
            with self._engine.entered, self._side_stream(self._futures[0][1].device), self.inside():
                self._finish()

    def _take(self, bucket: GradBucket) -> None:
        engine = self._engine
        for parameter, grad in _gradients(bucket):
            before = parameter.grad
            self._results.append((parameter, before, -1 if before is None else before._version, grad))
            number = self._numbers.get(id(parameter))
            if number is None:
                engine.warn(
                    f"a gradient of shape {tuple(grad.shape)} belongs to none of this compressor's parameters and is "
                    "sent uncompressed; give the compressor all of the model's named parameters"
                )
                engine.dense.arrive(None, grad, grad)
            else:
                self.arrive(number, grad)
        engine.dense.start(reciprocal=True)

    def _finish(self) -> None:
        self.exchange()
        for future, buffer in self._futures:
            future.set_result(buffer)
        # Twice, to run after DDP's own callback, which is queued after this hook.
        results = self._results
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(partial(queue, partial(_fill_unused, results)))
        self._clear()

    def _side_stream(self, device: torch.device) -> AbstractContextManager[object]:
        """A stream that waits for the gradients, on a GPU: exchanges do not delay the rest of backward."""
        if device.type != "cuda":
            return nullcontext()
        stream = self._stream_of(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)


@modes_off
def _fill_unused(results: list[_Result]) -> None:
    """Writes the averages that DDP does not store: those of parameters that no rank has used. What was sent of their
    residuals must still arrive."""
    for parameter, before, version, average in results:
        grad = parameter.grad
        if grad is not before or (grad is not None and grad._version != version):
            continue  # DDP has stored the average
        if grad is None and bool(average.any()):
            parameter.grad = torch.view_as_complex(average.clone()) if parameter.is_complex() else average.clone()
        elif grad is not None and grad.data_ptr() != average.data_ptr():
            as_real(grad).copy_(average)  # DDP has put the old gradient into the bucket


def _gradients(bucket: GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """The bucket's parameters and their gradients: views of its buffer in the parameter's memory order, as DDP reads
    them (``bucket.gradients()`` does not); of a complex parameter as pairs of real numbers.

    Raises ``RuntimeError`` if they do not cover the buffer.
    """
    buffer, begin = bucket.buffer(), 0
    for parameter in bucket.parameters():
        like = as_real(parameter)
        if is_dense(like):
            yield parameter, buffer.as_strided(like.shape, like.stride(), buffer.storage_offset() + begin)
        else:
            yield parameter, buffer[begin : begin + like.numel()].view(like.shape)
        begin += like.numel()
    if begin != buffer.numel():
        raise RuntimeError(
            f"a bucket of DistributedDataParallel has {buffer.numel()} entries, and its parameters {begin}: this "
            "version of torch lays gradients out in a way that hvd_compress does not know"
        )
