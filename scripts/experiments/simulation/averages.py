"""Averages over the ranks, in few bits with error feedback, nearly as :func:`hvd_compress.recipes.low_bit` has them
(:class:`Feedback`)."""

import math

import torch
from torch import Tensor

from hvd_compress.reference.low_bit import lloyd_max
from simulation.weights import RUN, Layout


class Average:
    """The mean over the ranks of vectors that end as a layout does or before its hidden matrices.

    Args:
        like: (runs, ranks, entries).
        start: entries before it are averaged in float32.
        bits: of the others, with error feedback both ways; 0: float32.
        finer: how many bits more the mean has.
    """

    def __init__(self, like: Tensor, layout: Layout, start: int, bits: int, finer: int = 0) -> None:
        self._start = start if bits else like.shape[-1]
        rest = like[..., self._start :]
        lengths = layout.run_lengths(self._start)[: rest.shape[-1] // RUN]
        self._feedback = Feedback(rest, lengths, bits, finer) if bits else None

    def mean(self, tensors: Tensor) -> Tensor:
        """(runs, entries) of (runs, ranks, entries)."""
        if self._feedback is None:
            return tensors.mean(1)
        return torch.cat([tensors[..., : self._start].mean(1), self._feedback.mean(tensors[..., self._start :])], -1)


class Feedback:
    """The mean over the ranks in few bits: both what ranks send and the mean are rounded, and what is rounded off is
    added the next time. The error of the mean is kept apart from the ranks' residuals, and all values of a rank are
    rounded, unlike in low_bit.

    Args:
        like: (runs, ranks, entries), entries a multiple of :data:`RUN`.
        lengths: of the entries that share a scale; what follows in :data:`RUN` entries is padding.
    """

    def __init__(self, like: Tensor, lengths: list[int], bits: int, finer: int = 0) -> None:
        self.residuals, self.owners = torch.zeros_like(like), torch.zeros_like(like[:, 0])
        self._levels, self._answers = (lloyd_max(n).to(like.device) for n in (bits, bits + finer))
        self._lengths = torch.tensor(lengths, dtype=torch.float64, device=like.device)
        is_padded = any(length < RUN for length in lengths)
        self._mask = torch.arange(RUN, device=like.device) < self._lengths[:, None] if is_padded else None

    def mean(self, tensors: Tensor) -> Tensor:
        wanted = self.residuals + tensors
        sent = self._rounded(wanted, self._levels)
        self.residuals = wanted.sub_(sent)
        mean = sent.mean(1) + self.owners
        answer = self._rounded(mean, self._answers)
        self.owners = mean.sub_(answer)
        return answer

    def _rounded(self, tensors: Tensor, levels: Tensor) -> Tensor:
        result = rounded(tensors.unflatten(-1, (-1, RUN)), self._lengths, levels)
        return (result if self._mask is None else result * self._mask).flatten(-2)


def rounded(values: Tensor, lengths: Tensor, levels: Tensor) -> Tensor:
    """Q(values) of :func:`hvd_compress.reference.low_bit.encode`, for many runs at once and without waiting for a GPU.

    Args:
        values: float32 (..., runs, RUN), zeros after the lengths.
        lengths: float64 (runs,).
        levels: float32, ascending.
    """
    power = 0.5 - 1 / len(levels)
    rms = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64) / lengths.sqrt()
    peak = torch.linalg.vector_norm(values, math.inf, dim=-1).double() / levels[-1]
    scales = (rms ** (1 - power) * peak**power).clamp(1e-20, 1e20).bfloat16().float()[..., None]
    codes = torch.bucketize(values * (1 / scales), (levels[1:] + levels[:-1]) * 0.5)
    return levels[codes].mul_(scales)


class Lengths:
    """Restores the length of mean differences, as :class:`hvd_compress.local.lengths.Lengths`, but in float32."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._padded, self._numbers = layout.padded, layout.numbers(device)

    def factors(self, differences: Tensor, means: Tensor) -> Tensor:
        """What each entry of the mean is multiplied by: (runs, size).

        Args:
            differences: (runs, ranks, size).
            means: (runs, size), as received.
        """
        ratios = self._of(differences).square().mean(1).sqrt() / self._of(means)
        most = math.sqrt(differences.shape[1])
        factors = torch.where(ratios.isfinite() & (ratios > 0), ratios.clamp(max=most), 1.0)
        return factors[:, self._numbers]

    def _of(self, tensors: Tensor) -> Tensor:
        """The length of each parameter: (..., parameters)."""
        return torch.stack([part.norm(dim=-1) for part in tensors.split(self._padded, -1)], -1)
