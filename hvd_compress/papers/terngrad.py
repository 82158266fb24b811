"""TernGrad (Wen et al., NeurIPS 2017): every entry as -s, 0 or s, without bias."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..codecs.base import Averaged, Channel, Codec, invalidate
from ..codecs.coded_gather import floats
from ..codecs.scales import Moments
from ..engine.arguments import NamedParameters, check_number
from ..engine.collectives import Request, allreduce
from ..reference.scales import bounded
from .every_value import EveryValue


class TernGrad(EveryValue):
    r"""TernGrad: every entry as -s, 0 or s, unbiased, with gradients clipped and the scale shared.

    Implements Wen, Xu, Yan, Wu, Wang, Chen & Li, *TernGrad: Ternary Gradients to Reduce Communication in Distributed
    Deep Learning* (NeurIPS 2017). On rank i, for each parameter::

        s   = max_i min(max |g_i|, clip rms(g_i))     shared scale: 4 bytes a parameter from every rank to all
        t_i = s sgn(g_i) b_i                          b_i = 1 with probability min(|g_i| / s, 1), else 0
        g   = mean_i t_i                              integers in lanes of 2 + ceil(log2 ranks) bits, one allreduce

    Ours: the root mean square as standard deviation, with the zeros that pad a parameter to blocks of 256; a shared
    scale always; error feedback.

    Example::

        compression = hvd_compress.TernGrad(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        clip: in standard deviations (the paper's 2.5), above 0.
        error_feedback: keep the quantization error, clipped parts included, for the next step (not in the paper).

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(self, named_parameters: NamedParameters, *, clip: float = 2.5, **options: Any) -> None:
        super().__init__(named_parameters, values=Ternary(clip), **options)


@dataclass(frozen=True)
class Ternary(Codec):
    """Stochastic rounding to -s, 0 or s, in lanes, after an allgather of scales: see :class:`TernGrad`."""

    clip: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", check_number("clip", self.clip, above=0))

    @property
    def name(self) -> str:
        return f"ternary clipped at {self.clip:g} sigma"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _TernaryChannel(self.clip, groups, ranks, rank, device)


class _TernaryChannel(Channel):
    def __init__(self, clip: float, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.clip = clip
        self.width = 2 + (ranks - 1).bit_length()

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        self.words = torch.zeros(-(-self.count // (64 // self.width)), dtype=torch.int64, device=self.device)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        moments = Moments(values, self.edges)
        scale = torch.minimum(moments.peak, moments.rms * self.clip)
        limit = torch.repeat_interleave(scale.float(), self.edges.diff(), output_size=self.count)
        clipped = torch.minimum(torch.maximum(values, -limit), limit)
        scale = bounded(scale).masked_fill(invalid != 0, float("nan")).float()
        gathered = yield Request("allgather", scale.view(torch.uint8), "values", then="encode")
        theirs = floats(gathered).view(self.ranks, -1)
        step = bounded(theirs.nan_to_num(nan=0.0).amax(0)).float()
        # Integers of 2 bits are -1, 0 and 1.
        ops.lanes_encode(clipped, step, self.edges, self.words, self.quantization_error, 2, self.width, key)
        self.quantization_error.add_(values - clipped)
        total = yield allreduce(self.words)
        ops.lanes_decode(total, step, self.edges, self.mean, self.width, 1.0 / self.ranks)
        invalidate(self.mean, theirs.isnan().any())
        return self.mean, self.quantization_error
