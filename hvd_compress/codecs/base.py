"""A codec, and its channel: one bucket's values on the wire, step after step."""

import abc
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ..engine.collectives import Request

Averaged = Generator[Request, Tensor, tuple[Tensor, Tensor]]


class Codec(abc.ABC):
    """How values are written: immutable, shared by all buckets."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """As in ``values=``."""

    @abc.abstractmethod
    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> "Channel":
        """A channel for ``groups`` groups of values, each with a scale of its own."""


class Channel(abc.ABC):
    """One bucket's values on the wire. The values come in groups (parameters), ``slots[g]`` of group g."""

    def __init__(self, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        self.groups, self.ranks, self.rank, self.device = groups, ranks, rank, device

    def set_group_sizes(self, sizes: list[int]) -> None:
        """How many values each group has from now on."""
        assert len(sizes) == self.groups
        self.count = sum(sizes)
        self.edges = torch.tensor([0, *sizes], device=self.device).cumsum(0)
        self.mean = torch.empty(self.count, device=self.device)
        self.quantization_error = torch.empty(self.count, device=self.device)

    @abc.abstractmethod
    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        """An exchange: yields requests, returns (mean, lost).

        ``values``: float32, (slots,), finite; stays as it is. ``invalid``: int32, (1,): if set on any rank, every
        rank's mean is NaN. ``key``: of this rank's randomness in this step. ``mean``: the average over ranks, the same
        bits on all. ``lost``: what of ``values`` is not in it. Both are the channel's own memory, good until its next
        exchange.
        """

    def begin_step(self) -> None:
        """A step begins."""

    def undo_step(self) -> None:
        """It failed, or was skipped: as before it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must carry."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ``ValueError`` for what :meth:`state_dict` cannot have said."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
