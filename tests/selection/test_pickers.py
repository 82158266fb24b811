"""How entries are picked."""

import pytest
import torch

from hvd_compress.engine.bucket import make_buckets
from hvd_compress.engine.work import Step
from hvd_compress.papers.dgc import Sampled
from hvd_compress.papers.mipd import Halves, entries_of
from hvd_compress.reference import BLOCK, flat_positions
from hvd_compress.selection.pickers import Blocks


def bucket_of(parameter):
    return make_buckets([(0, "w", torch.nn.Parameter(parameter))], 2**20)[0]


def step_of(number):
    return Step(number, 0, 1, 1.0, 0, 0)


@pytest.mark.parametrize("kind", [Blocks, Halves])
@pytest.mark.parametrize("explore", [0.0, 1.0])
def test_no_slot_is_spent_on_padding(kind, explore):
    """The last block has 44 entries and 212 of padding."""
    numel, slots = 2 * BLOCK + 44, 24
    bucket = bucket_of(torch.zeros(2, numel // 2))
    picker = kind(bucket, [slots])
    for step in range(4):
        picker.begin(step_of(step))
        weight = bucket.pieces[0].weight()
        score = torch.rand((entries_of(weight, picker.halves[0]) if kind is Halves else weight).numel()) + 0.1
        picker.pick_by([score], explore)
        places = flat_positions(picker.indices, picker.table, picker.phase)
        assert len(places.unique()) == slots
        assert int(places.max()) < numel, "padding was picked"


def test_sampling_falls_back_to_sorting_if_its_threshold_is_too_high():
    """All large entries are in the sample."""
    picker = Sampled(bucket_of(torch.zeros(64, 128)), [100])
    picker.begin(step_of(0))
    stride = 8192 // 82
    score = torch.rand(8192)
    score[picker.phase % stride :: stride] += 5.0
    assert set(picker.largest(score, 100).tolist()) == set(score.topk(100).indices.tolist())


def test_sampling_of_no_entries():
    picker = Sampled(bucket_of(torch.zeros(64, 128)), [1])
    picker.begin(step_of(0))
    assert picker.largest(torch.rand(8192), 0).numel() == 0
