"""Importance-weighted pruning on ring allreduce (Cheng & Xu, arXiv 1901.01544)."""

from typing import Any

import torch

from ..codecs import Codec
from ..engine.arguments import NamedParameters, check_flag, check_integer, check_number
from ..engine.bucket import Bucket
from ..engine.state import TensorLeaf, Tree
from ..engine.work import Part, Step
from ..selection.base import Scoring
from ..selection.schedule import Density
from .sparse import SparseMethod
from .sparse_work import Sending, SparseWork

# The constant added to the weights, in units of mean|w|.
_FLOOR = 0.5
# Keeps the scores of an all-zero parameter finite.
_TINY = 1e-12
# Steps between measurements of mean|w|, which changes slowly.
_FLOOR_INTERVAL = 100


class IWP(SparseMethod):
    r"""Importance-weighted pruning: all ranks send the same few entries, selected by leaders drawn at random.

    Implements the published idea of Cheng & Xu, *Bandwidth Reduction using Importance Weighted Pruning on Ring
    AllReduce* (arXiv 1901.01544). On rank i, for one parameter with weights w (equal on all ranks), gradient g_i and
    residual r_i::

        m_i = mean of g_i over each block of 256      with block_means, else 0
        u_i = momentum u_i + (g_i - m_i)              with momentum, else g_i - m_i
        a_i = r_i + u_i
        I_i = |a_i| / (|w| + mean|w| / 2)             importance
        S   = union over this step's leaders of their largest I_i, block by block
        g   = mean_i Q(a_i[S]) on S, 0 elsewhere      Q: the codec
        g   = g + mean_i Q(m_i) everywhere            m_i with its own momentum and its own quantization error
        r_i = a_i - Q(a_i[S]) on S, a_i elsewhere;  u_i[S] = 0      (not at density 1, where nothing is delayed)

    One allgather carries the indices of all leaders, one allreduce the values and block means.

    The paper's: the importance; indices from nodes drawn at random (here an order of the ranks, drawn in each step);
    the sum of the same few entries on the ring; layers' shares (``budget_interval``); a chance for entries below the
    threshold (``explore``; its form is ours). Ours: the m largest of every 256 entries; ``mean|w| / 2``, which keeps
    weights near zero from being selected in every step; block means. Error feedback, momentum correction and the
    warm-up of the density are DGC's.

    Example::

        compression = hvd_compress.IWP(model, density=1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compression.take_momentum(optimizer)  # better accuracy
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: slots as a share of the entries. Where two leaders select one entry, fewer are sent.
        leaders: how many ranks, on average, select the entries of one block; None for all.
        explore: share of the blocks in which entries are drawn at random in proportion to importance, in [0, 1].
        block_means: send the mean of every block in each step, one more value per 256 entries (``docs/methods.md``).

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 32,
        *,
        values: str | Codec = "lanes4",
        leaders: int | None = None,
        explore: float = 0.05,
        block_means: bool = True,
        budget_interval: int = 100,
        **common: Any,
    ) -> None:
        self._leaders = None if leaders is None else check_integer("leaders", leaders, 1, other="None for all ranks")
        self._explore = check_number("explore", explore, at_least=0, at_most=1)
        self._ordered = self._means = check_flag("block_means", block_means)
        super().__init__(named_parameters, density, values=values, budget_interval=budget_interval, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        floors = _Floors(bucket)
        scoring = Scoring(self._explore, floors.values)
        return SparseWork(bucket, sending, scoring=scoring, leaders=self._leaders, means=self._means, floors=floors)

    def options(self) -> dict[str, object]:
        own = {"leaders": self._leaders, "explore": self._explore, "block_means": self._means}
        return {**super().options(), **own}

    def made_with(self) -> dict[str, Any]:
        return {"block means": self._means, **super().made_with()}


class _Floors(Part):
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.values, self._known = torch.zeros(len(bucket.pieces), dtype=torch.float32, device=bucket.device), False

    def begin(self, step: Step) -> None:
        known, self._known = self._known, True
        # A converted state has no floors.
        if step.number % _FLOOR_INTERVAL == 0 or not (known or bool(self.values.any())):
            means = [piece.weight().abs().mean(dtype=torch.float32) for piece in self._bucket.pieces]
            # Weights may not be finite in this step and restored in the next.
            self.values.copy_(torch.stack(means).nan_to_num(nan=0.0, posinf=0.0) * _FLOOR + _TINY)

    def restart(self) -> None:
        self.values.zero_()
        self._known = False

    def state(self) -> Tree:
        # A rank selects by its own; they may differ in the last bit.
        pairs = zip(self._bucket.pieces, self.values, strict=True)
        return {piece.name: TensorLeaf(floor, low=0.0, per_rank=True) for piece, floor in pairs}
