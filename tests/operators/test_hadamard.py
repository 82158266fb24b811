"""hadamard against its reference, bitwise, and its reference against the matrix."""

import torch
from checks import agrees, agrees_within, bounded, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import kinds, seeds, values

from hvd_compress.reference import BLOCK, hadamard


def sample() -> list:
    return [torch.randn(2 * BLOCK)]


def test_reference_is_the_orthonormal_matrix() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    transformed = torch.eye(BLOCK).view(-1)
    hadamard(transformed)
    assert torch.equal(transformed.view(BLOCK, BLOCK), matrix / 16)


@bounded(60)
@given(blocks=st.integers(0, 40), kind=kinds, seed=seeds)
def test_equals_reference(device: str, blocks: int, kind: str, seed: int) -> None:
    agrees("hadamard", [values(blocks * BLOCK, kind, seed)], device)


def test_within_other_memory(device: str) -> None:
    agrees_within("hadamard", [values(3 * BLOCK, "normal", 1)], device)


def test_many_blocks(device: str) -> None:
    with threads(3):
        agrees("hadamard", [values(3001 * BLOCK, "normal", 1)], device)


def test_is_its_own_inverse(device: str) -> None:
    before = values(5 * BLOCK, "normal", 1)
    (once,) = agrees("hadamard", [before], device)
    (twice,) = agrees("hadamard", [once.cpu()], device)
    torch.testing.assert_close(twice.cpu(), before, rtol=0, atol=2e-6)


BAD = {
    "dtype": (0, lambda x: x.half(), "values must be Float, got Half"),
    "numel": (0, lambda x: x[:255].clone(), "values must have a multiple of 256 entries, got 255"),
    "strided": (0, lambda x: x[::2], "values must be contiguous"),
}


test_refuses = refusals("hadamard", sample, BAD)
test_opcheck = opchecks(("hadamard", sample))
