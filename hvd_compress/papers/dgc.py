"""Deep Gradient Compression (Lin et al., ICLR 2018): top-k with momentum correction."""

import math
from typing import Any

from torch import Tensor

from ..codecs import Codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket
from ..methods.gathering import GatherWork, gather_codec
from ..methods.sparse import SparseMethod
from ..methods.sparse_work import Sending
from ..selection.each_rank import EachRank, Exact
from ..selection.schedule import Density

# The share of a parameter's entries from which the threshold is estimated, and the fewest. The paper's is 0.1 to 1 %.
_SAMPLE, _MIN_SAMPLE = 0.01, 64
# The threshold lets this many times more entries through than needed, so that they are seldom too few.
_MARGIN = 1.3


class DGC(SparseMethod):
    r"""Deep Gradient Compression: top-k with momentum correction, factor masking, a sampled threshold and a warm-up.

    Implements Lin, Han, Mao, Wang & Dally, *Deep Gradient Compression: Reducing the Communication Bandwidth for
    Distributed Training* (ICLR 2018). On rank i, for each parameter, with velocity u_i and residual v_i::

        u_i = momentum u_i + g_i                            momentum correction
        v_i = v_i + u_i
        S_i = the k entries of largest |v_i|                of those above a threshold, from a sample of 1 %
        g   = mean_i of Q(v_i[S_i]) on S_i, 0 elsewhere     Q: the codec
        v_i = v_i - Q(v_i[S_i]) on S_i;  u_i[S_i] = 0       momentum factor masking

    Ours: the exact k largest of those above the threshold, which lets 1.3 times as many through as are wanted, and of
    all entries if there are too few. Without the paper's clipping of each rank's gradient. The rest is the paper's.

    The optimizer's own momentum must be 0: :meth:`take_momentum` moves it here.

    Example::

        compression = hvd_compress.DGC(model, density=1 / 64, momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: k as a share of a parameter's entries; the paper's is 1/1000.
        warmup_steps: the paper's are four epochs.
        values: a gathered codec.

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 1000,
        *,
        momentum: float = 0.9,
        values: str | Codec = "fp32-gather",
        **common: Any,
    ) -> None:
        super().__init__(named_parameters, density, values=gather_codec(values), momentum=momentum, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> GatherWork:
        return _DGCWork(bucket, sending)


class _DGCWork(GatherWork):
    def decide(self, slots: list[int]) -> EachRank:
        return self.each_rank(Sampled(self.bucket, slots))


class Sampled(Exact):
    """The largest entries of every piece: a sample gives a threshold, and only the entries above it are sorted. (Their
    number depends on the data, so this synchronises a GPU.)"""

    def largest(self, score: Tensor, count: int) -> Tensor:
        if not count:
            return super().largest(score, count)
        stride = max(1, score.numel() // max(round(_SAMPLE * score.numel()), _MIN_SAMPLE))
        sampled = score[self.phase % stride :: stride]
        rank = min(math.ceil(_MARGIN * count * sampled.numel() / score.numel()), sampled.numel())
        above = (score >= sampled.topk(rank).values[-1]).nonzero().view(-1)
        if above.numel() < count:
            return super().largest(score, count)
        return above[score[above].topk(count).indices]
