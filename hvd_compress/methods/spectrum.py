"""The real Fourier transform as an orthonormal change of basis: n numbers in, n numbers out.

Layout of each chunk's ``rfft(norm="ortho")``: first the two real bins (the mean and the highest frequency), then real
and imaginary part of every interior bin times sqrt(2), since it also represents its mirror image. The transform
preserves norms (Parseval), and its inverse is its transpose.
"""

import torch
from torch import Tensor

CHUNK = 4096
_TWICE = 2.0**0.5


def padded(numel: int) -> int:
    """Coefficients of a tensor of ``numel`` entries: one more if that is odd."""
    return numel + numel % 2


def forward(flat: Tensor, out: Tensor) -> None:
    """Writes ``out``, float32, (padded(n),), from ``flat``, (n,), of any floating dtype, in chunks of 4096 entries."""
    n = flat.numel()
    whole = n - n % CHUNK
    if whole:
        _forward(flat[:whole].view(-1, CHUNK), out[:whole].view(-1, CHUNK))
    if n > whole:
        _forward(torch.nn.functional.pad(flat[whole:], (0, n % 2))[None], out[None, whole:])


def inverse(spectrum: Tensor, flat: Tensor) -> None:
    """The inverse of :func:`forward`: ``spectrum``, float32, (padded(n),); ``flat``, (n,), is written."""
    n = flat.numel()
    whole = n - n % CHUNK
    if whole:
        flat[:whole].view(-1, CHUNK).copy_(_inverse(spectrum[:whole].view(-1, CHUNK)))
    if n > whole:
        flat[whole:].copy_(_inverse(spectrum[None, whole:])[0, : n - whole])


def _forward(rows: Tensor, out: Tensor) -> None:
    bins = torch.fft.rfft(rows.float(), norm="ortho")
    out[:, 0], out[:, 1] = bins[:, 0].real, bins[:, -1].real
    torch.mul(torch.view_as_real(bins[:, 1:-1]), _TWICE, out=_pairs(out[:, 2:]))


def _inverse(rows: Tensor) -> Tensor:
    length = rows.shape[1]
    bins = torch.zeros(len(rows), length // 2 + 1, 2, dtype=torch.float32, device=rows.device)
    bins[:, 0, 0], bins[:, -1, 0] = rows[:, 0], rows[:, 1]
    torch.mul(_pairs(rows[:, 2:]), 1 / _TWICE, out=bins[:, 1:-1])
    flat: Tensor = torch.fft.irfft(torch.view_as_complex(bins), n=length, norm="ortho")
    return flat


def _pairs(rows: Tensor) -> Tensor:
    return rows.as_strided((len(rows), rows.shape[1] // 2, 2), (rows.stride(0), 2, 1))
