"""IWP against its specification, hvd_compress/reference/iwp.py: bitwise."""

from functools import partial

import pytest
from copied import any_shapes, assert_copyable, assert_equal, matrices
from models import mixed_model

from hvd_compress import IWP
from hvd_compress.reference import iwp

METHOD = partial(IWP, values="fp16", explore=0, bucket_mb=1e-3)
KEPT = (
    lambda work: (work.bucket.residual, work.parts["block_means"].unsent),
    lambda copied: [t for residual, unsent, _ in copied.states.values() for t in (residual, unsent)],
)


def same(model, ranks=3, steps=6, scale=1.0, **options):
    assert_equal(partial(METHOD, **options), partial(iwp.IWP, **options), KEPT, ranks, model, steps, scale)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 0), (3, 1), (3, 2), (5, 3)])
def test_averages_weights_residuals_and_block_means_are_equal(ranks, seed):
    """Tensors that end within a block, channels_last, small ones."""
    same(mixed_model(), ranks, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_any_shapes(seed):
    same(any_shapes(seed), seed=seed)


@pytest.mark.parametrize("density", [1 / 1024, 1 / 7, 1 / 2])
def test_any_density(density):
    same(any_shapes(9), density=density)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 100.0])
def test_any_magnitude(scale):
    same(matrices((64, 64), (40, 30)), scale=scale)


def test_mean_weights_are_measured_again():
    same(matrices((40, 40), (33, 40), (9,)), ranks=2, steps=103)


def test_it_can_be_copied():
    assert_copyable(iwp)
