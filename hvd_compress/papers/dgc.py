"""Deep Gradient Compression (Lin et al., ICLR 2018): top-k with momentum correction."""

from typing import Any

from ..codecs import Codec, gather_codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket
from ..methods.sparse import SparseMethod
from ..methods.sparse_work import Sending, SparseWork
from ..methods.topk import TopKWork
from ..selection.schedule import Density

#: The share of a parameter's entries from which the threshold is estimated, of at least 64. The paper's is 0.1 to 1 %.
_SAMPLE = 0.01


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

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return TopKWork(bucket, sending, _SAMPLE)
