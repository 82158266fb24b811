#!/usr/bin/env python3
"""Relative error against bits per entry, on gradients that scripts/record_gradients.py recorded.

    python scripts/gradient_errors.py /tmp/gradients/cifar10 /tmp/gradients/digits

One rank's own gradient is written once and read again, without error feedback: error is |g - decoded| / |g| over all
its tensors. Bits per entry count what one message holds: codes, and for sparse methods one byte an index. A second
table asks where frequencies win, a third what tighter indices would save.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from hvd_compress import ops
from hvd_compress.methods import spectrum
from hvd_compress.codecs.books import DISTRIBUTIONS, grid_step
from hvd_compress.codecs.code import Code, Lloyd, RangeFloat
from hvd_compress.codecs.scales import Moments, bounded
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
        found.setdefault(saved["meta"]["step"], []).append(tensors)
    if not found:
        raise SystemExit(f"{folder} holds no step*.rank*.pt: run scripts/record_gradients.py first")
    return found


def edges_of(gradient: Gradient, layerwise: bool) -> Tensor:
    sizes = [tensor.numel() for tensor in gradient]
    return torch.tensor([0, *(sizes if layerwise else [sum(sizes)])]).cumsum(0)


def relative(lost: Tensor, values: Tensor) -> float:
    return float(lost.double().norm() / values.double().norm())


def coded(code: Code, values: Tensor, edges: Tensor) -> Tensor:
    """What a code loses, with each group's own scale and distribution."""
    moments = Moments(values, edges)
    scale = bounded(moments.peak if code.peak else moments.rms)
    codes, lost = torch.empty(code.size(len(values)), dtype=torch.uint8), torch.empty_like(values)
    code.encode(values, scale, moments.kind, edges, codes, lost)
    return lost


def lanes(bits: int, stochastic: bool, values: Tensor, edges: Tensor) -> Tensor:
    moments = Moments(values, edges)
    steps = grid_step(2 ** (bits - 1) - 1, stochastic).double()
    scale = bounded(moments.rms * steps[moments.kind]).float()
    width = lane_width(bits)
    words, lost = torch.empty(-(-len(values) // (64 // width)), dtype=torch.int64), torch.empty_like(values)
    ops.lanes_encode(values, scale, edges, words, lost, bits, width, 1 if stochastic else -1)
    return lost


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
    """What is lost when ``each`` of 256 entries, or Fourier coefficients, are kept; the transform keeps lengths."""
    parts, kept = [], []
    for tensor in gradient:
        flat = tensor
        if frequencies:
            flat = torch.empty(spectrum.padded(tensor.numel()))
            spectrum.forward(tensor, flat)
        parts.append(flat)
        kept.append(largest(flat, each))
    lost = [flat[~mask] for flat, mask in zip(parts, kept, strict=True)]
    chosen = [flat[mask] for flat, mask in zip(parts, kept, strict=True)]
    if code is not None:
        lost.append(coded(code, torch.cat(chosen), edges_of(chosen, True)))
    return relative(torch.cat(lost), torch.cat(gradient))


Method = tuple[str, float, Callable[[Gradient], float]]


def methods() -> Iterable[Method]:
    """Name, bits per entry, relative error of a gradient."""

    def quantizer(lose: Callable[[Tensor, Tensor], Tensor], layerwise: bool = True) -> Callable[[Gradient], float]:
        def error(gradient: Gradient) -> float:
            values = torch.cat(gradient)
            return relative(lose(values, edges_of(gradient, layerwise)), values)

        return error

    for bits in (2, 4, 6, 8):
        yield f"QSGD, {bits} bits", bits, quantizer(lambda v, e, b=bits: qsgd(b, v))
    for bits in (2, 4, 6, 8):
        cost = 64 / (64 // lane_width(bits))
        yield f"lanes{bits}, at N = 4", cost, quantizer(lambda v, e, b=bits: lanes(b, True, v, e))
        yield f"lanes{bits}, to nearest", cost, quantizer(lambda v, e, b=bits: lanes(b, False, v, e))
    for bits in (1, 2, 3, 4, 6, 8):
        yield f"lloyd{bits}", bits, quantizer(lambda v, e, b=bits: coded(Lloyd(b), v, e))
    for bits in (2, 4):
        yield (
            f"lloyd{bits}, one scale for the model", bits,
            quantizer(lambda v, e, b=bits: coded(Lloyd(b), v, e), layerwise=False),
        )  # fmt: skip
    for bits in (4, 6, 8, 10, 12):
        yield f"range{bits}", bits, quantizer(lambda v, e, b=bits: coded(RangeFloat(b), v, e))
    for each in (64, 38, 16, 4):
        for code in (RangeFloat(10), Lloyd(4)):
            cost = each / BLOCK * (8 + code.bits)
            name = f"{each} of 256, {code.name}"
            yield f"top-k, {name}", cost, lambda g, e=each, c=code: sparse(g, e, c, False)
            yield f"FFT, {name}", cost, lambda g, e=each, c=code: sparse(g, e, c, True)


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def error_table(folders: dict[str, dict[int, list[Gradient]]]) -> None:
    columns = [(name, step) for name, steps in folders.items() for step in steps]
    row("method", "bits an entry", *(f"{name}, step {step}" for name, step in columns))
    row("---", *["---:"] * (len(columns) + 1))
    for name, bits, error in methods():
        row(name, f"{bits:.2f}", *(f"{error(folders[f][s][0]):.4f}" for f, s in columns))


def frequency_table(paths: list[Path]) -> None:
    """The error of the best few, in both domains and both orders of memory."""
    row("gradients", "step", "flattened by", "kept", "top-k", "FFT", "lag-1 correlation")
    row("---", "---:", "---", "---", "---:", "---:", "---:")
    for path in paths:
        for by_kernel in (False, True):
            for step, ranks in load(path, by_kernel).items():
                mean = [torch.stack(tensors).mean(0) for tensors in zip(*ranks, strict=True)]
                for who, gradient in (("rank 0's", ranks[0]), ("the mean", mean)):
                    products = sum(float((t[1:] * t[:-1]).sum()) for t in gradient)
                    correlation = products / sum(float(t.square().sum()) for t in gradient)
                    row(
                        f"{path.name}, {who}", str(step), "kernel taps" if by_kernel else "memory order", "38 of 256",
                        *(f"{sparse(gradient, 38, None, f):.4f}" for f in (False, True)), f"{correlation:.3f}",
                    )  # fmt: skip


def index_table() -> None:
    """c of 256 offsets as one number below C(256, c), against one byte each."""
    row("picks a block and leader", "bits an index", "saved of a slot with fp16", "with lanes4", "with lloyd4")
    row("---:", "---:", "---:", "---:", "---:")
    share = (RANKS - 1) / RANKS
    values = (2 * share * 16, 2 * share * 64 / (64 // lane_width(4)), 2 * share * 4)
    for picks in (1, 2, 4, 8, 16, 32):
        bits = math.ceil(math.log2(math.comb(BLOCK, picks))) / picks
        saved = [share * (8 - bits) / (share * 8 + value) for value in values]
        row(str(picks), f"{bits:.2f}", *(f"{part:.1%}" for part in saved))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    print(f"Relative error of rank 0's gradient; distributions {' or '.join(DISTRIBUTIONS)} by kurtosis.\n")
    error_table({path.name: load(path) for path in args.folders})
    print("\nWhere frequencies win: values exact, relative error.\n")
    frequency_table(args.folders)
    print(f"\nIndices, {RANKS} ranks:\n")
    index_table()


if __name__ == "__main__":
    main()
