"""DeMo against its specification, hvd_compress/reference/demo.py: bitwise."""

from functools import partial

import pytest
from copied import any_shapes, assert_copyable, assert_equal, matrices
from models import mixed_model

from hvd_compress import DeMo
from hvd_compress.reference import demo

METHOD = partial(DeMo, values="fp16", bucket_mb=1e-3)
KEPT = (lambda work: [work.bucket.residual], lambda copied: copied.momenta.values())


def same(model, ranks=3, scale=1.0, **options):
    assert_equal(partial(METHOD, **options), partial(demo.DeMo, **options), KEPT, ranks, model, scale=scale)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (3, 0), (3, 1), (3, 2), (5, 3)])
def test_signs_weights_and_momenta_are_equal(ranks, seed):
    """Tensors that end within a block, channels_last, small ones."""
    same(mixed_model(), ranks, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_any_shapes(seed):
    same(any_shapes(seed), seed=seed)


@pytest.mark.parametrize("density", [1 / 1024, 1 / 7, 1 / 2])
def test_any_density(density):
    same(any_shapes(9), density=density)


@pytest.mark.parametrize("scale", [1e-6, 100.0])
def test_any_magnitude(scale):
    same(matrices((64, 64), (40, 30)), scale=scale)


def test_other_momenta():
    same(mixed_model(), decay=0.9, dense_momentum=0.5)


def test_it_can_be_copied():
    assert_copyable(demo)
