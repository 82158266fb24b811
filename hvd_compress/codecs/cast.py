"""Floats of 16 or 32 bits, summed by an allreduce."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.collectives import allreduce
from .base import Averaged, Channel, Codec, invalidate
from .floats import drop_excess

_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Cast(Codec):
    """``Cast("fp16")``, ``Cast("fp32")``. A value beyond the range is sent in up to 65 steps; the rest is dropped."""

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in _DTYPES:
            raise ValueError(f"kind must be one of {', '.join(_DTYPES)}, got {self.kind!r}")

    @property
    def name(self) -> str:
        return self.kind

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    def limit(self, ranks: int) -> float:
        """The largest value whose sum over ``ranks`` is finite in this dtype. Larger values are clipped to it."""
        largest = torch.finfo(self.dtype).max
        limit = torch.tensor(largest / ranks, dtype=torch.float64, device="cpu").to(self.dtype)
        if limit.double().item() * ranks > largest:
            # The cast has rounded up.
            limit = torch.nextafter(limit, torch.zeros_like(limit))
        return limit.item()

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _CastChannel(self, groups, ranks, rank, device)


class _CastChannel(Channel):
    def __init__(self, codec: Cast, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.dtype, self.limit = codec.dtype, codec.limit(ranks)

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        self.payload = torch.empty(self.count, dtype=self.dtype, device=self.device)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        torch.clamp(values, -self.limit, self.limit, out=self.mean)
        self.payload.copy_(self.mean)
        torch.sub(values, self.payload, out=self.quantization_error)
        drop_excess(self.quantization_error, self.limit)
        invalidate(self.payload, invalid != 0)
        total = yield allreduce(self.payload)
        return self.mean.copy_(total).mul_(1.0 / self.ranks), self.quantization_error
