"""How many thread blocks the kernels are launched with. Run by test_emulation.py, on the emulator."""

import ctypes
import os
from collections.abc import Callable

import torch

from hvd_compress import ops
from hvd_compress.reference.codes import PART

EMULATOR = ctypes.CDLL(os.environ["OPERATORS"])
EMULATOR.emulation_blocks.restype = ctypes.c_uint64
WARPS = 8  # per thread block


def blocks_of(operator: Callable[[], None]) -> int:
    before = EMULATOR.emulation_blocks()
    operator()
    return EMULATOR.emulation_blocks() - before


def scatter(skipped: bool, error: bool) -> int:
    """400 parameters of 3 blocks each: 3 launches."""
    count, slots = 400, 2800
    rows = torch.tensor([[3 * i, 3, 7 * i, 7] for i in range(count)])
    grads = [torch.zeros(0 if skipped and i % 2 else 700) for i in range(count)]
    residual, indices = torch.zeros(count * 3 * 256), torch.zeros(slots, dtype=torch.uint8)
    mean = torch.zeros(slots)
    return blocks_of(lambda: ops.scatter(grads, residual, None, indices, rows, mean, mean if error else None, 0, 1.0))


def test_scatter_launches_what_its_gradients_need() -> None:
    needed = 400 * 3 // WARPS
    assert needed <= scatter(skipped=False, error=False) < needed + 3
    assert needed <= scatter(skipped=False, error=True) < needed + 3
    assert needed // 2 <= scatter(skipped=True, error=False) < needed // 2 + 3


def test_moments_share_out_a_group() -> None:
    n = 40 * PART
    out = torch.zeros(1, 3, dtype=torch.float64)
    assert blocks_of(lambda: ops.moments(torch.randn(n), torch.tensor([0, n]), out)) >= 40 // WARPS
