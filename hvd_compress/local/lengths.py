"""The length of the ranks' own differences, which is restored to their mean."""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from ..carriers.shards import shard_groups
from ..engine.collectives import allgather
from ..engine.engine import Engine
from .common_weights import Weight

# Entries that are squared at a time.
_PART = 2**22


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
        self._engine, self._groups = engine, shard_groups(engine.parameters)
        self._device = engine.parameters[0].device

    def squares(self, weights: Sequence[Weight], tensors: Sequence[Tensor]) -> Tensor:
        """The sum of squares of a tensor of each weight: float64, (weights,)."""
        sums = []
        for weight, tensor in zip(weights, tensors, strict=True):
            with weight.order:
                sums.append(sum_of_squares(tensor).to(self._device))
        return torch.stack(sums)

    def factors(self, weights: Sequence[Weight], averages: Sequence[Tensor], squares: Tensor) -> list[Tensor]:
        """The factor of the averaged difference of each weight: float64, (), at most the square root of the ranks, that
        of differences at right angles; 1 where a length is 0 or not finite. Waits for the shard group.

        Args:
            squares: the mean over ranks of :meth:`squares` of their differences.
        """
        sums = self._of_whole(weights, torch.stack([squares, self.squares(weights, averages)]))
        ratios = torch.sqrt(sums[0] / sums[1])
        factors = ratios.clamp(max=math.sqrt(self._engine.collectives.size))
        factors = torch.where(ratios.isfinite() & (ratios > 0), factors, torch.ones_like(factors))
        return [factor.to(weight.common.device) for weight, factor in zip(weights, factors.unbind(), strict=True)]

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
    """float64, (). The order of the additions depends on the number of entries only."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for part in torch.split(tensor.flatten(), _PART):
        squares = part.double().square()
        while len(squares) > 1:
            half = (len(squares) + 1) // 2
            squares[: len(squares) - half] += squares[half:]
            squares = squares[:half]
        total = total + squares.sum()
    return total
