"""The orthogonal matrix next to a gradient, against its singular vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.methods.orthogonal import orthogonalize

SHAPES = st.lists(st.integers(1, 12), min_size=2, max_size=4)


def random(shape: list[int], size: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * size


@given(SHAPES, st.sampled_from([1e-30, 1.0, 1e18]), st.sampled_from([1.0, 1024.0]))
def test_singular_vectors_stay_and_singular_values_become_one(shape: list[int], size: float, scale: float) -> None:
    grad = random(shape, size)
    matrix = grad.flatten(1).double() / size
    orthogonalize(grad, scale)
    got = grad.flatten(1).double() / scale / max(matrix.shape) ** 0.5
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ got @ v.T  # diagonal, where the singular vectors are those of the gradient
    large = values > 0.05 * values.max()
    assert ((inner.diagonal() > 0.6) & (inner.diagonal() < 1.25))[large].all()
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_computed_in_float32(dtype: torch.dtype) -> None:
    grad = random([6, 9]).to(dtype)
    want = grad.float()
    orthogonalize(grad, 2.0)
    orthogonalize(want, 2.0)
    assert grad.dtype == dtype and torch.equal(grad, want.to(dtype))


def test_the_memory_format_does_not_matter() -> None:
    grad = random([4, 5, 3, 3])
    other = grad.to(memory_format=torch.channels_last)
    orthogonalize(grad, 1.0)
    orthogonalize(other, 1.0)
    assert torch.equal(grad, other) and other.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_zero_stays_and_what_is_not_finite_is_everywhere(bad: float) -> None:
    grad = torch.zeros(3, 4)
    orthogonalize(grad, 1.0)
    assert not grad.any()
    grad[1, 2] = bad
    orthogonalize(grad, 1.0)
    assert grad.isnan().all()
