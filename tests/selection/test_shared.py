"""Selections that all ranks compute from shared state."""

import pytest
import torch

from hvd_compress.engine.bucket import make_buckets
from hvd_compress.reference import BLOCK, flat_positions
from hvd_compress.selection.base import StepSeed
from hvd_compress.selection.shared import ScoredSelection


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("explore", [0.0, 1.0])
def test_no_slot_is_spent_on_padding(halves, explore):
    """The last block has 44 entries and 212 of padding."""
    numel, slots = 2 * BLOCK + 44, 24
    parameter = torch.nn.Parameter(torch.zeros(2, numel // 2))
    (bucket,) = make_buckets([("w", parameter)], 2**20)
    selection = ScoredSelection(bucket, [slots], halves)
    for step in range(4):
        selection.begin_step(StepSeed.draw(0, step, 0, 1, 0), check=False)
        score = torch.rand(selection.ranges[0].of(parameter.detach()).numel()) + 0.1
        selection.select(0, score, explore)
        places = flat_positions(selection.indices, selection.rows, selection.phase)
        assert len(places.unique()) == slots
        assert int(places.max()) < numel, "padding was selected"
