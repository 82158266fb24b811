"""Frequency-domain sparsification with range-based floats (Wang et al., HPDC 2020; arXiv 1811.08596)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import spectrum
from ..engine.bucket import Bucket, Segment
from ..codecs import Codec, codec
from ..engine.exchange import Exchange
from ..selection.per_rank import Own, OwnBlocks, average_own, gathered
from ..selection.schedule import Density
from ..selection.base import BlockSelection, Rule, Selection, check_explore, check_leaders, leaders_text, run_length
from .sparse import Plan, Sparse

# What trained best at equal bytes (docs/results.md); and the paper's.
_EXCHANGES = {"ring": "lanes4", "gather": "range10-gather"}


class FFT(Sparse):
    r"""Frequency-domain sparsification: the largest Fourier coefficients are sent, and the rest wait.

    Implements the published idea of Wang et al., *FFT-based Gradient Sparsification for the Distributed Training of
    Deep Neural Networks* (HPDC 2020; arXiv 1811.08596): gradients are sparsified in the frequency domain, and what is
    kept travels as range-based floats. On rank i, with residual R (of coefficients) and gradient g::

        A_i = R_i + F g_i                                  real FFT in chunks of 4096 entries
        S   = union over leaders of their largest |A_i|     one allgather, one byte an index
        g   = F^-1 (mean_i A_i[S] on S, else 0)            the transform is linear: one inverse is enough
        R_i = A_i - what was sent

    The paper's: thresholding the spectrum by magnitude, range-based floats, a compression ratio that diminishes with
    the learning rate. Ours: error feedback in the frequency domain, the chunks, real and imaginary parts chosen each by
    itself in the orthonormal real basis (interior bins count twice), leaders and the ring (``exchange="ring"``). With
    ``exchange="gather"``, as in the paper, every rank keeps its own frequencies and sends them to all, as a bitmap
    where that is shorter; bytes then grow with the ranks.

    Replicas stay equal where all ranks compute the inverse transform alike: on one type of CPU or GPU.

    Args:
        named_parameters: ``(name, parameter)`` pairs of the optimizer's parameters, as ``model.named_parameters()``.
        density: coefficients sent in a step as a share of the entries, in (0, 1], or a schedule:
            :class:`~hvd_compress.schedule.Diminishing` is the paper's.
        values: how values travel: a name or a codec of :mod:`hvd_compress.codecs`; None for ``"lanes4"`` on the ring,
            and range-based floats of 10 bits, ``"range10-gather"``, in the gather, which needs one that is gathered.
        exchange: ``"ring"`` or ``"gather"``.
        leaders: how many ranks, on average, choose the coefficients of one block; None for all. Ring only.
        explore: share of the choices drawn at random in proportion to magnitude, in [0, 1].
        budget_interval: steps between re-balancings of a bucket's layers' shares by magnitude; 0 keeps them equal.
        warmup_steps, momentum: see :class:`~hvd_compress.IWP`.
        seed, min_numel, bucket_mb, dense_values, process_set, grad_scaler, collectives: see
            :class:`~hvd_compress.compressor.Compressor`.

    Raises:
        ValueError: an argument outside its range, or an optimizer with momentum beside ``momentum``.
        TypeError: ``named_parameters`` are not pairs, or a gradient is not of a floating dtype.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        density: float | Density = 1 / 32,
        *,
        values: str | Codec | None = None,
        exchange: str = "ring",
        leaders: int | None = None,
        explore: float = 0.0,
        budget_interval: int = 100,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        if exchange not in _EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(sorted(_EXCHANGES))}, got {exchange!r}")
        values = codec(_EXCHANGES[exchange] if values is None else values)
        if exchange == "gather":
            gathered(values)
        check_leaders(leaders)
        check_explore(explore)
        super().__init__(
            named_parameters,
            density,
            values=values,
            budget_interval=budget_interval,
            warmup_steps=warmup_steps,
            momentum=momentum,
            **common,
        )
        self._exchange, self._leaders, self._explore = exchange, leaders, explore
        #: Coefficients on their way: of the gradient, before they are in the residual; then of the average.
        self._spectra = [torch.zeros_like(bucket.residual) for bucket in self._buckets]

    def __repr__(self) -> str:
        who = "every rank its own" if self._exchange == "gather" else leaders_text(self._leaders)
        return (
            f"FFT(density {self._density}, {who}, {self._codec.name} values{self.momentum_text()}; "
            f"{self.parameters_text()})"
        )

    # The algorithm: what the others do with gradients is done with their coefficients.

    def select(self, bucket: Bucket, plan: Plan, slots: list[int], density: float) -> Selection:
        if self._exchange == "gather":
            return OwnBlocks(bucket, slots)
        ranks, rank = self._collectives.size, self._collectives.rank
        return BlockSelection(bucket, slots, run_length(self._leaders, density, ranks), ranks, rank)

    def settings(self) -> tuple[Any, ...]:
        return *super().settings(), self._exchange, self._leaders, self._explore

    def rule(self, bucket: Bucket, plan: Plan) -> Rule:
        return replace(super().rule(bucket, plan), explore=self._explore)

    def importance(self, bucket: Bucket, plan: Plan) -> Tensor:
        return torch.stack([segment.of(bucket.residual).abs().sum(dtype=torch.float64) for segment in bucket.segments])

    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        plan, segment = self._plans[bucket.index], bucket.segments[position]
        flat = grad.as_strided((grad.numel(),), (1,))
        # One infinity would be in every coefficient of its chunk, and the chunk's other entries would be lost with it.
        plan.invalid |= (~flat.isfinite().all()).to(torch.int32)
        flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        coefficients = self._coefficients(bucket, segment)
        spectrum.forward(flat, coefficients)
        flat.zero_()
        plan.selection.receive(position, coefficients, bucket.state.get("velocity"), plan.rule)

    def communicate(self, bucket: Bucket, plan: Plan) -> Exchange:
        if isinstance(plan.selection, Own):
            yield from average_own(self, bucket, plan)
        else:
            yield from super().communicate(bucket, plan)
        for segment, grad in zip(bucket.segments, bucket.gradients, strict=True):
            coefficients = self._coefficients(bucket, segment)
            if grad is not None:
                spectrum.inverse(coefficients, grad.as_strided((grad.numel(),), (1,)))
            coefficients.zero_()

    def targets(self, bucket: Bucket, plan: Plan) -> list[Tensor]:
        nothing = torch.empty(0, device=bucket.device)
        pairs = zip(bucket.segments, bucket.arrived, strict=True)
        return [self._coefficients(bucket, segment) if here else nothing for segment, here in pairs]

    def _coefficients(self, bucket: Bucket, segment: Segment) -> Tensor:
        return segment.of(self._spectra[bucket.index])[: spectrum.padded(segment.numel)]

    # What is held back, and saved, are coefficients.

    def held(self, bucket: Bucket, segment: Segment) -> Tensor:
        flat = torch.empty(segment.numel, device=bucket.device)
        spectrum.inverse(bucket.peek(segment)[: spectrum.padded(segment.numel)], flat)
        return flat.as_strided(segment.parameter.shape, segment.parameter.stride())

    def saved(self, segment: Segment, flat: Tensor) -> Tensor:
        return segment.of(flat)

    def follows_memory(self) -> bool:
        return True
