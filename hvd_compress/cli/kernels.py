"""Measures a method's computation for one rank, on this machine: its real compressor, with simulated ranks."""

import math
import statistics
import time
from collections.abc import Sequence

import torch

from ..carriers.mirror import Mirror
from .synthetic import Synthetic
from .wire import BASELINES, METHODS, is_compressed

Shape = tuple[int, ...]

#: Larger models are sampled. This many entries do not fit into the caches.
MOST = 8_000_000
#: The time for more ranks is extrapolated from those for this many and for half as many.
MOST_RANKS = 8
WARMUP, STEPS = 2, 5


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
        named = [(str(number), shape) for number, shape in enumerate(chosen)]
        self._model = Synthetic(named, rank=0) if chosen else None

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
            if method in BASELINES or self._model is None:
                return host
            few = self._compressor(self._model, method, min(ranks, MOST_RANKS))
            if ranks > MOST_RANKS:
                half = self._compressor(self._model, method, MOST_RANKS // 2)
                growth = (few - half) / (MOST_RANKS - MOST_RANKS // 2)
                few += max(0.0, growth) * (ranks - MOST_RANKS)
            return host * (1 if per_node == 1 else 2) + few / per_node
        finally:
            torch.set_num_threads(threads)

    def _compressor(self, model: Synthetic, method: str, ranks: int) -> float:
        """The median of the method's time over some steps, for the whole model."""
        mirror = Mirror(ranks, time.thread_time)
        compression = METHODS[method].build(model.named_parameters(), collectives=mirror)
        found = []
        for _ in range(WARMUP + STEPS):
            model()
            for parameter, gradient in zip(model.parameters(), model.prepared, strict=True):
                parameter.grad = gradient.clone()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
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
