"""Top-k with error feedback (Aji & Heafield, 2017)."""

from typing import Any

from ..codecs import Codec
from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket
from ..selection.each_rank import EachRank, Exact
from ..selection.schedule import Density
from .gathering import GatherWork, gather_codec
from .sparse import SparseMethod
from .sparse_work import Sending


class TopK(SparseMethod):
    r"""Top-k sparsification with error feedback: every rank sends its largest entries to all others.

    Implements Aji & Heafield, *Sparse Communication for Distributed Gradient Descent* (EMNLP 2017), with the error
    feedback whose convergence Stich, Cordonnier & Jaggi, *Sparsified SGD with Memory* (NeurIPS 2018), prove. On rank i,
    for each parameter with gradient g_i and residual r_i::

        a_i = r_i + g_i
        S_i = the k entries of largest |a_i|               a different set on each rank
        g   = mean_i of Q(a_i[S_i]) on S_i, 0 elsewhere    Q: the codec
        r_i = a_i - Q(a_i[S_i]) on S_i, a_i elsewhere

    k is the parameter's share of the density times its bucket, at least 1. Two allgathers carry indices, of four bytes,
    and values. The papers encode indices in fewer bytes.

    Example::

        compression = hvd_compress.TopK(model, density=1 / 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        compression.take_momentum(optimizer)  # better accuracy
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: k as a share of a parameter's entries.
        values: a gathered codec, such as ``"fp16-gather"``.

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 256,
        *,
        values: str | Codec = "fp32-gather",
        **common: Any,
    ) -> None:
        super().__init__(named_parameters, density, values=gather_codec(values), **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> GatherWork:
        return _TopKWork(bucket, sending)


class _TopKWork(GatherWork):
    def decide(self, slots: list[int]) -> EachRank:
        return self.each_rank(Exact(self.bucket, slots))
