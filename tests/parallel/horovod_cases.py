"""Horovod's own cases."""

import os
import time
from pathlib import Path

import horovod.torch as hvd
import job
import pytest
import torch
from cases import Cases, refused, register
from common_cases import check_two_clocks, two_clocks_model
from horovod_job import barrier, gather
from job import DEVICE, Job

import hvd_compress
from hvd_compress.carriers.horovod import HorovodCollectives
from hvd_compress.engine.collectives import allreduce, sum_of_parts

CASES: Cases = {}


@register(CASES)
def process_set():
    """All ranks but the first train together; the first, with the same script, trains alone. (Two ranks: the global
    set, since Horovod refuses a second one of the same ranks.)"""
    if hvd.size() == 2:
        Job(density=1 / 32, group=hvd.global_process_set).train().assert_equal_replicas()
        return
    members = list(range(1, hvd.size()))
    trained = Job(density=1 / 32, group=job.host.process_set(members)).train()
    if hvd.rank() in members:
        trained.assert_equal_replicas()
    else:
        assert trained.compression.stats()["steps"] == 0
    barrier()


@register(CASES, named=True)
def overlapping_process_sets():
    """Three compressors on {0, 1}, {1, 2} and all ranks; each rank begins with another one, and ends with another."""
    left, right = map(job.host.process_set, ([0, 1], [1, 2]))
    everyone = hvd.global_process_set
    used = [(i, s) for i, s in enumerate((left, right, everyone)) if s.included()]
    jobs = {i: Job(seed=i, density=1 / 32, group=chosen, unused=False) for i, chosen in used}
    # A circle: 0 waits for the left set, 1 for all ranks, 2 for the right set.
    order = {0: [0, 2], 1: [2, 1, 0], 2: [1, 2]}[hvd.rank()]
    for step in range(4):
        for i in order:
            jobs[i].backward(step)
        for i in order[::-1]:
            jobs[i].optimizer.step()
            jobs[i].optimizer.zero_grad()
    for trained in jobs.values():
        trained.assert_equal_replicas()
    barrier()


@register(CASES, named=True)
def nodes_after_a_new_init():
    """The process sets of nodes end with hvd.shutdown(). The first hook finds those of the new init, or makes them."""
    trained = Job(density=1 / 32, nodes=2, unused=False).train(3)
    inside = trained.compression.engine.nodes.inside
    logs, rank, size = Path(os.environ["HVD_COMPRESS_TEST_LOGS"]), hvd.rank(), hvd.size()
    for kind, init in (("given", job.host.start), ("dynamic", lambda: hvd.init(process_sets="dynamic"))):
        # Horovod's rendezvous has addresses of the first init until all ranks have ended it: one that is faster reads
        # them, and all wait for ever.
        barrier()
        hvd.shutdown()
        (logs / f"{job.method}.{kind}.{rank}").touch()
        deadline = time.monotonic() + 60
        while len([*logs.glob(f"{job.method}.{kind}.*")]) < size:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        init()
        hvd.broadcast_parameters(trained.model.state_dict(), root_rank=0)
        trained.train(3).assert_equal_replicas()
        assert inside.size == 2 and trained.compression.stats()["steps"] == 3
    chosen = hvd.add_process_set(hvd.ProcessSet([1, 2, 3]))
    carrier, alone = HorovodCollectives(chosen), Job(density=1 / 32, nodes=False, group=chosen).train(2)
    assert carrier.active == (hvd.rank() > 0) and alone.compression.stats()["steps"] == 2 * carrier.active
    barrier()
    hvd.remove_process_set(chosen)
    assert not carrier.active
    os.environ["HOROVOD_ELASTIC"] = "1"
    with refused(ValueError, "elastic"):
        Job(nodes=2)
    del os.environ["HOROVOD_ELASTIC"]


@register(CASES, once=True)
def exact_sums():
    """A sum of int64 in two collectives, as on a GPU: every bit, and a training like that with one collective."""
    carrier = HorovodCollectives()
    for shape in ((1,), (7,), (3, 5)):
        words = torch.randint(-(2**60), 2**60, shape, generator=torch.Generator().manual_seed(hvd.rank()))
        road = sum_of_parts(allreduce(words), carrier.size)
        parts = carrier.start(next(road), f"exact.{shape}.0").result(timeout=60)
        with pytest.raises(StopIteration) as end:
            road.send(carrier.start(road.send(parts), f"exact.{shape}.1").result(timeout=60))
        assert torch.equal(end.value.value, gather(words).sum(0))
    models, asked = [], []

    def never(_, tensor):
        asked.append(tensor.dtype == torch.int64)
        return not asked[-1]

    for replaced in (HorovodCollectives.sums, never):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HorovodCollectives, "sums", replaced)
            models.append(Job(density=1 / 32, values="lanes4", unused=False).train(6).model)
    assert any(asked)
    for one, other in zip(*map(torch.nn.Module.parameters, models), strict=True):
        assert torch.equal(one, other)


@register(CASES, once=True)
def refusals():
    """Settings of Horovod's optimizer that do not fit raise an error before any update."""
    for options, says in (({"op": hvd.Sum}, "must be hvd.Average"), ({"process_set": "other"}, "same process_set")):
        if options.get("process_set") == "other":
            # With two ranks, another process set has one rank.
            options = {"process_set": job.host.process_set([0])}
        model = torch.nn.Linear(64, 64).to(DEVICE)
        plain, named = torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(plain, named, hvd_compress.IWP(named), **options)
        before = model.weight.detach().clone()
        with refused(ValueError, says):
            optimizer.step()
        assert torch.equal(model.weight, before)
    if hvd.size() == 2:
        with refused(ValueError, "process sets, as of ranks [1], from hvd.init"):
            Job(nodes=2)
    barrier()


@register(CASES, once=True)
def sparse_as_dense():
    """Two equal tables whose sparse gradients Horovod makes dense."""
    torch.manual_seed(0)
    tables = torch.nn.ModuleList(torch.nn.Embedding(200, 16, sparse=True) for _ in range(2)).to(DEVICE)
    head = torch.nn.Linear(32, 8).to(DEVICE)
    named = [*tables.named_parameters(), *head.named_parameters()]
    compression = hvd_compress.IWP(named, density=1 / 16)
    plain = torch.optim.SGD([p for _, p in named], lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named, compression, sparse_as_dense=True)
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(job.steps):
        words = torch.randint(0, 200, (2, 9), generator=data).to(DEVICE)
        x = torch.cat([table(word) for table, word in zip(tables, words, strict=True)], 1)
        head(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compression.stats()["last"]["wire_ratio"] > 5
    everyone = hvd.allgather_object([p.detach().cpu() for _, p in named])
    assert all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


@register(CASES, once=True)
def usual_script():
    """Tied and frozen parameters, a schedule, and the broadcasts of Horovod's own examples, in their order."""
    torch.manual_seed(hvd.rank())
    encoder, decoder = torch.nn.Embedding(100, 48), torch.nn.Linear(48, 100, bias=False)
    decoder.weight = encoder.weight
    frozen = torch.nn.Linear(48, 48)
    frozen.requires_grad_(False)
    model = torch.nn.Sequential(encoder, frozen, torch.nn.Tanh(), torch.nn.Linear(48, 48), decoder).to(DEVICE)
    compression = hvd_compress.IWP(model.named_parameters(), density=1 / 16)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 40)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), compression=compression)
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(job.steps):
        words = torch.randint(0, 100, (16,), generator=data).to(DEVICE)
        torch.nn.functional.cross_entropy(model(words), (words + 1) % 100).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    everyone = hvd.allgather_object([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


@register(CASES, once=True)
def plain_allreduce_with_compression():
    """A tensor that is no parameter's gradient is averaged uncompressed."""
    trained = Job(density=1 / 32)
    x = torch.full((7, 300), float(hvd.rank()), device=DEVICE)
    mean = hvd.allreduce(x, compression=trained.compression, name="check.plain")
    assert torch.equal(mean, torch.full_like(x, (hvd.size() - 1) / 2))
    assert x[0, 0] == hvd.rank()


@register(CASES, once=True)
def local_steps_of_matrices():
    """The other parameters are averaged in each step by another compressor, and equal on all ranks after each."""
    torch.manual_seed(0)
    model, data = two_clocks_model(), torch.Generator().manual_seed(hvd.rank())
    _, others = hvd_compress.hidden_matrices(model)
    every = hvd_compress.Quantized(others.items(), 8)
    adamw = torch.optim.AdamW(others.values(), lr=0.01)
    wrapped = hvd.DistributedOptimizer(adamw, named_parameters=others.items(), compression=every)
    check_two_clocks(model, wrapped, data)


@register(CASES, once=True)
def local_steps_of_a_horovod_optimizer():
    """Given, or stepping the parameters of the plain one that was given."""
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for given in (wrapped, [wrapped]):
        with refused(ValueError, "take the plain optimizer, not Horovod's"):
            hvd_compress.recipes.low_bit(model, given, 2)
    local = hvd_compress.recipes.low_bit(model, optimizer, 2)
    model(torch.ones(2, 64)).sum().backward()
    with refused(ValueError, "DistributedOptimizer averages the gradients in every step"):
        wrapped.step()
    del local
    wrapped.synchronize()
