"""Entries that each rank selects for itself."""

import torch

from hvd_compress.engine.bucket import make_buckets
from hvd_compress.selection.base import StepSeed
from hvd_compress.selection.per_rank import SampledPerRank


def test_sampled_selection_falls_back_to_sorting_if_its_threshold_is_too_high():
    """All large entries are in the sample."""
    (bucket,) = make_buckets([("w", torch.nn.Parameter(torch.zeros(64, 128)))], 2**20)
    selection = SampledPerRank(bucket, [100], sample=0.01)
    selection.begin_step(StepSeed.draw(0, 0, 0, 1, 0), True)
    stride = 8192 // 82
    score = torch.rand(8192)
    score[selection.phase % stride :: stride] += 5.0
    assert set(selection.largest(0, score, 100).tolist()) == set(score.topk(100).indices.tolist())


def test_sampled_selection_of_no_entries():
    (bucket,) = make_buckets([("w", torch.nn.Parameter(torch.zeros(64, 128)))], 2**20)
    selection = SampledPerRank(bucket, [1], sample=0.01)
    selection.begin_step(StepSeed.draw(0, 0, 0, 1, 0), True)
    assert selection.largest(0, torch.rand(8192), 0).numel() == 0
