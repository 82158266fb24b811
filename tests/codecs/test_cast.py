"""16-bit and 32-bit floats, whose sums must not overflow."""

import pytest
import torch
from harness import replicas, together
from models import gradients

from hvd_compress import IWP
from hvd_compress.codecs import codec


@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_sums_of_clipped_values_do_not_overflow(name):
    values = codec(name)
    for ranks in range(1, 129):
        limit = torch.tensor(values.limit(ranks)).to(values.dtype)
        largest = torch.finfo(values.dtype).max
        assert 0.99 * largest < limit.double().item() * ranks <= largest
    # As a ring sums: rank by rank, in the payload's precision.
    for ranks in (3, 5, 7, 64):
        total = torch.zeros((), dtype=values.dtype)
        for _ in range(ranks):
            total = total + torch.tensor(values.limit(ranks)).to(values.dtype)
        assert total.isfinite()


def test_huge_gradients_are_clipped_on_the_wire():
    world, ranks = replicas(3, IWP, density=1 / 16)
    grads = [[torch.full_like(g, 30000.0) for g in gradients(r.model, 0)] for r in ranks]
    applied = together(world, ranks, grads)
    assert all(g.isfinite().all() for g in applied[0])
    assert applied[0][6].max() > 20000
