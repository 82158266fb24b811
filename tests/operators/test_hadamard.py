"""hadamard against its reference, bitwise, and its reference against the matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICES,
    agrees,
    agrees_within,
    bounded,
    check_device,
    kinds,
    needs_compiled,
    refuses,
    seeds,
    threads,
    values,
)

from hvd_compress.reference import BLOCK, hadamard

pytestmark = needs_compiled


def test_reference_is_the_orthonormal_matrix() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    transformed = torch.eye(BLOCK).view(-1)
    hadamard(transformed)
    assert torch.equal(transformed.view(BLOCK, BLOCK), matrix / 16)


@pytest.mark.parametrize("device", DEVICES)
@bounded(60)
@given(blocks=st.integers(0, 40), kind=kinds, seed=seeds)
def test_equals_reference(device: str, blocks: int, kind: str, seed: int) -> None:
    agrees("hadamard", [values(blocks * BLOCK, kind, seed)], device)


@pytest.mark.parametrize("device", DEVICES)
def test_within_other_memory(device: str) -> None:
    agrees_within("hadamard", [values(3 * BLOCK, "normal", 1)], device)


@pytest.mark.parametrize("device", DEVICES)
def test_many_blocks(device: str) -> None:
    with threads(3):
        agrees("hadamard", [values(3001 * BLOCK, "normal", 1)], device)


@pytest.mark.parametrize("device", DEVICES)
def test_is_its_own_inverse(device: str) -> None:
    before = values(5 * BLOCK, "normal", 1)
    (once,) = agrees("hadamard", [before], device)
    (twice,) = agrees("hadamard", [once.cpu()], device)
    torch.testing.assert_close(twice.cpu(), before, rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    check_device(device)
    torch.library.opcheck(torch.ops.hvd_compress.hadamard.default, (torch.randn(2 * BLOCK, device=device),))


BAD = {
    "dtype": (0, lambda x: x.half(), "values must be Float, got Half"),
    "numel": (0, lambda x: x[:255].clone(), "values must have a multiple of 256 entries, got 255"),
    "strided": (0, lambda x: x[::2], "values must be contiguous"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    refuses("hadamard", [torch.randn(2 * BLOCK)], BAD[case])
