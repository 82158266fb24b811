"""How a network is tested: by accuracy on images, by bits per byte on text."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Metric:
    """The mean of a score over everything tested."""

    key: str  # in a result and in its history
    label: str
    lower_is_better: bool
    #: The sum of the scores of logits (..., classes) for targets int64 (...).
    score: Callable[[Tensor, Tensor], Tensor]

    def reached(self, value: float, target: float) -> bool:
        return value <= target if self.lower_is_better else value >= target

    def best(self, values: list[float]) -> int:
        """The position of the best value; one that is not a number is the worst."""
        sign = 1 if self.lower_is_better else -1
        return min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else sign * values[i])


def _correct(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).sum()


def _bits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum") / math.log(2)


ACCURACY = Metric("test_accuracy", "test accuracy", False, _correct)
BITS_PER_BYTE = Metric("test_bits_per_byte", "bits per byte", True, _bits)


def metric_of(result: dict[str, Any]) -> Metric:
    """What train.py has measured."""
    return BITS_PER_BYTE if BITS_PER_BYTE.key in result else ACCURACY


def autocast(kind: str, device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on the device, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if kind == "bf16" else nullcontext()


@torch.no_grad()
def average(tensors: Iterable[Tensor], host: Any) -> None:
    """Averages floating-point tensors over the ranks, in place and in one message; others are left alone."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if floats:
        flat = host.sum(torch.cat([tensor.flatten() for tensor in floats])) / host.size
        for tensor, mean in zip(floats, flat.split([tensor.numel() for tensor in floats]), strict=True):
            tensor.copy_(mean.view_as(tensor))


@contextmanager
def averaged_weights(model: nn.Module, host: Any) -> Iterator[None]:
    """In the block, the parameters hold their averages over the ranks; afterwards, each rank's own again."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    average(model.parameters(), host)
    yield
    with torch.no_grad():
        for parameter, weights in zip(model.parameters(), own, strict=True):
            parameter.copy_(weights)


@torch.no_grad()
def test(model: nn.Module, data: Any, amp: str, host: Any, batch_size: int = 250) -> float:
    """The metric of the data (:mod:`experiment.data`) on its test set; each rank tests a part.

    Before, the running means and variances of norms are averaged, since each rank has followed its own shard: training
    does not read them.
    """
    average(model.buffers(), host)
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # scores, targets
    for inputs, targets in data.test_batches(batch_size, host.rank, host.size):
        with autocast(amp, inputs.device):
            total += torch.tensor([data.metric.score(model(inputs), targets).item(), targets.numel()])
    model.train()
    scores, count = host.sum(total).tolist()
    return scores / count
