"""Decoupled momentum (Peng, Quesnelle & Kingma, DeMo, arXiv 2411.19870), also on a ring."""

import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_flag, check_number
from ..engine.bucket import Bucket, Piece
from ..engine.facts import OptimizerFacts, Traits
from ..engine.method import Velocities
from ..engine.shards import shards
from ..engine.state import Tree
from ..guards.scaled_signs import ScaledSigns
from ..selection.base import signs
from ..selection.schedule import Density
from .basis import Coefficients
from .gathering import exchanged_codec, exchanged_work
from .matrices import orthogonal_names
from .orthogonal import orthogonalize
from .sparse import SparseMethod
from .sparse_work import Sending, SparseWork


class DeMo(SparseMethod):
    r"""Decoupled momentum: each rank sends the largest coefficients of its momentum; weights move by averages' signs.

    Implements the published idea of Peng, Quesnelle & Kingma, *DeMo: Decoupled Momentum Optimization* (2024; arXiv
    2411.19870). It replaces AdamW: the momentum is in this object, the optimizer is ``torch.optim.SGD`` without
    momentum, whose weight decay is then decoupled, as AdamW's. On rank i, for one parameter with gradient g_i and m_i,
    the momentum's coefficients; H is the Walsh-Hadamard transform of blocks of 256 entries, orthonormal and its own
    inverse::

        m_i = decay m_i + H g_i
        S   = union over all ranks of their largest |m_i|, m of every 256
        q   = mean_i Q(m_i[S]) on S, 0 elsewhere                Q: the codec
        m_i = m_i - subtract Q(m_i[S]) on S, m_i elsewhere
        w   = w - lr (sign(H q) + weight_decay w)               by the optimizer
        orthogonal=: U V^T sqrt(max(rows, columns)) in place of the sign, where H q = U S V^T

    The paper's: a momentum for each rank, from which the payload is subtracted; the largest coefficients of a
    transform; the sign; ``exchange="gather"``, where every rank sends its own coefficients to all, and the bytes grow
    with the ranks. Its second version's (2411.19870v2): ``subtract``, there alpha, and the choice of Muon's update,
    here ``orthogonal``: the Newton-Schulz iteration of Jordan et al., *Muon* (2024), scaled to root mean square 1.
    Ours: leaders and the ring; Walsh-Hadamard in place of a DCT, since additions give the same bits on all processors;
    codebooks of 4 bits; the sign of a momentum of their own for uncompressed gradients.

    Do not clip gradients: after the exchange they are signs or orthogonal matrices, whose norm depends on their size
    only. Clipping raises a warning. Learning rates are as for AdamW.

    Example::

        compression = hvd_compress.DeMo(model, orthogonal="matrices")
        optimizer = torch.optim.SGD(model.parameters(), lr=6e-3, weight_decay=0.01)  # in AdamW's place
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: coefficients sent in a step as a share of the entries.
        values: None for ``"lloyd4"`` with the ring, and range-based floats of 10 bits, ``"range10-gather"``, with the
            gather.
        exchange: ``"ring"`` or ``"gather"``.
        decay: of each rank's momentum, in (0, 1]; None for 0.95 with ``orthogonal="matrices"``, else 0.999.
        subtract: the share of the payload that leaves the momentum, in (0, 1]; None for 0.2 with
            ``orthogonal="matrices"``, else 1.
        sign: replace averaged gradients by their signs. Without it, a gradient is the average of the payloads, which
            contains gradients of earlier steps, for an optimizer of your choice; uncompressed gradients are plain
            averages.
        orthogonal: compressed parameters whose averages are replaced by the nearest orthogonal matrix instead of their
            signs, as in Muon: ``"matrices"``, all but those of ``torch.nn.Embedding`` (then give the model as
            ``named_parameters``; :func:`~hvd_compress.hidden_matrices` leaves out the head, too), which trains best;
            True for all; or a list of names. With ``sign`` only. It trains better, computes more (15 matrix products
            for each parameter and step), and needs one type of processor on all ranks.
        dense_momentum: of uncompressed gradients, in [0, 1). With ``sign`` only.
        momentum: without ``sign`` only.

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.

    Raises:
        ValueError: also, with ``orthogonal``, a sharded matrix (FSDP2); with ``sign``, in the optimizer's step: an
            optimizer with momentum, or with parameters that this compressor was not given; Horovod's optimizer without
            this compressor; a single process, for which Horovod calls no compressor.
    """

    _ordered = True

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 16,
        *,
        values: str | Codec | None = None,
        exchange: str = "ring",
        decay: float | None = None,
        subtract: float | None = None,
        sign: bool = True,
        orthogonal: bool | str | Iterable[str] = False,
        dense_momentum: float = 0.9,
        budget_interval: int = 100,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        muon = orthogonal == "matrices"
        self._sign = sign = check_flag("sign", sign)
        if sign and momentum:
            raise ValueError("momentum goes with sign=False: with sign, the momentum is what was not sent")
        if orthogonal and not sign:
            raise ValueError("orthogonal goes with sign=True: without it, gradients are plain averages")
        values = exchanged_codec(exchange, values, ring="lloyd4", gather="range10-gather")
        names, named_parameters = orthogonal_names(orthogonal, named_parameters)
        self._exchange, self._names = exchange, names
        self._received = ScaledSigns("signs or orthogonal matrices" if names else "signs")
        decay = (0.95 if muon else 0.999) if decay is None else decay
        subtract = (0.2 if muon else 1.0) if subtract is None else subtract
        self._decay = check_number("decay", decay, above=0, at_most=1)
        self._subtract = check_number("subtract", subtract, above=0, at_most=1)
        self._dense_momentum = check_number("dense_momentum", dense_momentum, at_least=0, below=1)
        common |= {"budget_interval": budget_interval, "momentum": momentum}
        super().__init__(named_parameters, density, values=values, **common)
        nodes = self.engine.nodes
        if names and nodes.inside is not None and nodes.between.size == 1:
            raise ValueError(
                "orthogonal is of compressed averages, and on a single node there are none: leave nodes out"
            )
        found = {piece.name: piece.parameter for bucket in self.buckets for piece in bucket.pieces}
        used = sorted(found.keys() & names)
        if divided := [name for name in used if shards(found[name]) > 1]:
            raise ValueError(
                f"orthogonal needs whole matrices, and {divided[0]} is sharded: use hvd_compress.recipes.low_bit with "
                "torch.optim.Muon, or signs, without orthogonal"
            )
        checksum = zlib.crc32("\n".join(used).encode())
        self._shown["orthogonal"] = f"{len(used)} parameters, checksum {checksum:08x}" if used else False

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        basis, sign = Hadamard(bucket), self._sign  # written by the operators
        if not self._names.isdisjoint(piece.name for piece in bucket.pieces):
            basis, sign = _Replaced(bucket, self._names, self._received), False
        return exchanged_work(self._exchange)(
            bucket, sending, basis=basis, finds_idle=self._sign, decay=self._decay, subtract=self._subtract, sign=sign
        )

    def options(self) -> dict[str, object]:
        own = {"exchange": self._exchange, "decay": self._decay, "subtract": self._subtract, "sign": self._sign}
        return {**super().options(), **own, "dense_momentum": self._dense_momentum}

    @property
    def traits(self) -> Traits:
        other, conserving = super().traits, self._decay == self._subtract == 1.0
        linear = other.linear and not self._sign and conserving
        return replace(other, linear=linear, fixed_size=self._sign, conserving=conserving)

    def state(self) -> dict[str, Tree]:
        return {**super().state(), **({"dense_velocity": self.momentum.state()} if self._sign else {})}

    def made_with(self) -> dict[str, Any]:
        return {**super().made_with(), "sign": self._sign}

    # Uncompressed gradients.

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        if self._sign:
            self.momentum.update(number, grad, self._dense_momentum, sign=True)
        else:
            super().dense_averaged(number, grad)

    def passed(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse and self._sign:
            raise ValueError("sparse gradients have no sign here: use sparse_as_dense=True, or sign=False")
        return super().passed(tensor)

    @property
    def velocities(self) -> Velocities | None:
        return self.momentum if self._sign else super().velocities

    # The optimizer.

    def take_momentum(self, optimizer: Optimizer) -> float:
        if self._sign:
            raise ValueError("DeMo's momentum is what was not sent: give the optimizer none, momentum=0")
        return super().take_momentum(optimizer)

    def check_optimizer(self, facts: OptimizerFacts) -> None:
        super().check_optimizer(facts)
        if self._sign and self.engine.clock.undoable:  # Horovod's calls it before an average, too
            self._received.check(self.engine)


class Hadamard(Coefficients):
    """Coefficients of the Walsh-Hadamard transform of each block (:func:`hvd_compress.reference.hadamard`)."""

    transform = True

    def entries(self, piece: Piece, part: Tensor) -> Tensor:
        flat = part.clone()
        ops.hadamard(flat)
        return piece.reshaped(flat)

    def write(self, piece: Piece, entries: Tensor, part: Tensor) -> None:
        part.zero_()
        piece.reshaped(part).copy_(entries)
        ops.hadamard(part)


class _Replaced(Hadamard):
    """Averages of parameters with these ``names`` become orthogonal, the others' their signs: after they are written,
    in float32 until then. The result is reported to ``received``."""

    def __init__(self, bucket: Bucket, names: frozenset[str], received: ScaledSigns) -> None:
        super().__init__(bucket)
        self._names, self._received = names, received

    def targets(self, grads: list[Tensor]) -> list[Tensor]:
        return [g if g.dtype == torch.float32 else torch.empty_like(g, dtype=torch.float32) for g in grads]

    def leave(self, targets: list[Tensor], grads: list[Tensor], scale: float) -> None:
        for piece, average, grad in zip(self._bucket.pieces, targets, grads, strict=True):
            if not grad.numel():  # none arrived
                continue
            if piece.name in self._names:
                orthogonalize(average, scale)
            else:
                average.copy_(signs(average) * scale)
            if grad is not average:
                grad.copy_(average)
            self._received.written(piece.name, grad)
