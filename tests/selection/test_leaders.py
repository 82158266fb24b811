"""Selection by leaders: every rank selects the largest of its own entries, and all ranks agree on which those are."""

from functools import partial

import pytest
import torch
from harness import HOSTS, random_steps, replicas, together
from methods import METHODS
from models import equal

from hvd_compress import IWP
from hvd_compress.engine.state import same
from hvd_compress.methods import iwp
from hvd_compress.reference import BLOCK, flat_positions
from hvd_compress.selection import each_rank

SLOTS = 6  # of every block, for 1, 2, 3 or 6 leaders


def large_entries(rank, blocks):
    """For each block, SLOTS entries that are large on this rank only: (blocks, SLOTS)."""
    generator = torch.Generator().manual_seed(5)
    order = torch.stack([torch.randperm(BLOCK, generator=generator) for _ in range(blocks)])
    return order[:, rank * SLOTS : (rank + 1) * SLOTS]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("leaders", [1, 2])
def test_every_sent_entry_is_among_the_largest_of_its_leader(ranks, leaders, monkeypatch):
    """An index that is off, in another rank's place, or in the padding would select a small entry."""
    torch.manual_seed(0)
    model = torch.nn.Linear(640, 10, bias=False)  # 25 blocks
    build = partial(IWP, density=SLOTS / BLOCK, values="fp32", leaders=leaders, explore=0.0, block_means=False)
    monkeypatch.setattr(iwp, "_FLOOR", 1e9)  # scored by the gradient
    world, group = replicas(ranks, build, model=model)
    for step in range(4):
        grads = []
        for rank in range(ranks):
            grad = torch.full((25, BLOCK), 1e-3)
            grad.scatter_(1, large_entries(rank, 25), 100.0 * (step + 1))
            grads.append([grad.view(10, 640)])
        applied = together(world, group, grads, shuffle=step)
        assert all(equal(applied[0], other) for other in applied)
        sent = applied[0][0].view(25, BLOCK) != 0
        large = torch.stack([torch.zeros(25, BLOCK).scatter_(1, large_entries(r, 25), 1.0) for r in range(ranks)])
        assert 25 * SLOTS // 2 < sent.sum() <= 25 * SLOTS
        assert not (sent & (large.sum(0) == 0)).any()
        assert (sent.sum(1) == SLOTS).all(), "every block has its slots"


@pytest.mark.parametrize("numel", [1030, 1279])
def test_padding_is_never_selected(numel):
    """Even if all entries are zero. The last block of 1030 entries has 6 entries and 6 slots; with fewer entries than
    slots padding would be selected, of which only the value 0 is sent."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1, numel))])
    world, group = replicas(2, partial(IWP, density=SLOTS / BLOCK, values="fp32", explore=0.3), model=model)
    for step in range(6):
        together(world, group, [[torch.zeros(1, numel)] for _ in group], shuffle=step)
        picker = group[0].compression.works[0].decider.picker
        positions = flat_positions(picker.indices, picker.table, picker.phase)
        assert positions.max() < numel


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_positions_beyond_int32_have_eight_bytes(monkeypatch, name, host):
    def run(most_entries):
        monkeypatch.setattr(each_rank, "INT32_ENTRIES", most_entries)
        world, ranks = replicas(2, METHODS[name], host=host)
        applied = random_steps(world, ranks, range(3))
        messages = [work.decider.message.dtype for work in ranks[0].compression.works]
        stats = [r.compression.stats()["last"]["indices_bytes"] for r in ranks]
        return messages, stats, applied, [r.compression.state_dict()["per_rank"]["buckets"] for r in ranks]

    bucket = replicas(1, METHODS[name])[1][0].compression.buckets[0]
    narrow, wide = run(bucket.blocks * BLOCK), run(bucket.blocks * BLOCK - 1)
    assert narrow[0] == [torch.int32] and wide[0] == [torch.int64]
    assert all(1.9 * few < many <= 2 * few for few, many in zip(narrow[1], wide[1], strict=True))
    assert same(narrow[2:], wide[2:])
