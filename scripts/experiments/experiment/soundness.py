"""Checks of one exchanged step: the "wrong" column of `scripts/lab/bench_exchange.py`."""

from typing import Any

import torch
from torch import Tensor

from experiment.metrics import digest
from hvd_compress.cli.synthetic import Synthetic

#: Of each tensor, about so many entries are followed, evenly spread.
ENTRIES = 1 << 12

#: Rounding allowed, as a share of the largest entry: sums of float32, and of float16.
EXACT, HALF = 2e-5, 5e-3

#: Of random rounding: standard deviations that chance may reach, and the share of the gradient that clipping may take.
CHANCE, CLIPPED = 8.0, 0.5


def failures(bench: Any, model: Synthetic, share: float, check: str) -> list[str]:
    """Takes a step; every check that failed, in words, the same list on all ranks.

    - Each tensor's averaged gradient is finite and has the same bits on every rank; so have its weights.
    - ``check="sum"``: nothing is lost. The sum over ranks of (residual before + gradient) is ranks times what was
      applied, plus the sum of the residuals after, to ``share`` of the largest entry; residuals are 0 where there are
      none. ``check="bias"``, for a method that rounds at random without a residual: of the tensors that it compresses,
      only the errors' bias is tested. ``check="none"``: these tensors are not followed. ``check="signs"``: no tensor
      is, since what is applied is not what was sent.

    ``bench`` has ``backward()``, ``synchronize()``, ``update()``, ``compression``, and a ``host`` with ``sum`` and
    ``gather``.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    residual = getattr(bench.compression, "residual", None) or (lambda _: torch.zeros(1))
    skipped = {"none": _is_large, "signs": lambda _: True}.get(check, lambda _: False)
    followed = [i for i, p in enumerate(parameters) if not skipped(p)]
    before = [_some(residual(names[i])) for i in followed]
    bench.backward()
    bench.synchronize()
    given = [_some(model.prepared[i]) for i in followed]
    applied = [_some(parameters[i].grad) for i in followed]
    found = [
        f"{name}: the gradient is not finite"
        for name, p in zip(names, parameters, strict=True)
        if not p.grad.isfinite().all()
    ]
    gradients = [digest(p.grad) for p in parameters]
    bench.update()
    for index, i in enumerate(followed):
        total = bench.host.sum(given[index] + before[index])
        kept = bench.host.sum(applied[index] + _some(residual(names[i])))
        error, largest = (total - kept).abs().max().item(), total.abs().max().item()
        if check == "bias" and _is_large(parameters[i]):
            if _is_biased(kept - total, total):
                found.append(f"{names[i]}: off by more than random rounding, up to {error:.3g}")
        elif not error <= share * largest:
            found.append(f"{names[i]}: off by {error:.3g} where the largest is {largest:.3g}")
    everyone = bench.host.gather((found, gradients, [digest(p) for p in parameters]))
    found = list(dict.fromkeys(text for theirs, _, _ in everyone for text in theirs))
    for kind, what in ((1, "gradients"), (2, "weights")):
        for name, digests in zip(names, zip(*(theirs[kind] for theirs in everyone), strict=True), strict=True):
            if len(set(digests)) > 1:
                found.append(f"{name}: {what} differ between ranks")
    return found


def _is_biased(error: Tensor, total: Tensor) -> bool:
    """Errors of unbiased rounding may exceed the entries, but do not correlate with the gradient. An exchange of zeros
    errs by minus the gradient, and a sum instead of a mean by the gradient or more."""
    products = error * total
    chance = CHANCE * products.square().sum().sqrt()
    return not products.sum().abs() <= chance + CLIPPED * total.square().sum()


def _is_large(parameter: Tensor) -> bool:
    return parameter.dim() >= 2 and parameter.numel() >= 1024


def _some(tensor: Tensor) -> Tensor:
    """Entries from all over a tensor: float64, flat."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // ENTRIES)].double()
