"""Deep Gradient Compression (Lin et al., ICLR 2018): top-k with momentum correction."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..codecs import Codec, gather_codec
from ..engine.arguments import NamedParameters, check_number
from ..engine.bucket import Bucket
from ..methods.sparse import SparseMethod
from ..methods.sparse_work import Sending, SparseWork
from ..methods.topk import TopKWork
from ..selection.schedule import Density


@dataclass(frozen=True)
class _Arguments:
    sample: float
    clip_norm: float | None


class DGC(SparseMethod):
    r"""Deep Gradient Compression: top-k with momentum correction, factor masking, a sampled threshold and a warm-up.

    Implements Lin, Han, Mao, Wang & Dally, *Deep Gradient Compression: Reducing the Communication Bandwidth for
    Distributed Training* (ICLR 2018). On rank i of N, for each parameter, with velocity u_i and residual v_i::

        u_i = momentum u_i + g_i min(1, clip_norm / (sqrt(N) |g_i|))     momentum correction, local clipping
        v_i = v_i + u_i
        S_i = the k entries of largest |v_i|                             of those above a sampled threshold
        g   = mean_i of Q(v_i[S_i]) on S_i, 0 elsewhere                  Q: the codec
        v_i = v_i - Q(v_i[S_i]) on S_i;  u_i[S_i] = 0                    momentum factor masking

    Ours: the norm of one parameter where the paper clips by that of the whole gradient (a hook sees one parameter at a
    time; uncompressed tensors are not clipped); the exact k largest of those above the threshold, which lets 1.3 times
    as many through as are wanted, and of all entries if there are too few. The rest is the paper's.

    The optimizer's own momentum must be 0: :meth:`take_momentum` moves it here.

    Example::

        compression = hvd_compress.DGC(model, density=1 / 64, momentum=0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without momentum
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        density: k as a share of a parameter's entries; the paper's is 1/1000.
        sample: the share of a parameter's entries from which the threshold is estimated, in (0, 1]; the paper's is 0.1
            to 1 %. At least 64 entries are sampled. The entries above the threshold are then sorted exactly.
        clip_norm: the largest norm of each parameter's gradient over the whole batch: a rank's gradient is clipped to
            ``clip_norm / sqrt(ranks)``, before momentum correction. None does not clip.
        warmup_steps: the paper's are four epochs.
        values: a gathered codec.

    Other arguments, and errors: see :class:`~hvd_compress.methods.sparse.SparseMethod`.
    """

    arguments: _Arguments

    def __init__(
        self,
        named_parameters: NamedParameters,
        density: float | Density = 1 / 1000,
        *,
        momentum: float = 0.9,
        sample: float = 0.01,
        clip_norm: float | None = None,
        values: str | Codec = "fp32-gather",
        **common: Any,
    ) -> None:
        if clip_norm is not None:
            clip_norm = check_number("clip_norm", clip_norm, above=0, infinite=True, other="None")
        self.arguments = _Arguments(check_number("sample", sample, above=0, at_most=1), clip_norm)
        super().__init__(named_parameters, density, values=gather_codec(values), momentum=momentum, **common)

    def sparse_work(self, bucket: Bucket, sending: Sending) -> SparseWork:
        return _DGCWork(bucket, sending, self.arguments)


class _DGCWork(TopKWork):
    def __init__(self, bucket: Bucket, sending: Sending, arguments: _Arguments) -> None:
        super().__init__(bucket, sending, arguments.sample)
        self._clip_norm = arguments.clip_norm

    def accumulate(self) -> None:
        if self._clip_norm is not None:
            limit = self._clip_norm / math.sqrt(self.step.ranks) * self.step.scale
            for grad in self.bucket.gradients:
                # A gradient with an infinity is not clipped; it makes the step invalid. float64: squares must not
                # overflow.
                norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
                grad.mul_(torch.where(norm.isfinite(), (limit / norm).clamp(max=1.0), 1.0))
        super().accumulate()
