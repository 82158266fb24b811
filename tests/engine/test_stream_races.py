"""The order of streams on a Horovod with NCCL, on an emulated GPU (:mod:`stream_clocks`).

Horovod's thread makes the outputs of allgathers and alltoalls on the default stream, waits for that, and runs its
operations one after the other on a stream of its own, which waits for an event of the stream on which each was started.
They have ended on the host when their handles say so (horovod/torch/adapter_v2.cc, mpi_ops_v2.cc,
horovod/common/ops/nccl_operations.cc and gpu_operations.cc of 0.28.1).
"""

import math
import random

import pytest
import torch
from methods import METHODS
from models import gradients, mixed_model
from stream_clocks import GPU, Clock, join
from torch import Tensor

from hvd_compress.carriers.plain import PlainCollectives
from hvd_compress.codecs.codebooks import codebook
from hvd_compress.engine import bucket, dense
from hvd_compress.engine.collectives import Nodes, Request
from hvd_compress.engine.streams import StreamOrder

#: One of each exchange; the others need --all.
EXCHANGES = {"iwp-lloyd4", "fft", "fft-gather-bitmap", "demo", "mp2", "topk", "quantized-1", "powersgd", "none-fp16"}


class Horovod(PlainCollectives):
    """Rank 0 of two that send the same. How often a handle must be asked until it has ended, is random."""

    rank, size, active, ordered = 0, 2, True, False

    def __init__(self, gpu: GPU, seed: int) -> None:
        self.gpu, self.random, self.nccl = gpu, random.Random(seed), gpu.stream("NCCL")

    def generation(self) -> object:
        return Horovod

    def in_nodes(self, nodes: object) -> Nodes:
        return Nodes(self)

    def sums(self, tensor: Tensor) -> bool:
        return tensor.dtype != torch.int64

    def start(self, request: Request, name: str) -> "Handle":
        tensor = request.tensor.detach()
        output = tensor.new_empty(tensor.shape) if request.verb == "allreduce" else None
        return Handle(self, request.verb, tensor, output)


class Handle:
    def __init__(self, horovod: Horovod, verb: str, tensor: Tensor, output: Tensor | None) -> None:
        self._horovod, self._verb, self._tensor, self._output = horovod, verb, tensor, output
        self._ready, self._left = dict(horovod.gpu.current.clock), horovod.random.randrange(4)
        self._end: Clock | None = None

    def done(self) -> bool:
        self._left -= 1
        if self._end is None and self._left < 0:
            self._run()
        if self._end is None:
            return False
        join(self._horovod.gpu.host, self._end)
        return True

    def result(self, timeout: float = math.inf) -> Tensor:
        while not self.done():
            pass
        assert self._output is not None
        self._output.record_stream(self._horovod.gpu.current)
        return self._output

    def _run(self) -> None:
        tensor, gpu, nccl, ranks = self._tensor, self._horovod.gpu, self._horovod.nccl, self._horovod.size
        with gpu.outside():
            if self._verb == "allreduce":
                value = tensor * ranks
            elif self._verb == "allgather":
                value = tensor.repeat(ranks, *[1] * (tensor.dim() - 1))
            else:
                value = tensor.view(ranks, -1)[0].repeat(ranks)
            if self._output is None:
                self._output = torch.empty_like(value)
                gpu.allocated(self._output, gpu.default)
                nccl.wait_stream(gpu.default)
            self._output.copy_(value)
        join(nccl.clock, self._ready)
        nccl.launch()
        gpu.access(tensor, False, nccl)
        gpu.access(self._output, True, nccl)
        self._end = dict(nccl.clock)


def train(gpu: GPU, method: str, seed: int, steps: int = 3) -> list[str]:
    """Trains, and returns the races. Gradients are complete on two streams, for both of which autograd waits."""
    with gpu:
        model, horovod, side = mixed_model(), Horovod(gpu, seed), gpu.stream("side")
        compression = METHODS[method](model.named_parameters(), bucket_mb=0.08, collectives=horovod)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        parameters = list(model.parameters())
        for step in range(steps):
            pending = []
            order = list(zip(parameters, gradients(model, step), strict=True))
            horovod.random.shuffle(order)
            side.wait_stream(gpu.default)
            while order:
                p, p.grad = order.pop()
                with gpu.on(horovod.random.choice([gpu.default, side])):
                    p.grad.mul_(1.0)
                    payload, context = compression.compress(p.grad)
                    # In place, as Horovod's optimizer does.
                    pending.append((p, payload, context, Handle(horovod, "allreduce", payload, payload.detach())))
            gpu.default.wait_stream(side)
            horovod.random.shuffle(pending)
            while pending:
                p, payload, context, handle = pending.pop()
                while not handle.done():
                    pass
                p.grad.set_(compression.decompress(payload, context))
                del payload, context, handle
            optimizer.step()
            optimizer.zero_grad()
    return gpu.races


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    for module in (bucket, dense):
        monkeypatch.setattr(module, "stream_order", StreamOrder)
    for bits in (1, 2, 4, 8):  # kept on the host, and copied to a GPU while the host waits
        codebook(bits)
    return GPU(monkeypatch)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in EXCHANGES else pytest.mark.slow) for name in METHODS]
)
def test_streams_wait_for_each_other(gpu, method):
    assert train(gpu, method, seed=0) == []


@pytest.mark.parametrize(
    ("omitted", "found"),
    [
        ((StreamOrder, "__enter__", lambda self: None), "does not wait for"),
        ((StreamOrder, "note_input", lambda self: None), "does not wait for side"),
        ((Tensor, "record_stream", lambda self, stream: None), "default, at"),
    ],
    ids=["waiting", "inputs", "record_stream"],
)
def test_an_omission_is_found(gpu, monkeypatch, omitted, found):
    monkeypatch.setattr(*omitted)
    assert any(found in race for race in train(gpu, "fft", seed=0))
