"""Decoupled momentum (Peng, Quesnelle & Kingma, DeMo, arXiv 2411.19870), also on a ring."""

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..carriers import shard_group
from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_flag, check_number, find_name, named_pairs
from ..engine.bucket import Bucket, Piece
from ..engine.dense_velocity import DenseVelocity
from ..engine.exchange import Exchange
from ..engine.guard import Facts, Traits
from ..engine.method import Velocities
from ..engine.place import is_large
from ..engine.shards import local, shards
from ..engine.state import Tree
from ..engine.work import Step
from ..selection.base import Output, signs
from ..selection.deciders import Decider
from ..selection.schedule import Density
from .basis import Hadamard
from .matrices import embeddings
from .orthogonal import orthogonalize
from .sharded_matrices import ShardedMatrices
from .sparse import Leading, Sending, SparseMethod, SparseWork


@dataclass(frozen=True)
class _Arguments:
    leading: Leading
    decay: float
    subtract: float
    sign: bool
    dense_momentum: float


@dataclass
class _Written:
    """What was written to gradients, until a step has shown (``seen``) that the optimizer receives it.

    ``largest``: by parameter, the largest entry of a gradient that does not hold signs.
    """

    seen: bool
    largest: dict[str, Tensor] = field(default_factory=dict)

    def show(self, otherwise: float) -> float:
        """A step has shown it. Returns the largest entry of all; ``otherwise``, if all gradients hold signs."""
        self.seen, largest = True, max(map(float, self.largest.values()), default=otherwise)
        self.largest.clear()
        return largest


class DeMo(SparseMethod):
    r"""Decoupled momentum: each rank sends the largest coefficients of its momentum; weights move by averages' signs.

    Implements the published idea of Peng, Quesnelle & Kingma, *DeMo: Decoupled Momentum Optimization* (2024; arXiv
    2411.19870). It replaces AdamW: the momentum is in this object, the optimizer is ``torch.optim.SGD`` without
    momentum, whose weight decay is then decoupled, as AdamW's. On rank i, for one parameter with gradient g_i and m_i,
    the momentum's coefficients; H is the Walsh-Hadamard transform of blocks of 256 entries, orthonormal and its own
    inverse::

        m_i = decay m_i + H g_i
        S   = union over this step's leaders of their largest |m_i|, m of every 256
        q   = mean_i Q(m_i[S]) on S, 0 elsewhere                Q: the codec
        m_i = m_i - subtract Q(m_i[S]) on S, m_i elsewhere
        w   = w - lr (sign(H q) + weight_decay w)               by the optimizer
        orthogonal=: U V^T sqrt(max(rows, columns)) in place of the sign, where H q = U S V^T

    The paper's: a momentum for each rank, from which what is sent is subtracted; the largest coefficients of a
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
        density: coefficients sent in a step as a share of the entries, in (0, 1], or a function of the step
            (:mod:`hvd_compress.schedule`).
        values: how values are encoded: the name of a codec or a codec (:mod:`hvd_compress.codecs`); None for
            ``"lloyd4"`` with the ring, and range-based floats of 10 bits, ``"range10-gather"``, with the gather.
        exchange: ``"ring"`` or ``"gather"``.
        decay: of each rank's momentum, in (0, 1]; None for 0.95 with ``orthogonal="matrices"``, else 0.999.
        subtract: the share of what is sent that leaves the momentum, in (0, 1]; None for 0.2 with
            ``orthogonal="matrices"``, else 1.
        sign: replace averaged gradients by their signs. Without it, a gradient is the average of what was sent, which
            contains gradients of earlier steps, for an optimizer of your choice; uncompressed gradients are plain
            averages.
        orthogonal: compressed parameters whose averages are replaced by the nearest orthogonal matrix instead of their
            signs, as in Muon: ``"matrices"``, all but those of ``torch.nn.Embedding`` (then give the model as
            ``named_parameters``; :func:`~hvd_compress.hidden_matrices` leaves out the head, too), which trains best;
            True for all; or their names, of which those of uncompressed ones
            have no effect. With ``sign`` only. It trains better, computes more (15 matrix products for each parameter
            and step), and needs one type of processor on all ranks. Of sharded parameters, each rank of the shard group
            replaces some whole matrices.
        dense_momentum: of uncompressed gradients, in [0, 1). With ``sign`` only.
        budget_interval: steps between updates of the parameters' shares of a bucket's slots by magnitude; 0 keeps them
            equal.
        warmup_steps: steps over which the density decreases 1/4, 1/16, ... to ``density``.
        momentum: see :class:`~hvd_compress.IWP`. Without ``sign`` only.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.

    Raises:
        ValueError: also, with ``orthogonal``, matrices that are sharded otherwise than by rows; with ``sign``, in the
            optimizer's step: an optimizer with momentum, or with parameters that this compressor was not given;
            Horovod's optimizer without this compressor; a single process, for which Horovod calls no compressor.
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
        warmup_steps: int = 0,
        momentum: float = 0.0,
        **common: Any,
    ) -> None:
        leading = Leading(exchange)
        if decay is None:
            decay = 0.95 if orthogonal == "matrices" else 0.999
        if subtract is None:
            subtract = 0.2 if orthogonal == "matrices" else 1.0
        decay = check_number("decay", decay, above=0, at_most=1)
        subtract = check_number("subtract", subtract, above=0, at_most=1)
        dense_momentum = check_number("dense_momentum", dense_momentum, at_least=0, below=1)
        sign = check_flag("sign", sign)
        if sign and momentum:
            raise ValueError("momentum goes with sign=False: with sign, the momentum is what was not sent")
        if orthogonal and not sign:
            raise ValueError("orthogonal goes with sign=True: without it, gradients are plain averages")
        values = leading.codec(values, ring="lloyd4", gather="range10-gather")
        self._orthogonal, named_parameters = _orthogonal_names(orthogonal, named_parameters)
        self._arguments = _Arguments(leading, decay, subtract, sign, dense_momentum)
        self._written = _Written(seen=not sign)
        common.update(budget_interval=budget_interval, warmup_steps=warmup_steps, momentum=momentum)
        super().__init__(named_parameters, density, values=values, **common)
        nodes = self.engine.nodes
        if self._orthogonal and nodes.inside is not None and nodes.between.size == 1:
            raise ValueError(
                "orthogonal is of compressed averages, and on a single node there are none: leave nodes out"
            )
        self._dense = DenseVelocity(self.engine)
        self._sharded = self._sharded_matrices()
        used = sorted({place.piece.name for place in self.engine.places} & self._orthogonal)
        checksum = zlib.crc32("\n".join(used).encode())
        text = f"{len(used)} parameters, checksum {checksum:08x}" if used else False
        # Made once: options() is called in every step.
        own = {**vars(self._arguments), "orthogonal": text}
        self._own_options: dict[str, object] = {**vars(own.pop("leading")), **own}

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return _DeMoWork(bucket, sending, self._arguments, self._orthogonal, self._written)

    def options(self) -> dict[str, object]:
        return {**super().options(), **self._own_options}

    @property
    def traits(self) -> Traits:
        other, arguments = super().traits, self._arguments
        exact = arguments.decay == arguments.subtract == 1.0
        linear = other.linear and not arguments.sign and exact
        return replace(other, linear=linear, signs=arguments.sign, exact=exact)

    def state(self) -> dict[str, Tree]:
        dense = {"dense_velocity": self._dense.state()} if self._arguments.sign else {}
        return {**super().state(), **dense}

    def made_with(self) -> dict[str, Any]:
        return {**super().made_with(), "sign": self._arguments.sign}

    def restart(self) -> None:
        super().restart()
        self._dense.restart()

    # Averages of shards.

    def _sharded_matrices(self) -> ShardedMatrices | None:
        engine = self.engine
        named = enumerate(zip(engine.names, engine.parameters, strict=True))
        found = [(number, name, p) for number, (name, p) in named if name in self._orthogonal and p.requires_grad]
        found = [(number, name, p) for number, name, p in found if shards(p) > 1 and is_large(p, engine.min_numel)]
        group = shard_group(p for *_, p in found)
        return None if group is None else ShardedMatrices(group, found, engine.stats, engine.exchanges.label)

    def exchanged(self) -> None:
        if self._sharded is None:
            return
        device, averages = local(self.engine.parameters[0]).device, dict[str, Tensor]()
        works = cast(list[_DeMoWork], self.works)
        for work in works:
            with work.bucket.order:
                averages |= work.divided
        rows = self._sharded.orthogonalize(averages, self.engine.scale, device)
        for work in works:
            with work.bucket.order:
                work.replace_divided(rows)

    # Uncompressed gradients.

    def dense_averaged(self, number: int, grad: Tensor) -> None:
        if self._arguments.sign:
            self._dense.update(number, grad, self._arguments.dense_momentum, sign=True)
        else:
            super().dense_averaged(number, grad)

    def passed(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse and self._arguments.sign:
            raise ValueError("sparse gradients have no sign here: use sparse_as_dense=True, or sign=False")
        return super().passed(tensor)

    @property
    def velocities(self) -> Velocities | None:
        return self._dense if self._arguments.sign else super().velocities

    # The optimizer.

    def take_momentum(self, optimizer: Optimizer) -> float:
        """With ``sign=False``: see :class:`~hvd_compress.IWP`. Raises ``ValueError`` otherwise."""
        if self._arguments.sign:
            raise ValueError("DeMo's momentum is what was not sent: give the optimizer none, momentum=0")
        return super().take_momentum(optimizer)

    def check_optimizer(self, facts: Facts) -> None:
        super().check_optimizer(facts)
        # An average that no optimizer has used: Horovod's optimizer calls this before it has one.
        if not self._written.seen and self.engine.undoable:
            self._check_signs()

    def _check_signs(self) -> None:
        """Warns if somebody has scaled the gradients since the exchange. Waits for a GPU: until one step has shown."""
        scale = self.engine.scale
        pieces = (piece for work in self.works for piece in work.bucket.pieces)
        grads = [grad for piece in pieces if (grad := piece.parameter.grad) is not None]
        # Horovod makes gradients sparse again that were with sparse_as_dense.
        dense = (grad.to_dense() if grad.is_sparse else local(grad) for grad in grads)
        largest = max((float(grad.abs().max()) for grad in dense), default=0.0)
        if not math.isfinite(largest) or not largest:
            return
        written = self._written.show(otherwise=scale)
        # A GradScaler may have divided them by its scale.
        if not any(math.isclose(largest, written / factor, rel_tol=1e-3) for factor in (1.0, scale)):
            what = "signs or orthogonal matrices" if self._orthogonal else "signs"
            self.engine.warn(
                f"the gradients were {what} after the exchange, and their largest entry is {largest:.3g} now, not "
                f"{written / scale:.3g}: do not clip or scale them, which only changes the learning rate, and "
                "give a GradScaler to the compressor (grad_scaler=)"
            )


class _DeMoWork(SparseWork):
    def __init__(
        self,
        bucket: Bucket,
        sending: Sending,
        arguments: _Arguments,
        orthogonal: frozenset[str],
        written: _Written,
    ) -> None:
        self._arguments, self._written = arguments, written
        #: Averages of this rank's rows of orthogonal matrices, by name.
        self.divided = dict[str, Tensor]()
        self._orthogonal = {piece.name for piece in bucket.pieces} & orthogonal
        sign, decay = arguments.sign, arguments.decay
        super().__init__(bucket, sending, basis=Hadamard(bucket), finds_idle=sign, decay=decay)

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.divided.clear()

    def decide(self, slots: list[int]) -> Decider:
        return self._arguments.leading.decide(self, slots)

    def unsent(self, sent: Tensor, error: Tensor) -> Tensor:
        share = self._arguments.subtract
        return error if share == 1.0 else torch.lerp(sent, error, share)

    def output(self) -> Output:
        return Output(self.step.scale, transform=True, sign=self._arguments.sign and not self._orthogonal)

    def exchange(self) -> Exchange:
        importance, bucket, given = self.due_importance(), self.bucket, self.bucket.gradients
        if self._orthogonal:  # in float32 until they are orthogonal or signs
            wide = [g if g.dtype == torch.float32 else torch.empty_like(g, dtype=torch.float32) for g in given]
            bucket.replace_gradients(wide)
        yield from self.send()
        if self._orthogonal:
            self._replace(bucket.gradients, given)
            bucket.replace_gradients(given)
        yield from self.share_slots(importance)

    def _replace(self, averages: list[Tensor], grads: list[Tensor]) -> None:
        """Writes what replaces the averages to the gradients: orthogonal matrices, or signs."""
        for piece, average, grad in zip(self.bucket.pieces, averages, grads, strict=True):
            if not grad.numel():  # none arrived
                continue
            if piece.name not in self._orthogonal:
                average.copy_(signs(average) * self.step.scale)
            elif shards(piece.parameter) > 1:
                self.divided[piece.name] = average
                continue
            else:
                orthogonalize(average, self.step.scale)
            self._write(piece, average, grad)

    def replace_divided(self, rows: dict[str, Tensor]) -> None:
        """Writes what replaces this rank's rows of orthogonal matrices to the gradients."""
        for piece, grad in zip(self.bucket.pieces, self.bucket.gradients, strict=True):
            if piece.name in self.divided:
                self._write(piece, rows[piece.name], grad)
        self.divided.clear()

    def _write(self, piece: Piece, average: Tensor, grad: Tensor) -> None:
        if grad is not average:
            grad.copy_(average)
        if not self._written.seen:
            self._written.largest[piece.name] = grad.abs().amax()


def _orthogonal_names(
    orthogonal: bool | str | Iterable[str], named_parameters: NamedParameters
) -> tuple[frozenset[str], list[tuple[str, torch.nn.Parameter]]]:
    """The names of the parameters with orthogonal averages, and all named parameters."""
    named = named_pairs(named_parameters, "DeMo(model)")
    names = frozenset(name for name, _ in named)
    if isinstance(orthogonal, bool):
        return names if orthogonal else frozenset(), named
    if orthogonal == "matrices":
        if not isinstance(named_parameters, torch.nn.Module):
            raise ValueError(
                'orthogonal="matrices" needs the model, to tell embeddings: give it in place of its named parameters'
            )
        tables = embeddings(named_parameters)
        return frozenset(name for name, p in named if id(p) not in tables), named
    known = isinstance(orthogonal, Iterable) and not isinstance(orthogonal, str)
    listed: list[Any] = list(orthogonal) if known else [orthogonal]
    if not known or not all(isinstance(name, str) for name in listed):
        raise TypeError(f'orthogonal must be a bool, "matrices" or a list of names, got {orthogonal!r:.80}')
    chosen = {name: find_name(name, names) for name in listed}
    if unknown := [name for name, found in chosen.items() if found is None]:
        raise ValueError(f"orthogonal names parameters that do not exist: {', '.join(sorted(unknown))}")
    return frozenset(filter(None, chosen.values())), named
