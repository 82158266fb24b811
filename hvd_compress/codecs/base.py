"""The interfaces of codecs and of their channels."""

import abc
from collections.abc import Generator

import torch
from torch import Tensor

from ..engine.collectives import Request
from ..engine.state import Tree

Averaged = Generator[Request, Tensor, tuple[Tensor, Tensor]]


def invalidate(mean: Tensor, invalid: Tensor) -> None:
    """Makes all of ``mean`` NaN if ``invalid``, bool, one entry, is true."""
    if not invalid.is_cpu or bool(invalid):  # free on the CPU; a GPU would be synchronised
        mean.masked_fill_(invalid, float("nan"))


class Codec(abc.ABC):
    """An encoding of values on the wire. Immutable, shared by all buckets."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name for ``values=``."""

    @abc.abstractmethod
    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> "Channel":
        """A channel for ``groups`` groups of values; each group has its own scale."""


class Channel(abc.ABC):
    """The state of a codec for one bucket. Values come in groups, one per parameter."""

    def __init__(self, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        self.groups, self.ranks, self.rank, self.device = groups, ranks, rank, device

    def set_group_sizes(self, sizes: list[int]) -> None:
        """Sets the number of values of each group, and allocates the buffers."""
        assert len(sizes) == self.groups
        self.count = sum(sizes)
        self.edges = torch.tensor([0, *sizes], dtype=torch.int64, device=self.device).cumsum(0)
        self.mean = torch.empty(self.count, dtype=torch.float32, device=self.device)
        self.quantization_error = torch.empty(self.count, dtype=torch.float32, device=self.device)

    def first_requests(self) -> tuple[Request, ...]:
        """The requests with which the next :meth:`average` will begin, if they are known before."""
        return ()

    @abc.abstractmethod
    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        """Averages over ranks: yields requests, returns (mean, quantization_error).

        Both are float32, (n,), buffers of the channel, valid until its next call. ``mean`` has the same bits on all
        ranks. ``quantization_error``: the part of this rank's values that is not in the mean.

        ``values``: float32, (n,), finite; not modified. ``invalid``: int32, (1,): if it is not 0 on any rank, the mean
        is NaN on all. ``key``: seed of stochastic rounding, for this rank and step.
        """

    def begin_step(self) -> None:
        """Saves the state for :meth:`undo_step`."""

    def undo_step(self) -> None:
        """Restores the state of the last :meth:`begin_step`, after a step that failed or was skipped."""

    def state(self) -> Tree:
        """The saved state; the same on all ranks."""
        return {}
