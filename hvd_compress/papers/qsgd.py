"""QSGD (Alistarh et al., NeurIPS 2017): every entry in a few bits, without bias."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..codecs.base import Averaged, Channel, Codec, invalidate
from ..codecs.coded_gather import floats
from ..codecs.scales import Moments
from ..engine.arguments import NamedParameters, check_integer
from ..engine.collectives import allgather
from ..reference.scales import bounded, divided
from .every_value import EveryValue


class QSGD(EveryValue):
    r"""QSGD: every entry as a random multiple of the norm of its run, unbiased.

    Implements Alistarh, Grubic, Li, Tomioka & Vojnovic, *QSGD: Communication-Efficient SGD via Gradient Quantization
    and Encoding* (NeurIPS 2017). On rank i, for every run v of g_i, with L = 2**(bits - 1) - 1 levels::

        x_j    = L |v_j| / ||v||                  ||v||: the l2 norm
        q_j    = x_j rounded up or down at random, so that E q_j = x_j
        Q(v_j) = ||v|| sgn(v_j) q_j / L
        g      = mean_i Q(g_i)                    one allgather of norms and codes

    Ours: codes of fixed length, where the paper's Elias code is shorter if most entries are 0 (collectives have
    constant size here); error feedback.

    The bytes grow with the ranks: ``bits / 8 * (ranks - 1)`` an entry.

    Example::

        compression = hvd_compress.QSGD(model, bits=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)

    Args:
        bits: per entry, 2 to 8, with the sign.
        run: entries that share a norm (the paper's bucket size).
        error_feedback: keep the quantization error for the next step. Not in the paper; diverges where the error is
            larger than the gradient, as with few levels.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`.
    """

    def __init__(self, named_parameters: NamedParameters, bits: int = 4, *, run: int = 512, **options: Any) -> None:
        super().__init__(named_parameters, values=Levels(bits, run), **options)


@dataclass(frozen=True)
class Levels(Codec):
    """Stochastic rounding to multiples of ``norm / (2**(bits - 1) - 1)``, in an allgather: see :class:`QSGD`."""

    bits: int
    run: int = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_integer("bits", self.bits, 2, 8))
        object.__setattr__(self, "run", check_integer("run", self.run, 1))

    @property
    def name(self) -> str:
        return f"{self.bits} bits, a norm for {self.run} values"

    def channel(self, groups: int, ranks: int, rank: int, device: torch.device) -> Channel:
        return _LevelsChannel(self, groups, ranks, rank, device)


class _LevelsChannel(Channel):
    """A message is the norm of each run, float32 (NaN if the rank is invalid), and the values in lanes."""

    def __init__(self, codec: Levels, groups: int, ranks: int, rank: int, device: torch.device) -> None:
        super().__init__(groups, ranks, rank, device)
        self.codec = codec

    def set_group_sizes(self, sizes: list[int]) -> None:
        super().set_group_sizes(sizes)
        ends = self.edges.tolist()
        runs = [first for a, b in pairwise(ends) for first in range(a, b, self.codec.run)]
        self.runs = torch.tensor([*runs, self.count], dtype=torch.int64, device=self.device)
        self.head = 4 * (len(self.runs) - 1)
        self.words = torch.zeros(-(-self.count // (64 // self.codec.bits)), dtype=torch.int64, device=self.device)
        self.theirs = torch.empty(self.count, dtype=torch.float32, device=self.device)

    def average(self, values: Tensor, invalid: Tensor, key: int) -> Averaged:
        bits = self.codec.bits
        norm = bounded(Moments(values, self.runs).square.sqrt()).float()
        ops.lanes_encode(values, self._step(norm), self.runs, self.words, self.quantization_error, bits, bits, key)
        header = norm.masked_fill(invalid != 0, float("nan"))
        gathered = yield allgather(torch.cat([header.view(torch.uint8), self.words.view(torch.uint8)]), "values")
        rows = gathered.view(self.ranks, -1)
        self.mean.zero_()
        for row in rows:
            step = self._step(bounded(floats(row[: self.head])).float())
            words = row[self.head :].clone().view(torch.int64)
            ops.lanes_decode(words, step, self.runs, self.theirs, bits, 1.0 / self.ranks)
            self.mean += self.theirs
        invalidate(self.mean, floats(rows[:, : self.head]).isnan().any())
        return self.mean, self.quantization_error

    def _step(self, norm: Tensor) -> Tensor:
        return divided(norm, 2 ** (self.codec.bits - 1) - 1)
