"""The length of the ranks' own differences, which is restored to their mean."""

import math
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from .. import ops
from ..engine.collectives import allgather
from ..engine.engine import Engine
from .common_weights import Average, Weight


class Lengths:
    """Scales, tensor by tensor, the mean of the ranks' differences to their root mean square length: RDA (arXiv
    2604.21428), whose length is the mean one.

    One float64 a tensor is allreduced with the values; of tensors that are sharded, two more inside the shard group
    after the exchange. Lengths of averages are sums in one order, rounded by IEEE 754: factors are the same on all
    processors.

    Args:
        engine: of the compressor.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._groups = engine, engine.method.shard_groups()
        self._device = engine.parameters[0].device

    def square(self, weight: Weight, tensor: Tensor | Average | None) -> Tensor:
        """The sum of squares of a tensor of a weight: float64, (). None: of the progress that is in codes."""
        with weight.order:
            if tensor is None:
                coded = weight.in_codes
                assert coded is not None
                work, index = coded
                found = work.square_of(index)
            else:
                found = sum_of_squares(tensor) if isinstance(tensor, Tensor) else tensor.square(weight.common.numel())
            return found.to(self._device)

    def restore(
        self, weights: Sequence[Weight], averages: Mapping[str, Tensor | Average], squares: Tensor | None
    ) -> None:
        """Multiplies the averaged difference of each weight, by name, by a factor of at most the square root of the
        ranks, that of differences at right angles; not if a length is 0 or not finite. Waits for the shard group.

        Args:
            squares: the mean over ranks of :meth:`square` of their differences, float64, (weights,); None: no weights.
        """
        own = [self.square(weight, averages[weight.name]) for weight in weights]
        nothing = torch.zeros(2, 0, dtype=torch.float64, device=self._device)
        sums = self._of_whole(weights, nothing if squares is None else torch.stack([squares, torch.stack(own)]))
        ratios = torch.sqrt(sums[0] / sums[1])
        factors = ratios.clamp(max=math.sqrt(self._engine.collectives.size))
        factors = torch.where(ratios.isfinite() & (ratios > 0), factors, torch.ones_like(factors))
        for weight, factor in zip(weights, factors.unbind(), strict=True):
            with weight.order:
                by, average = factor.to(weight.common.device, weight.common.dtype), averages[weight.name]
                average.mul_(by) if isinstance(average, Tensor) else average.times(by)

    def _of_whole(self, weights: Sequence[Weight], sums: Tensor) -> Tensor:
        """The sums of whole tensors from those of their shards, (2, weights): added in the order of the shards. Ranks
        of a shard group may have different shards in a fragment: those that take part are added."""
        numbers = [weight.number for weight in weights]
        for index, group in enumerate(self._groups):
            row = sums.new_zeros(1, 2, len(self._engine.parameters))
            row[0, :, numbers] = sums
            label = f"{self._engine.exchanges.label}.lengths.{index}"
            rows = group.start(allgather(row, "dense_tensor"), label).result()
            sums = reduce(torch.add, rows.unbind())[:, numbers]
        return sums


def sum_of_squares(tensor: Tensor) -> Tensor:
    """float64, (): the same on all processors, see :func:`hvd_compress.reference.moments`."""
    flat = tensor.flatten().float()
    edges = torch.tensor([0, flat.numel()], dtype=torch.int64, device=flat.device)
    sums = torch.empty(1, 3, dtype=torch.float64, device=flat.device)
    ops.moments(flat, edges, sums)
    return sums[0, 0]
