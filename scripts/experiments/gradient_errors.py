#!/usr/bin/env python3
"""Relative error against bits per entry, on gradients that scripts/experiments/record_gradients.py recorded.

    python scripts/experiments/gradient_errors.py /tmp/gradients/cifar10 /tmp/gradients/digits

One rank's own gradient is encoded and decoded once, without error feedback: the error is |g - decoded| / |g| over all
its tensors. Bits per entry count what one message holds: codes, and for sparse methods one byte per index. The second
table compares frequencies with entries.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import table
import torch
from experiment.files import script_parser
from torch import Tensor

from hvd_compress import ops
from hvd_compress.codecs.codebooks import DISTRIBUTIONS, grid_step
from hvd_compress.codecs.packed import Code, Lloyd, RangeFloat
from hvd_compress.codecs.scales import Moments
from hvd_compress.methods import spectrum
from hvd_compress.reference import BLOCK

Gradient = list[Tensor]  # one flat float32 tensor a parameter
RANKS = 4  # lanes need room for the sum


def load(folder: Path, by_kernel: bool = False) -> dict[int, list[Gradient]]:
    """By step, each rank's gradient, in memory order; ``by_kernel`` puts a filter's taps side by side instead."""
    found: dict[int, list[Gradient]] = {}
    for file in sorted(folder.glob("step*.rank*.pt")):
        saved = torch.load(file, weights_only=True)
        tensors = []
        for name, flat in sorted(saved["gradients"].items()):
            shaped = flat.as_strided(saved["shapes"][name], saved["strides"][name])
            tensors.append(shaped.contiguous().view(-1) if by_kernel else flat)
        found.setdefault(saved["step"], []).append(tensors)
    if not found:
        raise SystemExit(f"{folder} holds no step*.rank*.pt: run scripts/experiments/record_gradients.py first")
    return found


def edges_of(gradient: Gradient, layerwise: bool = True) -> Tensor:
    sizes = [tensor.numel() for tensor in gradient]
    return torch.tensor([0, *(sizes if layerwise else [sum(sizes)])]).cumsum(0)


def relative(error: Tensor, values: Tensor) -> float:
    return float(error.double().norm() / values.double().norm())


def coded(code: Code, values: Tensor, edges: Tensor) -> Tensor:
    """The quantization error of a code, with each group's own scale and distribution."""
    moments = Moments(values, edges)
    scale = moments.scale(code.peak).clamp(1e-20, 1e20)
    codes, error = torch.empty(code.size(len(values)), dtype=torch.uint8), torch.empty_like(values)
    code.encode(values, scale, moments.kind, edges, codes, error)
    return error


def lanes(bits: int, stochastic: bool, values: Tensor, edges: Tensor) -> Tensor:
    moments, steps = Moments(values, edges), grid_step(2 ** (bits - 1) - 1, stochastic).double()
    scale = (moments.rms * steps[moments.kind]).clamp(1e-20, 1e20).float()
    width = lane_width(bits)
    words, error = torch.empty(-(-len(values) // (64 // width)), dtype=torch.int64), torch.empty_like(values)
    ops.lanes_encode(values, scale, edges, words, error, bits, width, 1 if stochastic else -1)
    return error


def lane_width(bits: int) -> int:
    return bits + (RANKS - 1).bit_length()


def qsgd(bits: int, values: Tensor, bucket: int = 512) -> Tensor:
    """Levels of |g| / ||g|| per bucket, rounded at random (Alistarh et al., QSGD, 2017)."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % bucket)).view(-1, bucket)
    level = rows.norm(dim=1, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    draw = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))
    return (rows - (rows / level + draw).floor() * level).view(-1)[: len(values)]


def largest(flat: Tensor, each: int) -> Tensor:
    """The ``each`` largest of every 256, as a mask."""
    rows = torch.nn.functional.pad(flat.abs(), (0, -len(flat) % BLOCK), value=-1.0).view(-1, BLOCK)
    mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, rows.topk(each, dim=1).indices, True)
    return mask.view(-1)[: len(flat)]


def sparse(gradient: Gradient, each: int, code: Code | None, frequencies: bool) -> float:
    """The error where ``each`` of 256 entries, or Fourier coefficients, are kept; the transform preserves norms."""
    dropped, chosen = [], []
    for flat in gradient:
        if frequencies:
            entries, flat = flat, torch.empty(spectrum.padded(flat.numel()))
            spectrum.forward(entries, flat)
        mask = largest(flat, each)
        dropped.append(flat[~mask])
        chosen.append(flat[mask])
    if code is not None:
        dropped.append(coded(code, torch.cat(chosen), edges_of(chosen)))
    return relative(torch.cat(dropped), torch.cat(gradient))


def methods() -> Iterable[tuple[str, float, Callable[[Gradient], float]]]:
    """Name, bits per entry, relative error of a gradient."""

    def quantizer(error: Callable[[Tensor, Tensor], Tensor], layerwise: bool = True) -> Callable[[Gradient], float]:
        return lambda g: relative(error(torch.cat(g), edges_of(g, layerwise)), torch.cat(g))

    for bits in (2, 4, 6, 8):
        yield f"QSGD, {bits} bits", bits, quantizer(lambda v, e, b=bits: qsgd(b, v))
    for bits in (2, 4, 6, 8):
        cost = 64 / (64 // lane_width(bits))
        yield f"lanes{bits}, at N = 4", cost, quantizer(lambda v, e, b=bits: lanes(b, True, v, e))
        yield f"lanes{bits}, to nearest", cost, quantizer(lambda v, e, b=bits: lanes(b, False, v, e))
    for bits in (1, 2, 3, 4, 6, 8):
        yield f"lloyd{bits}", bits, quantizer(lambda v, e, b=bits: coded(Lloyd(b), v, e))
    for bits in (2, 4):
        yield f"lloyd{bits}, one scale", bits, quantizer(lambda v, e, b=bits: coded(Lloyd(b), v, e), layerwise=False)
    for bits in (4, 6, 8, 10, 12):
        yield f"range{bits}", bits, quantizer(lambda v, e, b=bits: coded(RangeFloat(b), v, e))
    for each in (64, 38, 16, 4):
        for code in (RangeFloat(10), Lloyd(4)):
            cost, name = each / BLOCK * (8 + code.bits), f"{each} of 256, {code.name}"
            yield f"top-k, {name}", cost, lambda g, e=each, c=code: sparse(g, e, c, False)
            yield f"FFT, {name}", cost, lambda g, e=each, c=code: sparse(g, e, c, True)


def error_table(folders: list[Path]) -> str:
    first = {f"{folder.name}, step {step}": ranks[0] for folder in folders for step, ranks in load(folder).items()}
    return table.markdown(
        [
            {"method": name, "bits": f"{bits:.2f}", **{column: f"{error(g):.4f}" for column, g in first.items()}}
            for name, bits, error in methods()
        ]
    )


def frequency_table(folders: list[Path]) -> str:
    """The error of the 38 best of 256, in both domains and both orders of memory."""
    rows = []
    for folder in folders:
        for by_kernel in (False, True):
            for step, ranks in load(folder, by_kernel).items():
                mean = [torch.stack(tensors).mean(0) for tensors in zip(*ranks, strict=True)]
                for who, gradient in (("rank 0's", ranks[0]), ("the mean", mean)):
                    products = sum(float((t[1:] * t[:-1]).sum()) for t in gradient)
                    correlation = products / sum(float(t.square().sum()) for t in gradient)
                    rows.append(
                        {
                            "gradients": f"{folder.name}, {who}",
                            "flattened by": "kernel taps" if by_kernel else "memory order",
                            "step": str(step),
                            "top-k": f"{sparse(gradient, 38, None, False):.4f}",
                            "FFT": f"{sparse(gradient, 38, None, True):.4f}",
                            "lag-1 correlation": f"{correlation:.3f}",
                        }
                    )
    return table.markdown(rows, left=2)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    print(f"Relative error of rank 0's gradient; distributions {' or '.join(DISTRIBUTIONS)} by kurtosis.\n")
    print(error_table(args.folders))
    print(f"\n38 of 256 kept, values exact: relative error.\n\n{frequency_table(args.folders)}")


if __name__ == "__main__":
    main()
