"""How a network is tested: by accuracy on images, by bits per byte on text."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
def average_norm_statistics(model: nn.Module, host: Any) -> None:
    """Running means and variances of the norms, averaged over ranks in one message: each rank has followed its own
    shard. Training does not read these buffers."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if buffers:
        flat = host.sum(torch.cat([buffer.flatten() for buffer in buffers])) / host.size
        for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))


@torch.no_grad()
def test(model: nn.Module, data: Any, amp: str, host: Any, batch_size: int = 250) -> float:
    """The metric of the data (:class:`experiment.data.Data`) on its test set; each rank tests a part."""
    average_norm_statistics(model, host)
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # scores, targets
    for inputs, targets in data.test_batches(batch_size, host.rank, host.size):
        with autocast(amp, inputs.device):
            total += torch.tensor([data.metric.score(model(inputs), targets).item(), targets.numel()])
    model.train()
    scores, count = host.sum(total).tolist()
    return scores / count
