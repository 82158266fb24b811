"""Layer-wise significance and distribution-based encoding (MIPD: Zhang & Wang, TPDS 33(11), 2022)."""

from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_number
from ..engine.bucket import Bucket, Piece
from ..engine.exchange import Exchange
from ..engine.state import TensorLeaf, Tree
from ..engine.work import Part, Step
from ..methods.sparse import SparseMethod
from ..methods.sparse_work import Sending, SparseWork, totals
from ..reference import BLOCK
from ..selection.base import Average
from ..selection.deciders import Shared
from ..selection.pickers import Blocks
from ..selection.schedule import Density
from .history import GradientHistory, flat_weights, root_mean_squares

# Weight of the past in the smoothed gradient, and the constants under |w| and |e| in units of their root mean square.
_SMOOTHING, _FLOOR = 0.9, 0.5


class MIPD(SparseMethod):
    r"""MIPD: entries are selected by a significance that all ranks compute from shared state; no indices are sent.

    Implements the published idea of Zhang & Wang, *MIPD: An Adaptive Gradient Sparsification Framework for Distributed
    DNNs Training* (IEEE TPDS 33(11), 2022). On rank i, for one parameter with gradient g_i and residual r_i; weights w,
    smoothed average gradient e (per step) and t, the steps since an entry was last sent, are equal on all ranks::

        a_i = r_i + g_i                                         with momentum u_i instead of g_i, as in IWP
        s   = (|w| + rms(w) / 2) (|e| + rms(e) / 2) t           significance
        S   = the m largest s of every 256, in that half of the layer whose turn it is
        g   = mean_i Q(a_i[S]) on S, 0 elsewhere                Q: the codec
        r_i = a_i - Q(a_i[S]) on S, a_i elsewhere
        e   = 0.9 e + 0.1 (received value / t)                  on S

    The paper's: significance by the model's interpretability; layers' shares (``budget_interval``); half of the
    parameters a step; exponential smoothing; each layer encoded by its own distribution. Ours: first-order attribution,
    ``|w e|``, as significance, from shared state; the factor t, without which the same few entries would be selected in
    every step; halves as first and last blocks of a layer; the residual, where the paper compensates unsent entries
    by smoothed gradients; the codecs.

    In each step the ranks compare seed, step, options and a hash of the selected entries, and raise an error if they
    differ (on a GPU in every hundredth step, since the comparison synchronises it).

    Example::

        compression = hvd_compress.MIPD(model, density=1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compression.take_momentum(optimizer)  # better accuracy
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: entries sent in a step as a share of all. Above 1/2 there are no halves; just below 1/2, a layer sends
            at most as many entries as its smaller half has.
        values: how values are encoded. Lanes and Lloyd-Max codebooks fit each layer's distribution.
        explore: share of the blocks in which entries are drawn at random in proportion to significance, in [0, 1].

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 64,
        *,
        values: str | Codec = "lanes4",
        explore: float = 0.05,
        budget_interval: int = 100,
        **common: Any,
    ) -> None:
        self._explore = check_number("explore", explore, at_least=0, at_most=1)
        super().__init__(named_parameters, density, values=values, budget_interval=budget_interval, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return _MIPDWork(bucket, sending, self._explore)

    def options(self) -> dict[str, object]:
        return {**super().options(), "explore": self._explore}


class _Constants(Part):
    def __init__(self, bucket: Bucket, history: GradientHistory) -> None:
        self._bucket, self._history = bucket, history
        self._memory = torch.zeros(2, len(bucket.pieces), dtype=torch.float32, device=bucket.device)
        (self.weights, self.smoothed), self._known = self._memory.unbind(), False

    def begin(self, step: Step) -> None:
        known, self._known = self._known, True
        # Often at first, while the smoothed gradient changes fast. A converted state has no constants.
        due = step.number & (step.number - 1) == 0 or step.number % 64 == 0
        if due or not (known or bool(self.weights.any())):
            sizes = root_mean_squares(self._bucket, flat_weights(self._bucket), self._history.smoothed)
            torch.mul(torch.stack(sizes), _FLOOR, out=self._memory)

    def restart(self) -> None:
        self._memory.zero_()
        self._known = False

    def state(self) -> Tree:
        rows = zip(self._bucket.pieces, self.weights, self.smoothed, strict=True)
        return {p.name: {"weight": TensorLeaf(w, low=0.0), "smoothed": TensorLeaf(s, low=0.0)} for p, w, s in rows}


class _MIPDWork(SparseWork):
    def __init__(self, bucket: Bucket, sending: Sending, explore: float) -> None:
        self._explore = explore
        self._history = GradientHistory(bucket, _SMOOTHING)
        self._floors = _Constants(bucket, self._history)
        super().__init__(bucket, sending, floors=self._floors, history=self._history)

    def decide(self, slots: list[int]) -> Shared:
        return self.shared((Halves if self.density <= 0.5 else Blocks)(self.bucket, slots))

    def most_slots(self) -> list[int]:
        if self.density > 0.5:
            return super().most_slots()
        return [min(len(entries_of(p.weight(), half(p, turn))) for turn in range(2)) for p in self.bucket.pieces]

    def significance(self, index: int, blocks: range) -> Tensor:
        """The significance of a piece's entries in ``blocks``, in memory order: float32, (entries,), the same bits on
        all ranks."""
        piece, floors, history = self.bucket.pieces[index], self._floors, self._history
        weight = entries_of(piece.weight(), blocks)
        smoothed, last = (entries_of(piece.of(x), blocks)[: len(weight)] for x in (history.smoothed, history.last_sent))
        score = smoothed.abs() + floors.smoothed[index]
        score.mul_(weight.float().abs() + floors.weights[index])
        return score.mul_(self.step.number - last)

    def importance(self) -> Tensor:
        return totals(self.significance(index, range(piece.blocks)) for index, piece in enumerate(self.bucket.pieces))

    def send(self) -> Exchange:
        picker = self.decider.picker
        if isinstance(picker, Blocks):
            halves = picker.halves if isinstance(picker, Halves) else [range(p.blocks) for p in self.bucket.pieces]
            picker.pick_by([self.significance(i, blocks) for i, blocks in enumerate(halves)], self._explore)  # S
        yield from super().send()
        self._history.update(picker, self.values.channel.mean, self.step.number)


class Halves(Blocks):
    """m of every 256 entries of ``halves``: of each piece in turn the first and the last half of its blocks, and of
    neighbouring pieces different ones."""

    def __init__(self, bucket: Bucket, slots: list[int]) -> None:
        super().__init__(bucket, slots)
        self._turns = []
        for turn in range(2):
            halves = [half(piece, (turn + index) % 2) for index, piece in enumerate(bucket.pieces)]
            pairs = zip(bucket.pieces, halves, strict=True)
            table = self.table_of((piece.first_block + blocks.start, len(blocks)) for piece, blocks in pairs)
            self._turns.append((halves, table, table.cpu()))

    def begin(self, step: Step) -> None:
        super().begin(step)
        self.halves, self.table, self.rows = self._turns[step.number % 2]

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        pairs = zip(targets, self.halves, strict=True)
        super().scatter([entries_of(t, blocks) if t.numel() else t for t, blocks in pairs], velocity, average)


def half(piece: Piece, turn: int) -> range:
    """The first (0) or the last (1) half of a piece's blocks, counted in the piece. A single block is both halves."""
    early = piece.blocks // 2
    return range(early * turn, piece.blocks if turn or not early else early)


def entries_of(target: Tensor, blocks: range) -> Tensor:
    """The entries of these blocks in a tensor of the whole piece, in memory order: a view."""
    return target.as_strided((target.numel(),), (1,))[blocks.start * BLOCK : blocks.stop * BLOCK]
