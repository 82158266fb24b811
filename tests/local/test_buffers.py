"""What finish(model) makes of buffers: the statistics of BatchNorm are averaged, the rest becomes rank 0's."""

import pytest
import torch
from local_workers import Worker, on_both_hosts, workers
from models import equal
from torch import nn

from hvd_compress.carriers.threads import ThreadWorld


class Odd(nn.Module):
    """Buffers of many kinds, with other values on each rank."""

    def __init__(self, rank=0, length=4):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(32, 48), nn.BatchNorm1d(48)
        self.instance = nn.InstanceNorm1d(48, track_running_stats=True)
        number = float(rank)
        self.register_buffer("queue", torch.randn(5, length) + number)
        self.register_buffer("pointer", torch.tensor(rank))
        self.register_buffer("flag", torch.tensor(rank == 1))
        self.register_buffer("zero_point", torch.full((3,), rank, dtype=torch.int32))
        self.register_buffer("expanded", torch.full((1, 3), number).expand(4, 3))
        self.register_buffer("transposed", torch.full((3, 5), number).t())
        self.register_buffer("rounded", torch.full((3,), number, dtype=torch.bfloat16))
        self.register_buffer("complex", torch.full((3,), number, dtype=torch.complex64), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        with torch.inference_mode():
            self.register_buffer("cached", torch.full((3,), number))


FROM_RANK_0 = ["queue", "pointer", "flag", "zero_point", "expanded", "transposed", "rounded", "complex", "cached"]


def odd_workers(count, ordered=True, lengths=(4, 4, 4)):
    world, group = workers(count, ordered=ordered, model=Odd(), period=2)
    for rank, worker in enumerate(group):
        for name, buffer in Odd(rank, lengths[rank]).named_buffers():
            holder, _, key = name.rpartition(".")
            worker.model.get_submodule(holder)._buffers[key] = buffer
        worker.model.register_buffer("rows", torch.eye(4).to_sparse_csr())  # cannot be copied with a model
        worker.model.norm.running_mean.fill_(rank)
        worker.model.norm.running_var.fill_(1.0 + rank)
        worker.model.instance.running_mean.fill_(2.0 * rank)
        worker.model.norm.num_batches_tracked.fill_(rank + 5)
    world.run(lambda i: group[i].train(2))
    return world, group


@on_both_hosts
def test_every_kind_of_buffer(ordered):
    world, group = odd_workers(3, ordered)
    expected = {name: group[0].model.get_buffer(name).clone() for name in FROM_RANK_0}
    world.run(lambda i: group[i].local.finish(group[i].model))
    for worker in group:
        model = worker.model
        for name, value in expected.items():
            assert torch.equal(model.get_buffer(name), value), name
        assert model.norm.running_mean.eq(1.0).all() and model.norm.running_var.eq(2.0).all()
        assert model.instance.running_mean.eq(2.0).all()
        assert model.norm.num_batches_tracked == 5
        assert model.expanded.stride() == (0, 1) and model.cached.is_inference()


@on_both_hosts
def test_other_shapes_name_the_buffer(ordered):
    """On all ranks, before anything has changed."""
    world, group = odd_workers(2, ordered, lengths=(4, 6))
    weights = [worker.weights() for worker in group]

    def body(i):
        with pytest.raises(RuntimeError, match=r"(?s)buffer queue.*Without the model"):
            group[i].local.finish(group[i].model)

    world.run(body)
    assert all(equal(worker.weights(), before) for worker, before in zip(group, weights, strict=True))
    world.run(lambda i: group[i].local.finish())


def test_other_sparse_values_name_the_buffer():
    world, group = odd_workers(2)
    group[1].model._buffers["sparse"] = torch.eye(4).mul(2.0).to_sparse()
    with pytest.raises(RuntimeError, match=r"buffer sparse: .*sparse_coo, hash"):
        world.run(lambda i: group[i].local.finish(group[i].model))


def test_a_buffer_without_values_is_refused():
    _, (worker, _) = odd_workers(2)
    worker.model._buffers["queue"] = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match="buffer queue has no values"):
        worker.local.finish(worker.model)


def test_another_model_is_refused():
    _, group = workers(2)
    other = workers(2)[1][0].model
    for model in (other, nn.Linear(3, 3)):
        with pytest.raises(ValueError, match="this model has none of the parameters"):
            group[0].local.finish(model)


def test_a_part_of_the_model_and_one_that_contains_it():
    """A model whose adapters only are trained; a backbone beside heads of each rank's own."""
    world, group = workers(2)
    for worker in group:
        worker.whole = nn.ModuleDict({"own": nn.Linear(3, 3), "shared": worker.model})
    world.run(lambda i: group[i].train(3))
    world.run(lambda i: group[i].local.finish(group[i].whole))
    world.run(lambda i: group[i].local.finish(group[i].model.norm))


def test_a_single_replica_has_one_value_in_its_shard_group():
    """There is nothing to exchange but buffers."""
    shards, group = ThreadWorld(2, ordered=True), [Worker(ThreadWorld(1), 0, period=2) for _ in range(2)]
    for rank, worker in enumerate(group):
        worker.compression.shard_groups = lambda rank=rank: [shards.collectives(rank)]
        worker.model.norm.register_buffer("pointer", torch.tensor(rank))
        statistics = nn.BatchNorm1d(3, affine=False)
        statistics.running_mean.fill_(rank)
        worker.model.norm.add_module("statistics", statistics)
        worker.train(3)
    shards.run(lambda i: group[i].local.finish(group[i].model.norm))
    for worker in group:
        assert worker.model.norm.pointer == 0 and worker.model.norm.statistics.running_mean.eq(0.5).all()
