"""How often and with how many thread blocks kernels are launched. Run by test_emulation.py, on the emulator."""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hvd_compress import IWP, Compressor, DeMo, ops
from hvd_compress.carriers.mirror import Mirror
from hvd_compress.reference.codes import PART

EMULATOR = ctypes.CDLL(os.environ["OPERATORS"])
EMULATOR.emulation_blocks.restype = EMULATOR.emulation_launches.restype = ctypes.c_uint64
WARPS = 8  # per thread block


def launched(operator: Callable[[], None]) -> tuple[int, int]:
    """Launches and thread blocks."""
    launches, blocks = EMULATOR.emulation_launches(), EMULATOR.emulation_blocks()
    operator()
    return EMULATOR.emulation_launches() - launches, EMULATOR.emulation_blocks() - blocks


@pytest.mark.parametrize("pieces", [1, 10, 4000])
def test_one_launch_a_bucket(pieces: int) -> None:
    """However many tensors there are."""
    slots = 3 * pieces
    rows = torch.tensor([[2 * i, 2, 3 * i, 3] for i in range(pieces)])
    grads, residual = [torch.ones(300) for _ in range(pieces)], torch.zeros(pieces * 512)
    indices, values, flags = torch.zeros(slots, dtype=torch.uint8), torch.zeros(slots), torch.zeros(pieces).int()
    more = [rows, torch.ones(pieces), indices, flags[:1].clone(), flags, None, 1.0, 0.0, 1.0, False]
    draw = ops.Draw(0, 1, 1, 0, 7, 0)
    needed = 1, -(-pieces * 2 // WARPS)
    assert launched(lambda: ops.accumulate_select(grads, residual, grads, None, *more, *draw)) == needed
    assert launched(lambda: ops.select(grads, rows, indices, *draw)) == needed
    assert launched(lambda: ops.gather(residual, indices, rows, values, 0)) == needed
    assert launched(lambda: ops.scatter(grads, residual, None, indices, rows, values, values, 0, 1.0)) == needed


def step(compression: Compressor, parameters: list[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.randn_like(p)
    for payload, context in [compression.compress(p.grad) for p in parameters]:
        compression.decompress(payload, context)


@pytest.mark.parametrize(("build", "most"), [(IWP, 12), (DeMo, 16)])
def test_launches_of_a_step(build: Callable[..., Any], most: int) -> None:
    """Of one bucket and four ranks, however many tensors there are."""
    found = []
    for tensors in (2, 200):
        parameters = [torch.nn.Parameter(torch.randn(32, 32)) for _ in range(tensors)]
        compression = build([(str(i), p) for i, p in enumerate(parameters)], collectives=Mirror(4))
        step(compression, parameters)
        found.append(launched(partial(step, compression, parameters))[0])
    assert found[0] == found[1] <= most, found


def test_skipped_pieces_are_not_launched() -> None:
    rows = torch.tensor([[2 * i, 2, 0, 0] for i in range(400)])
    grads, flags = [torch.ones(0 if i % 2 else 300) for i in range(400)], torch.zeros(400).int()
    none = torch.empty(0, dtype=torch.uint8)
    more = [rows, torch.empty(0), none, flags[:1].clone(), flags, None, 1.0, 0.0, 1.0, False, 0, 1, 1, 0, 7, 0]
    assert launched(lambda: ops.accumulate_select(grads, torch.zeros(400 * 512), [], None, *more)) == (1, 400 // WARPS)


def test_moments_share_out_a_group() -> None:
    n = 40 * PART
    out = torch.zeros(1, 3, dtype=torch.float64)
    assert launched(lambda: ops.moments(torch.randn(n), torch.tensor([0, n]), out))[1] >= 40 // WARPS
