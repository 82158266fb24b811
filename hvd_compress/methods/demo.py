"""Decoupled momentum (Peng, Quesnelle & Kingma, DeMo, arXiv 2411.19870), also on a ring."""

import math
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..codecs import Codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket, Segment
from ..engine.dense_velocity import DenseVelocity
from ..engine.exchange import Exchange
from ..engine.state import Tree
from ..selection.base import Output, Scoring, signs
from ..selection.schedule import Density
from .orthogonal import orthogonalize
from .sparse import Plan
from .transformed import TransformedMethod


class DeMo(TransformedMethod):
    r"""Decoupled momentum: each rank sends the largest coefficients of its momentum; weights move by averages' signs.

    Implements the published idea of Peng, Quesnelle & Kingma, *DeMo: Decoupled Momentum Optimization* (2024; arXiv
    2411.19870). It replaces AdamW: the momentum is in this object, the optimizer is ``torch.optim.SGD`` without
    momentum, whose weight decay is then decoupled, as AdamW's. On rank i, for one parameter with gradient g_i and m_i,
    the momentum's coefficients; H is the Walsh-Hadamard transform of blocks of 256 entries, orthonormal and its own
    inverse::

        m_i = decay m_i + H g_i
        S   = union over this step's leaders of their largest |m_i|, m of every 256
        q   = mean_i Q(m_i[S]) on S, 0 elsewhere                Q: the codec
        m_i = m_i - Q(m_i[S]) on S, m_i elsewhere
        w   = w - lr (sign(H q) + weight_decay w)               by the optimizer
        orthogonal=: U V^T sqrt(max(rows, columns)) in place of the sign, where H q = U S V^T

    The paper's: a momentum for each rank, from which what is sent is subtracted; the largest coefficients of a
    transform; the sign; ``exchange="gather"``, where every rank sends its own coefficients to all, and the bytes grow
    with the ranks. Ours: leaders and the ring; Walsh-Hadamard in place of a DCT, since additions give the same bits on
    all processors; codebooks of 4 bits; the sign of a momentum of their own for uncompressed gradients. ``orthogonal``
    is Muon's (Jordan et al., 2024): the Newton-Schulz iteration, scaled to root mean square 1.

    Do not clip gradients: after the exchange they are signs or orthogonal matrices, whose norm depends on their size
    only. Clipping raises a warning. Learning rates are as for AdamW.

    Args:
        density: coefficients sent in a step as a share of the entries, in (0, 1], or a schedule
            (:mod:`hvd_compress.schedule`).
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`); None for
            ``"lloyd4"`` with the ring, and range-based floats of 10 bits, ``"range10-gather"``, with the gather.
        exchange: ``"ring"`` or ``"gather"``.
        leaders: how many ranks, on average, select the coefficients of one block; None for all. Ring only.
        explore: share of the blocks in which coefficients are drawn at random in proportion to magnitude, in [0, 1].
        decay: of each rank's momentum, in (0, 1].
        sign: replace averaged gradients by their signs. Without it, a gradient is the average of what was sent, which
            contains gradients of earlier steps, for an optimizer of your choice; uncompressed gradients are plain
            averages.
        orthogonal: compressed parameters whose averages are replaced by the nearest orthogonal matrix instead of their
            signs, as in Muon: their names, or True for all; names of uncompressed ones have no effect. Best for all
            matrices but embeddings. With ``sign`` only. It trains better, computes more (15 matrix products for each
            parameter and step), and needs one type of processor on all ranks.
        dense_momentum: of uncompressed gradients, in [0, 1). With ``sign`` only.
        budget_interval: steps between updates of the parameters' shares of a bucket's slots by magnitude; 0 keeps them
            equal.
        warmup_steps: steps over which the density decreases 1/4, 1/16, ... to ``density``.
        momentum: see :class:`~hvd_compress.IWP`. Without ``sign`` only.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.

    Raises:
        ValueError: also, with ``sign``, in the optimizer's step: an optimizer with momentum, or with parameters that
            this compressor was not given; Horovod's optimizer without this compressor; a single process, for which
            Horovod calls no compressor.
    """

    codecs: ClassVar[dict[str, str]] = {"ring": "lloyd4", "gather": "range10-gather"}

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 16,
        *,
        values: str | Codec | None = None,
        exchange: str = "ring",
        leaders: int | None = None,
        explore: float = 0.0,
        decay: float = 0.999,
        sign: bool = True,
        orthogonal: bool | Iterable[str] = False,
        dense_momentum: float = 0.9,
        budget_interval: int = 100,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must lie in (0, 1], got {decay}")
        if not 0.0 <= dense_momentum < 1.0:
            raise ValueError(f"dense_momentum must lie in [0, 1), got {dense_momentum}")
        if sign and momentum:
            raise ValueError("momentum goes with sign=False: with sign, the momentum is what was not sent")
        if orthogonal and not sign:
            raise ValueError("orthogonal goes with sign=True: without it, gradients are plain averages")
        common.update(values=values, exchange=exchange, leaders=leaders, explore=explore)
        common.update(budget_interval=budget_interval, warmup_steps=warmup_steps, momentum=momentum)
        self._finds_idle = sign
        super().__init__(named_parameters, density, **common)
        self._decay, self._sign, self._dense_momentum = decay, sign, dense_momentum
        self._orthogonal = self._names(orthogonal)
        checksum = zlib.crc32("\n".join(sorted(self._orthogonal)).encode())
        self._orthogonal_text = f"{len(self._orthogonal)} parameters, checksum {checksum:08x}"
        #: By bucket, between the exchange of the values and its end.
        self._averages: dict[int, list[Tensor]] = {}
        #: By parameter, the largest entry of an orthogonal average, or of signs, until ``_signs_seen``.
        self._largest: dict[str, Tensor] = {}
        self._dense = DenseVelocity(self.engine)
        #: Whether a step has shown which gradients the optimizer receives.
        self._signs_seen = not sign

    def scoring(self, bucket: Bucket, plan: Plan) -> Scoring:
        return replace(super().scoring(bucket, plan), decay=self._decay, transform=True)

    def _names(self, orthogonal: bool | Iterable[str]) -> frozenset[str]:
        """Of the compressed parameters with orthogonal averages."""
        everything = frozenset(place.segment.name for place in self.engine.places)
        if isinstance(orthogonal, bool):
            return everything if orthogonal else frozenset()
        if isinstance(orthogonal, str):
            raise TypeError(f"orthogonal must be a bool or a list of names, got {orthogonal!r}")
        names = frozenset(orthogonal)
        if unknown := names - set(self.engine.names):
            raise ValueError(f"orthogonal names parameters that do not exist: {', '.join(sorted(unknown))}")
        return names & everything

    def options(self) -> dict[str, Any]:
        options = super().options()
        # A list of names is not among the base class's options.
        return options if "orthogonal" in options else {**options, "orthogonal": self._orthogonal_text}

    # The averages.

    @property
    def linear(self) -> bool:
        return super().linear and not self._sign and self._decay == 1.0

    def output(self) -> Output:
        return Output(self.scale, transform=True, sign=self._sign and not self._orthogonal)

    def targets(self, bucket: Bucket, plan: Plan) -> list[Tensor]:
        grads = super().targets(bucket, plan)
        if self._orthogonal:  # in float32 until they are orthogonal or signs
            grads = [g if g.dtype == torch.float32 else torch.empty_like(g, dtype=torch.float32) for g in grads]
            self._averages[bucket.index] = grads
        return grads

    def exchange_values(self, bucket: Bucket, plan: Plan) -> Exchange:
        yield from super().exchange_values(bucket, plan)
        if not self._orthogonal:
            return
        averages = self._averages.pop(bucket.index)
        for segment, grad, average in zip(bucket.segments, bucket.targets(), averages, strict=True):
            if not grad.numel():  # none arrived
                continue
            if segment.name in self._orthogonal:
                orthogonalize(average, self.scale)
            else:
                average.copy_(signs(average) * self.scale)
            if grad is not average:
                grad.copy_(average)
            if not self._signs_seen:
                self._largest[segment.name] = grad.abs().amax()

    def entries(self, segment: Segment, part: Tensor) -> Tensor:
        flat = part.clone()
        ops.hadamard(flat)
        return segment.reshaped(flat)

    def coefficients(self, segment: Segment, entries: Tensor, part: Tensor) -> None:
        part.zero_()
        super().coefficients(segment, entries, part)
        ops.hadamard(part)

    # Uncompressed gradients.

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        if self._sign:
            self._dense.update(number, grad, self._dense_momentum, sign=True)
        else:
            super().dense_averaged(number, grad)

    def passed(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse and self._sign:
            raise ValueError("sparse gradients have no sign here: use sparse_as_dense=True, or sign=False")
        return super().passed(tensor)

    def restart(self, bucket: Bucket) -> None:
        super().restart(bucket)
        self._dense.restart()

    def built_with(self) -> dict[str, Any]:
        return {**super().built_with(), "sign": self._sign}

    def method_state(self) -> dict[str, Tree]:
        dense = {"dense_velocity": self._dense.state()} if self._sign else {}
        return {**super().method_state(), **dense}

    # The optimizer.

    def take_momentum(self, optimizer: Optimizer) -> float:
        """With ``sign=False``: see :class:`~hvd_compress.IWP`. Raises ``ValueError`` otherwise."""
        if self._sign:
            raise ValueError("DeMo's momentum is what was not sent: give the optimizer none, momentum=0")
        return super().take_momentum(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        if self._sign:
            self._check_receives_signs(optimizer)
        super().check_optimizer(optimizer)
        # An average that no optimizer has used: Horovod's optimizer calls this before it has one.
        if not self._signs_seen and self.engine.undoable:
            self._check_signs()

    def _check_receives_signs(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` for an optimizer that has a momentum or receives other gradients than signs."""
        engine, given = self.engine, getattr(optimizer, "_compression", None)
        if given not in (None, self):
            raise ValueError(
                "DistributedOptimizer was not given this compressor, so its gradients are not signs: pass compression="
            )
        if not engine.collectives.active:
            raise ValueError(
                "with one process, or outside the process set, Horovod calls no compressor, so the gradients are not "
                "signs: use AdamW there"
            )
        if (engine.collectives.ordered or given is self) and (unknown := engine.unknown_parameters(optimizer)):
            raise ValueError(
                f"{unknown} of the optimizer's parameters were not given to this compressor, so their gradients are "
                "not signs: give it all of the optimizer's named parameters"
            )
        for group in optimizer.param_groups:
            if own := group.get("momentum") or (group.get("betas") or (0.0,))[0]:
                raise ValueError(
                    f"momentum would count twice: DeMo has one of its own, and {type(optimizer).__name__} one of "
                    f"{own:g}; use torch.optim.SGD(parameters, lr, weight_decay=...) without momentum, with the "
                    "learning rate of AdamW"
                )

    def _check_signs(self) -> None:
        """Warns if somebody has scaled the gradients since the exchange. Waits for a GPU: until one step has shown."""

        grads = [grad for place in self.engine.places if (grad := place.segment.parameter.grad) is not None]
        # Horovod makes gradients sparse again that were with sparse_as_dense.
        dense = (grad.to_dense() if grad.is_sparse else grad for grad in grads)
        largest = max((float(grad.abs().max()) for grad in dense), default=0.0)
        if not math.isfinite(largest) or not largest:
            return
        self._signs_seen = True
        written = max(map(float, self._largest.values()), default=self.scale)
        self._largest.clear()
        # A GradScaler may have divided them by its scale.
        if not any(math.isclose(largest, written / scale, rel_tol=1e-3) for scale in (1.0, self.scale)):
            what = "signs or orthogonal matrices" if self._orthogonal else "signs"
            self.engine.warn(
                f"the gradients were {what} after the exchange, and their largest entry is {largest:.3g} now, not "
                f"{written / self.scale:.3g}: do not clip or scale them, which only changes the learning rate, and "
                "give a GradScaler to the compressor (grad_scaler=)"
            )
