"""The base class of sparse methods that send coefficients of a transform, and keep their residual in its domain."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..codecs import Codec, codec
from ..engine.arguments import NamedParameters, check_fraction
from ..engine.bucket import Bucket, Segment
from ..selection.base import Scoring, Selection
from ..selection.leaders import BlockLeaders, check_leaders, run_length
from ..selection.per_rank import BlockPerRank, gather_codec
from ..selection.schedule import Density
from .sparse import Plan, SparseMethod


class TransformedMethod(SparseMethod):
    """Sends the largest coefficients, by magnitude.

    Args:
        values: a codec's name or a codec; None for the default of the exchange.
        exchange: ``"ring"``: leaders select coefficients that all ranks send. ``"gather"``: every rank selects its own
            and sends them to all.
        leaders: how many ranks, on average, select the coefficients of one block; None for all. Ring only.
        explore: share of the blocks in which coefficients are drawn at random in proportion to magnitude, in [0, 1].
        Others: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    #: The default codec of each exchange.
    codecs: ClassVar[dict[str, str]]

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density,
        *,
        values: str | Codec | None,
        exchange: str,
        leaders: int | None,
        explore: float,
        **common: Any,
    ) -> None:
        if exchange not in self.codecs:
            raise ValueError(f"exchange must be one of {', '.join(sorted(self.codecs))}, got {exchange!r}")
        values = codec(self.codecs[exchange] if values is None else values)
        if exchange == "gather":
            gather_codec(values)
        check_leaders(leaders)
        check_fraction("explore", explore)
        super().__init__(named_parameters, density, values=values, **common)
        self._exchange, self._leaders, self._explore = exchange, leaders, explore

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        if self._exchange == "gather":
            return BlockPerRank(bucket, slots, self._finds_idle)
        run = run_length(self._leaders, density, self.ranks)
        return BlockLeaders(bucket, slots, run, self.ranks, self.rank, self._finds_idle)

    def scoring(self, bucket: Bucket, plan: Plan) -> Scoring:
        return replace(super().scoring(bucket, plan), explore=self._explore)

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        return torch.stack([segment.of(bucket.residual).abs().sum(dtype=torch.float64) for segment in bucket.segments])

    def saved(self, segment: Segment, flat: Tensor) -> Tensor:
        return segment.of(flat)

    def depends_on_memory_order(self) -> bool:
        return True
