"""A coded ring whose averages are decoded group by group, to where they belong."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..engine.collectives import Request
from ..reference.scales import bounded
from .base import Channel, invalidate
from .coded_ring import CodedRing, RingChannel

#: Writes the averages of a group's first values to a tensor, float32, flat.
Means = Callable[[int, Tensor], object]


@dataclass(frozen=True)
class GroupedRing(CodedRing):
    """As :class:`.CodedRing`, without memory for the averages of a bucket."""

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _GroupedChannel(self, groups, ranks, rank, device)


class _GroupedChannel(RingChannel):
    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        del self.mean
        # By group: its first value, its runs, and their edges in it.
        starts, runs = [*accumulate(sizes, initial=0)], self.runs.cpu()
        first = torch.searchsorted(runs, torch.tensor(starts, dtype=torch.int64, device="cpu")).tolist()
        edges = [(runs[a : b + 1] - runs[a]).to(self.device) for a, b in pairwise(first)]
        self.inside = [*zip(starts, map(slice, first, first[1:]), edges, strict=False)]


def means_by_group(
    channel: Channel, values: Tensor, invalid: Tensor, key: int
) -> Generator[Request, Tensor, tuple[Means, Tensor, Tensor]]:
    """As ``channel.average()``, of any channel whose averages are all NaN, or none: returns how to read them, the
    quantization error, and whether they are NaN: bool, one entry."""
    if not isinstance(channel, _GroupedChannel):
        mean, error = yield from channel.average(values, invalid, key)
        edges = channel.edges.tolist()
        return lambda group, to: to.copy_(mean[edges[group] :][: len(to)]), error, mean[:1].isnan()
    codes, scales, wrong = yield from channel.exchange(values, invalid, key)
    code, scale, kind = channel.mean_code, bounded(scales.float().abs()), (scales < 0).long()

    def means(group: int, to: Tensor) -> None:
        start, runs, edges = channel.inside[group]
        mine = codes[code.size(start) :][: code.size(len(to))]
        code.decode(mine, scale[runs], kind[runs], edges.clamp(max=len(to)), to, add=False)
        invalidate(to, wrong)

    return means, channel.quantization_error, wrong
