"""What an exchange must not get wrong, tested on one step: the "wrong" column of `scripts/bench_exchange.py`."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from experiment.exchangers import Exchanger
from experiment.synthetic import Synthetic

#: Of the tensors of either kind (which a method would compress, and smaller ones) so many are followed entry by entry,
#: evenly spread over the entries of all, so that no bucket is left out; and of each about so many entries.
FOLLOWED = 16
ENTRIES = 1 << 16

#: Rounding allowed, as a share of the largest entry: sums of float32, and of float16.
EXACT, HALF = 2e-5, 5e-3

#: Of what a method rounds at random: standard deviations that chance may reach, and the share of the gradient that
#: clipping may take.
CHANCE, CLIPPED = 8.0, 0.5


def failures(exchanger: Exchanger, model: Synthetic, share: float, forgets: bool) -> list[str]:
    """Takes a step; every check that failed, in words, the same list on all ranks.

    - Each tensor's averaged gradient is finite and has the same bits on every rank; so have its weights.
    - Nothing is lost: the sum over ranks of (residual before + gradient) is ranks times what was applied, plus the sum
      of the residuals after, to ``share`` of the largest; residuals are 0 where there are none. ``forgets``: the method
      rounds at random, and keeps no residual, by design; of what it compresses, only the errors' bias is tested.
    """
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    followed = _followed(parameters)
    before = [_residual(exchanger, names[i]) for i in followed]
    exchanger.backward()
    exchanger.synchronize()
    given = [_some(model.prepared[i]) for i in followed]
    applied = [_some(_gradient(parameters[i])) for i in followed]
    found = [f"{names[i]}: the gradient is not finite" for i, p in enumerate(parameters) if not _finite(p)]
    gradients = [_digest(_gradient(p)) for p in parameters]
    exchanger.update()
    after = [_residual(exchanger, names[i]) for i in followed]
    for index, i in enumerate(followed):
        said = exchanger.sum(_plus(given[index], before[index]))
        kept = exchanger.sum(_plus(applied[index], after[index]))
        error, largest = (said - kept).abs().max().item(), said.abs().max().item()
        if forgets and _is_large(parameters[i]):
            if _is_biased(kept - said, said):
                found.append(f"{names[i]}: off by more than rounding at random, up to {error:.3g}")
        elif not error <= share * largest:
            found.append(f"{names[i]}: off by {error:.3g} where the largest is {largest:.3g}")
    weights = [_digest(p.detach()) for p in parameters]
    everyone = exchanger.gather((found, gradients, weights))
    found = list({text: None for theirs, _, _ in everyone for text in theirs})
    for kind, what in ((1, "gradients"), (2, "weights")):
        for name, digests in zip(names, zip(*(theirs[kind] for theirs in everyone), strict=True), strict=True):
            if len(set(digests)) > 1:
                found.append(f"{name}: {what} differ between ranks")
    return found


def _is_biased(error: Tensor, said: Tensor) -> bool:
    """Rounding without bias errs by up to a step, which may be more than any entry; but its errors have nothing in
    common with the gradient, so that the products of both add up to what chance makes of them. An exchange of zeros
    errs by the gradient, with a minus, and a sum for a mean by once the gradient or more."""
    products = error * said
    chance = CHANCE * products.square().sum().sqrt()
    return not products.sum().abs() <= chance + CLIPPED * said.square().sum()


def _is_large(parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() >= 2 and parameter.numel() >= 1024


def _followed(parameters: list[torch.nn.Parameter]) -> list[int]:
    large = [i for i, p in enumerate(parameters) if _is_large(p)]
    small = [i for i in range(len(parameters)) if i not in large]
    sizes = [p.numel() for p in parameters]
    return _spread(large, sizes) + _spread(small, sizes)


def _spread(chosen: list[int], sizes: list[int]) -> list[int]:
    """All if they are few, or those that hold the middles of FOLLOWED equal stretches of all their entries."""
    if len(chosen) <= FOLLOWED:
        return chosen
    ends = list(accumulate(sizes[i] for i in chosen))
    middles = ((k + 0.5) / FOLLOWED * ends[-1] for k in range(FOLLOWED))
    return sorted({chosen[bisect_right(ends, middle)] for middle in middles})


def _some(tensor: Tensor) -> Tensor:
    """Entries from all over a tensor: float64, flat."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // ENTRIES)].double()


def _residual(exchanger: Exchanger, name: str) -> Tensor | None:
    residual = getattr(exchanger.compression, "residual", None)
    return None if residual is None else _some(residual(name))


def _plus(tensor: Tensor, residual: Tensor | None) -> Tensor:
    return tensor if residual is None else tensor + residual


def _gradient(parameter: torch.nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _finite(parameter: torch.nn.Parameter) -> bool:
    return bool(_gradient(parameter).isfinite().all())


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).digest()
