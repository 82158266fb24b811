"""Measures a method's computation for one rank, on this machine: its real compressor, with simulated ranks."""

import math
import statistics
import time
from collections.abc import Sequence

import torch

from ..carriers.mirror import Mirror
from .synthetic import normal
from .wire import BASELINES, METHODS, is_compressed

Shape = tuple[int, ...]

#: Larger models are sampled. This many entries do not fit into the caches.
MOST = 8_000_000
#: The time for more ranks is extrapolated from those for this many and for half as many.
MOST_RANKS = 8
WARMUP, STEPS = 2, 5
SLACK = 1 << 16


def sample(shapes: Sequence[Shape]) -> tuple[list[Shape], float]:
    """Some of the compressed tensors, of every size, with about MOST entries at most, and how many times more the whole
    model has. Tensors of more than half of MOST are cut along their first dimension."""
    large = sorted((shape for shape in shapes if is_compressed(shape)), key=math.prod)
    total = sum(map(math.prod, large))
    if not total:
        return [], 1.0
    cut = [(min(shape[0], max(1, MOST // 2 // math.prod(shape[1:]))), *shape[1:]) for shape in large]
    stride = max(1, round(sum(map(math.prod, cut)) / MOST))
    chosen = cut[::-1][::stride]
    return chosen, total / sum(map(math.prod, chosen))


class Kernels:
    """Measures methods on the compressed tensors of a model. ``shapes``: of all parameters."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        chosen, self._factor = sample(shapes)
        self._total = sum(map(math.prod, shapes))
        generator = torch.Generator("cpu").manual_seed(0)
        self._parameters = [torch.nn.Parameter(normal(shape, 0.02, generator)) for shape in chosen]
        self._noise = normal((max(map(math.prod, chosen), default=0) + SLACK,), 0.01, generator)
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def seconds(self, method: str, ranks: int, per_node: int = 1) -> float:
        """The processor time of one rank in a step, without network, on one core: of the method, and of copying all
        gradients into and out of a host's buffers.

        ``per_node``: ranks of a node. Each does its share of the method's work, and copies all gradients once more, for
        the node's sums."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            size = min(self._total, MOST)
            host = _copies(size, method) * self._total / size
            if method in BASELINES or not self._parameters:
                return host
            few = self._compressor(method, min(ranks, MOST_RANKS))
            if ranks > MOST_RANKS:
                growth = (few - self._compressor(method, MOST_RANKS // 2)) / (MOST_RANKS - MOST_RANKS // 2)
                few += max(0.0, growth) * (ranks - MOST_RANKS)
            return host * (1 if per_node == 1 else 2) + few / per_node
        finally:
            torch.set_num_threads(threads)

    def _compressor(self, method: str, ranks: int) -> float:
        """The median of the method's time over some steps, for the whole model."""
        mirror = Mirror(ranks, time.thread_time)
        named = [(str(number), parameter) for number, parameter in enumerate(self._parameters)]
        compression = METHODS[method].build(named, collectives=mirror)
        found = []
        for step in range(WARMUP + STEPS):
            grads: list[torch.Tensor] = [p.grad for p in self._parameters]  # type: ignore[misc]
            for number, grad in enumerate(grads):
                offset = (step * 10007 + number) * 2654435761 % SLACK
                grad.copy_(self._noise[offset : offset + grad.numel()].view_as(grad))
            begin, idle = time.thread_time(), mirror.seconds
            for payload, context in [compression.compress(grad) for grad in reversed(grads)]:
                compression.decompress(payload, context)
            found.append(time.thread_time() - begin - (mirror.seconds - idle))
        return statistics.median(found[WARMUP:]) * self._factor


def _copies(size: int, method: str) -> float:
    """Seconds in which DDP and Horovod copy and divide ``size`` entries, as in every step; with float16, they also cast
    them there and back."""
    source, found = torch.ones(size, dtype=torch.float32, device="cpu"), list[float]()
    target = torch.ones_like(source)
    for _ in range(WARMUP + STEPS):
        begin = time.thread_time()
        torch.mul(source, 0.5, out=target)
        if method == "fp16":
            target.copy_(target.half().div_(2))
        found.append(time.thread_time() - begin)
    return statistics.median(found[WARMUP:])
