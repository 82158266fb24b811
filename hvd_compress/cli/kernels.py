"""Measures a method for one rank, on this machine: its real compressor, with simulated ranks."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..carriers.mirror import Mirror
from ..engine.collectives import ring_bytes
from .methods import BASELINES, METHODS, Method, Shape, is_compressed
from .synthetic import Synthetic

#: Larger models are sampled. This many entries do not fit into the caches.
MOST = 8_000_000
#: Methods that gather run with at most this many ranks; figures for more are extrapolated.
MOST_RANKS = 8
WARMUP, STEPS = 2, 5


def sample(shapes: Sequence[Shape]) -> tuple[list[Shape], float]:
    """A sample of the compressed tensors, of every size, with about MOST entries at most, and the factor from it to the
    whole model. Tensors of more than half of MOST are cut along their first dimension."""
    large = sorted((shape for shape in shapes if is_compressed(shape)), key=math.prod)
    total = sum(map(math.prod, large))
    if not total:
        return [], 1.0
    cut = [(min(shape[0], max(1, MOST // 2 // math.prod(shape[1:]))), *shape[1:]) for shape in large]
    stride = max(1, round(sum(map(math.prod, cut)) / MOST))
    chosen = cut[::-1][::stride]
    return chosen, total / sum(map(math.prod, chosen))


@dataclass(frozen=True)
class Measured:
    """The figures of one rank in an exchange of all gradients: seconds of processor time, bytes sent to other ranks,
    and ``trips``, the messages between hosts that it waits for, one after the other."""

    seconds: float
    bytes: float
    trips: int


class Kernels:
    """Measures methods on the compressed tensors of a model. ``shapes``: of all parameters."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._compressed = [shape for shape in shapes if is_compressed(shape)]
        self._sample, self._factor = sample(shapes)
        self._total = sum(map(math.prod, shapes))
        named = [(str(number), shape) for number, shape in enumerate(self._sample)]
        self._model = Synthetic(named, rank=0) if named else None

    def measure(self, method: str, ranks: int, per_node: int = 1) -> Measured:
        """The figures of one rank, with the time on one core of the method and of copying all gradients into and out of
        a host's buffers.

        ``ranks``: members of the exchange; ``per_node``: ranks of each, if they are nodes. A rank does its share of the
        method's work, and copies all gradients once more, for the node's sums. Baselines are in one ring of all ranks.
        """
        known, threads = METHODS[method], torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            size = min(self._total, MOST)
            copies = _copies(size, method) * self._total / size
            if method in BASELINES:
                sent = ring_bytes("allreduce", known.width * self._total, ranks * per_node)
                return Measured(copies, sent, 2 * (ranks - 1))
            compressed = sum(map(math.prod, self._compressed))
            uncompressed = ring_bytes("allreduce", known.width * (self._total - compressed), ranks)
            work, sent = self._exchange(known, ranks) if self._model else (0.0, 0.0)
            seconds = copies * (1 if per_node == 1 else 2) + work / per_node
            return Measured(seconds, sent + uncompressed, known.trips)
        finally:
            torch.set_num_threads(threads)

    def _exchange(self, method: Method, ranks: int) -> tuple[float, float]:
        """The seconds and the bytes of all compressed tensors."""
        if not method.gathers or ranks <= MOST_RANKS:
            return self._run(method, ranks)
        (few, sent), (half, _) = self._run(method, MOST_RANKS), self._run(method, MOST_RANKS // 2)
        growth = max(0.0, few - half) / (MOST_RANKS - MOST_RANKS // 2)
        return few + growth * (ranks - MOST_RANKS), sent * (ranks - 1) / (MOST_RANKS - 1)

    def _run(self, method: Method, ranks: int) -> tuple[float, float]:
        """Runs the compressor on the sample. Returns, scaled to all compressed tensors, the median seconds of a step,
        and the bytes of the last one."""
        mirror, found = Mirror(ranks, time.thread_time), list[float]()
        assert self._model is not None
        compression = method.build(self._model.named_parameters(), collectives=mirror)
        for _ in range(WARMUP + STEPS):
            self._model()
            for parameter, gradient in zip(self._model.parameters(), self._model.prepared, strict=True):
                parameter.grad = gradient.clone()
            grads = [p.grad for p in self._model.parameters() if p.grad is not None]
            begin, idle = time.thread_time(), mirror.seconds
            for payload, context in [compression.compress(grad) for grad in reversed(grads)]:
                compression.decompress(payload, context)
            found.append(time.thread_time() - begin - (mirror.seconds - idle))
        payloads = compression.stats()["last"]["wire_bytes"]
        more = sum(map(method.size, self._compressed)) / sum(map(method.size, self._sample))
        return statistics.median(found[WARMUP:]) * self._factor, payloads * more


def _copies(size: int, method: str) -> float:
    """The seconds in which DDP and Horovod copy and divide ``size`` entries in a step, for fp16 with both casts."""
    source, found = torch.ones(size, dtype=torch.float32, device="cpu"), list[float]()
    target = torch.ones_like(source)
    for _ in range(WARMUP + STEPS):
        begin = time.thread_time()
        torch.mul(source, 0.5, out=target)
        if method == "fp16":
            target.copy_(target.half().div_(2))
        found.append(time.thread_time() - begin)
    return statistics.median(found[WARMUP:])
