"""What a method's computation costs one rank on this machine: its real compressor, with ranks that are simulated."""

import math
import statistics
import time
from collections.abc import Sequence

import torch

from ..carriers.mirror import Mirror
from .synthetic import normal
from .wire import BASELINES, METHODS, is_compressed

Shape = tuple[int, ...]

#: Larger models are sampled. So many entries do not fit into the caches.
MOST = 8_000_000
#: The time for more ranks is extrapolated from that for half as many and for these.
MOST_RANKS = 8
WARMUP, STEPS = 2, 5
SLACK = 1 << 16


def sample(shapes: Sequence[Shape]) -> tuple[list[Shape], float]:
    """Some of the compressed tensors, of every size, with at most about MOST entries, and the factor by which the whole
    model has more. Tensors that are larger than half of that are cut along their first dimension."""
    large = sorted((shape for shape in shapes if is_compressed(shape)), key=math.prod)
    total = sum(map(math.prod, large))
    if not total:
        return [], 1.0
    cut = [_cut(shape, MOST // 2) for shape in large]
    stride = max(1, round(sum(map(math.prod, cut)) / MOST))
    chosen = cut[::-1][::stride]
    return chosen, total / sum(map(math.prod, chosen))


def _cut(shape: Shape, most: int) -> Shape:
    rows = max(1, most // math.prod(shape[1:]))
    return (min(shape[0], rows), *shape[1:])


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
        """Of one rank's computation in a step, without network, on one core: the method's, and the copy of all
        gradients into and out of a host's buffers. Processor time, so that other programs disturb it little.

        ``per_node``: ranks of a node. Each computes its share of the method, and copies all gradients once more into
        and out of the node's sums."""
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
        """The median over some steps, for the whole model."""
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
    """Seconds for what DDP and Horovod do with ``size`` entries in every step: copy them and divide; with float16, cast
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
