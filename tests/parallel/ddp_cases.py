"""DistributedDataParallel's own cases."""

import copy
import os
import textwrap
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import job
import pytest
import torch
from cases import Cases, refused, register
from common_cases import check_two_clocks, two_clocks_model
from job import DEVICE, Accounts, Branches, Job
from torch import distributed
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress.hosts.gradient_hook import use_hook
from hvd_compress.reference import low_bit

CASES: Cases = {}


def branches(build=Branches):
    """A model with the same weights on every rank, its optimizer, and the generator of this rank's data."""
    torch.manual_seed(0)
    model = build().to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(distributed.get_rank())


def train_step(model, optimizer, data):
    optimizer.zero_grad()
    model(torch.randn(4, 3, 6, 6, generator=data).to(DEVICE), range(6)).square().mean().backward()
    optimizer.step()


@register(CASES)
def sub_group():
    """All ranks but the first train together (with two ranks, both, in a group of their own)."""
    size = distributed.get_world_size()
    members = list(range(1 if size > 2 else 0, size))
    group = distributed.new_group(members)
    if distributed.get_rank() in members:
        trained = Job(density=1 / 32, group=group).train().assert_equal_replicas()
        assert trained.compression.collectives.size == len(members)
    distributed.barrier()


@register(CASES)
def static_graph():
    Job(density=1 / 32, unused=False, wrap={"static_graph": True}).train().assert_equal_replicas()


@register(CASES)
def gradient_as_bucket_view():
    Job(density=1 / 32, wrap={"gradient_as_bucket_view": True}).train().assert_equal_replicas()


@register(CASES)
def rebucketing():
    """After the first step DDP divides the parameters anew, in the order in which their gradients arrived on rank 0."""
    trained = Job(density=1 / 32, unused=False)
    seen = []
    trained.observe = lambda parameter, grad: seen.append(id(parameter))
    trained.train(3)
    assert trained.ddp._get_ddp_logging_data()["has_rebuilt_buckets"]
    count = len(seen) // 3
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) and seen[:count] != seen[count : 2 * count]
    trained.train().assert_equal_replicas()


@register(CASES, once=True)
def one_bucket():
    """All gradients in one bucket of DDP: the only hook of a step is the last."""
    Job(density=1 / 32, wrap={"bucket_cap_mb": 25}).train().assert_equal_replicas()


@register(CASES, once=True)
def parameters_outside_the_compressor():
    """They are averaged uncompressed, with a warning."""
    torch.manual_seed(0)
    model = Branches().to(DEVICE)
    ddp = DistributedDataParallel(model)
    compression = hvd_compress.IWP(model.branches.named_parameters(), density=1 / 16)
    ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    data = torch.Generator().manual_seed(distributed.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.randn(4, 3, 6, 6, generator=data).to(DEVICE)
            model.zero_grad()
            alone = torch.autograd.grad(model(x, range(6)).square().mean(), model.head.weight)[0]
            ddp(x, range(6)).square().mean().backward()
            mean = job.host.total(alone) / distributed.get_world_size()
            torch.testing.assert_close(model.head.weight.grad, mean)
    assert any("belongs to none of this compressor's parameters" in str(w.message) for w in caught)
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert all(torch.equal(flat, other) for other in job.host.gather(flat))


@register(CASES, once=True)
def powersgd_is_as_accurate_as_torchs():
    """The same rank, gradients of low rank plus noise: the errors of both are of one order of magnitude."""

    def error(own: bool) -> float:
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 192, bias=False).to(DEVICE)
        ddp = DistributedDataParallel(model)
        if own:
            ddp.register_comm_hook(hvd_compress.PowerSGD(model.named_parameters(), rank=4), hvd_compress.ddp_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        data = torch.Generator().manual_seed(distributed.get_rank())
        low = torch.randn(192, 6, generator=torch.Generator().manual_seed(7))
        total, applied = torch.zeros(192, 256, device=DEVICE), torch.zeros(192, 256, device=DEVICE)
        for step in range(30):
            right = torch.randn(6, 256, generator=torch.Generator().manual_seed(step // 10))
            given = (low @ right + torch.randn(192, 256, generator=data)).to(DEVICE)
            model.zero_grad()
            (ddp(torch.eye(256, device=DEVICE)) * given.T).sum().backward()
            total += job.host.total(given) / distributed.get_world_size()
            applied += model.weight.grad
        return float((applied - total).norm() / total.norm())

    ours, theirs = error(True), error(False)
    assert 0.0 < ours < 0.5 and theirs / 3 < ours < theirs * 3, (ours, theirs)


@register(CASES, named=True)
def nodes_by_launcher_and_mesh():
    """As torchrun would start two nodes of two, and as meshes; ranks that are not in order; unequal nodes."""
    rank = distributed.get_rank()
    launched = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = str(rank % 2)
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("node", "gpu"))
    crossed = DeviceMesh(DEVICE.type, [[0, 2], [1, 3]], mesh_dim_names=("node", "gpu"))
    for nodes, inside in ((True, rank // 2), (mesh, rank // 2), (crossed, rank % 2)):
        trained = Job(density=1 / 32, nodes=nodes).train(4).assert_equal_replicas()
        held = trained.compression.engine.nodes
        members = [0, 1] if inside == 0 else [2, 3]
        if nodes is crossed:
            members = [0, 2] if inside == 0 else [1, 3]
        assert distributed.get_process_group_ranks(held.inside.group) == members
    groups = len(distributed.distributed_c10d._world.pg_map)
    Job(density=1 / 32, nodes=2)
    assert len(distributed.distributed_c10d._world.pg_map) == groups  # once made
    os.environ["LOCAL_RANK"] = str(rank if rank < 3 else 0)
    line = DeviceMesh(DEVICE.type, list(range(4)), mesh_dim_names=("gpu",))
    for nodes, says in (
        (True, "nodes must have equally many ranks, these have 3, 1"),
        (line, "node and GPU"),
        (True if rank == 1 else 2, "must be the same on all ranks, got 2, True, 2, 2 on ranks 0 to 3"),
        (3 if rank == 1 else mesh, "divisor" if rank == 1 else "got a mesh, an invalid one, a mesh, a mesh"),
    ):
        with refused(ValueError, says):
            Job(nodes=nodes)
    os.environ["LOCAL_RANK"] = launched


@register(CASES, named=True)
def local_steps_of_nodes():
    """DDP inside two nodes of two, local steps between them: the same as between the two ranks of each place, each of
    which exchanges everything. Each rank sends half as much."""
    mesh, trained = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("node", "gpu")), []

    def flat(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    for where in ({"nodes": mesh}, {"process_group": mesh.get_group("node")}):
        model, optimizer, data = branches()
        begun = flat(model)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group("gpu"))
        compression = hvd_compress.TopK(model, density=1.0, bucket_mb=0.01, **where)
        local = hvd_compress.LocalSteps(compression, optimizer, 2, unsent="buffer")
        for _ in range(9):
            train_step(ddp, optimizer, data)
            local.step()
        trained.append((compression, flat(model)))
    (_, mine), (_, theirs) = trained
    assert (mine - theirs).norm() < 1e-4 * (mine - begun).norm()
    sent = torch.tensor([float(c.stats()["total"]["values_bytes"]) for c, _ in trained])
    between_nodes, between_all = job.host.total(sent).tolist()
    assert between_nodes == between_all / 2
    with refused(ValueError, 'unsent="buffer"'):
        hvd_compress.LocalSteps(hvd_compress.IWP(model, nodes=mesh), optimizer, 2, unsent="weights")


@register(CASES, named=True)
def low_bit_of_nodes():
    """Buckets of different owners, tensors that are not compressed, and lengths: all ranks take part in the latter."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("node", "gpu"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(33, 33) for _ in range(3)])
    optimizer, generator = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.Generator().manual_seed(torch.distributed.get_rank() // 2),
    )
    local = hvd_compress.recipes.low_bit(model, optimizer, 2, bits=1, nodes=mesh, bucket_mb=0.003)
    assert len(local.compression.buckets) == 3
    for _ in range(7):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        local.step()
    local.finish(model)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(4)]
    torch.distributed.all_gather(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone) and flat.isfinite().all()
    assert not local.compression.engine.collectives._direct.awaited, "no message is awaited from ranks that send none"


@register(CASES, once=True, applies=lambda method: DEVICE.type == "cpu")  # NCCL ends a process instead
def join_raises_an_error():
    """Rank 0 has no batch. Its error names join(); the others' collectives fail when their time is over."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).to(DEVICE)
    ddp = DistributedDataParallel(model, process_group=distributed.new_group(timeout=timedelta(seconds=5)))
    group = distributed.new_group(timeout=timedelta(seconds=5))
    compression = hvd_compress.IWP(model.named_parameters(), process_group=group)
    ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    says = "" if distributed.get_rank() > 0 else "does not support DistributedDataParallel.join()"
    with refused(RuntimeError, says), ddp.join():
        for _ in range(min(distributed.get_rank(), 1)):
            ddp(torch.ones(1, 64, device=DEVICE)).sum().backward()
    distributed.barrier()


class TwoHeads(torch.nn.Module):
    """A channels_last convolution and two heads, of which the second is not always used."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 64, 3).to(memory_format=torch.channels_last)
        self.first, self.second = torch.nn.Linear(64, 32), torch.nn.Linear(64, 32)

    def forward(self, x, both):
        x = self.conv(x).mean((2, 3))
        return self.first(x) + self.second(x) if both else self.first(x)


@register(CASES)
def every_gradient_arrives():
    """With channels_last weights, two backward passes for a step, and a head that no rank uses in every other step."""
    torch.manual_seed(0)
    model = TwoHeads().to(DEVICE)
    compression = hvd_compress.IWP(model.named_parameters(), density=1 / 16, values="fp32")
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    accounts = Accounts(model, compression)
    data = torch.Generator().manual_seed(distributed.get_rank())
    for step in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(4, 8, 5, 5, generator=data).to(DEVICE)
            accounts.give(model(x, step % 2 == 0).square().sum())
            ddp(x, step % 2 == 0).square().sum().backward()
        accounts.take()
        optimizer.step()
    accounts.check()


@register(CASES, once=True)
def local_steps_of_averaged_gradients():
    """DDP averages over the same ranks: an error, whichever of its hooks does it. What averages nothing, or did so in a
    warm-up, is right."""

    def train(averages, warm_up=0, hook=None, given=None, sync=True):
        model, optimizer, data = branches()
        ddp = DistributedDataParallel(model)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for _ in range(warm_up):
            train_step(ddp, optimizer, data)
        local = hvd_compress.recipes.low_bit(ddp if given == "ddp" else model, optimizer, 2)
        for _ in range(6):
            with nullcontext() if sync else ddp.no_sync():
                train_step(model if averages == "warm-up" else ddp, optimizer, data)
            local.step()
        local.finish(model)

    def of_nothing(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    for wrong in ({}, {"given": "ddp"}, {"hook": fp16_compress_hook}):
        with pytest.raises(RuntimeError, match=r"(?s)averaged by DistributedDataParallel.*ddp\.module"):
            train("all", **wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("nothing", hook=of_nothing)
        train("nothing", sync=False)
        train("warm-up", warm_up=3)


@register(CASES, once=True)
def dense_steps_after_local_ones():
    """After end() DDP averages again, and moments are the same; without it, an error that names it."""

    def train(end):
        model, _, data = branches()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ddp = DistributedDataParallel(model)
        hvd_compress.trainers.local_gradients(ddp)
        local = hvd_compress.recipes.low_bit(model, optimizer, 2)
        for _ in range(3):
            train_step(ddp, optimizer, data)
            local.step()
        getattr(local, end)(*([model] if end != "close" else []))
        if end == "finish":
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(None, fp16_compress_hook)
        for _ in range(4):
            train_step(ddp, optimizer, data)
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        return job.host.gather(mine.cpu())

    weights = train("end")
    assert all(torch.equal(weights[0], other) for other in weights)
    train("close")
    with pytest.raises(RuntimeError, match=r"stepped twice without LocalSteps.step\(\).*call local\.end\(model\)"):
        train("finish")


@register(CASES, once=True)
def local_steps_after_a_warm_up_with_a_compressor():
    """The DDP model lives on, and the hook's compressor with it, which says nothing of the other optimizer until
    gradients come through it again."""
    for build in (hvd_compress.DeMo, hvd_compress.TopK, hvd_compress.DGC, hvd_compress.PowerSGD):
        model, optimizer, data = branches()
        ddp, compression = DistributedDataParallel(model), build(model)
        ddp.register_comm_hook(compression, hvd_compress.ddp_hook)
        if build is hvd_compress.TopK:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            compression.take_momentum(optimizer)
        for _ in range(3):
            train_step(ddp, optimizer, data)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        local = hvd_compress.recipes.low_bit(model, optimizer, 2)
        for _ in range(6):
            train_step(model, optimizer, data)
            local.step()
        local.finish(model)
        del local
        if build is not hvd_compress.PowerSGD:
            with refused(ValueError, "momentum would count twice"):
                train_step(ddp, optimizer, data)


@register(CASES, once=True)
def local_gradients_of_a_static_graph():
    """With a compressor's recipe, in a loop of one's own, and averaged again."""
    for arguments in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.003}):
        model, optimizer, data = branches()
        ddp = DistributedDataParallel(model, static_graph=True, **arguments)
        end = use_hook(ddp, None)
        local = hvd_compress.recipes.low_bit(model, optimizer, 2)
        for step in range(8):
            train_step(ddp, optimizer, data)
            grads = job.host.gather(model.head.weight.grad)
            if step < 6:
                assert not torch.equal(*grads[:2])
                local.step()
            else:
                assert torch.equal(*grads[:2])
            if step == 5:
                local.finish(model)
                del local
                for each in end:
                    each()


@register(CASES, once=True)
def a_discriminators_gradients_of_the_generators_step():
    """PyTorch's DCGAN: an error, or, where they do not come through the hook, the weights of a frozen discriminator."""

    def train(how, **arguments):
        torch.manual_seed(0)
        g = torch.nn.Linear(16, 32).to(DEVICE)
        d = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32)).to(DEVICE)
        nets = [DistributedDataParallel(net, **arguments) for net in (d, g)]
        for net in nets:
            net.register_comm_hook(hvd_compress.IWP(net.module, density=1 / 16), hvd_compress.ddp_hook)
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
        data = torch.Generator().manual_seed(distributed.get_rank())
        for _ in range(4):
            noise = torch.randn(4, 16, generator=data).to(DEVICE)
            for number, optimizer in enumerate(optimizers):
                nets[number].zero_grad()
                if number and how == "frozen":
                    d.requires_grad_(False)
                    d(nets[1](noise)).square().mean().backward()
                    d.requires_grad_(True)
                else:
                    with nets[0].no_sync() if number and how == "no_sync" else nullcontext():
                        nets[0](nets[1](noise)).square().mean().backward()
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in d.parameters()])

    for arguments in ({}, {"gradient_as_bucket_view": True}):
        with refused(RuntimeError, "in no_sync() of this model"):
            train("as the example", **arguments)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(train("no_sync", **arguments), train("frozen", **arguments))


@register(CASES, once=True)
def local_steps_of_matrices():
    """The other parameters are averaged in each step by another compressor, and equal on all ranks after each."""
    torch.manual_seed(0)
    model, data = two_clocks_model(), torch.Generator().manual_seed(distributed.get_rank())
    _, others = hvd_compress.hidden_matrices(model)
    every = hvd_compress.Quantized(others.items(), 8)
    adamw = torch.optim.AdamW(others.values(), lr=0.01)
    check_two_clocks(model, adamw, data, lambda: hvd_compress.average_gradients(every))


@register(CASES, once=True)
def a_loop_under_ddp():
    """An error where DDP averages the same gradients."""
    model, rank, size = branches()[0], distributed.get_rank(), distributed.get_world_size()
    ddp, other = DistributedDataParallel(model), DistributedDataParallel(torch.nn.Linear(2, 2).to(DEVICE))
    compression = hvd_compress.NoCompression(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(rank))
    with refused(ValueError, "DistributedDataParallel averages the gradients already"):
        hvd_compress.average_gradients(compression)
    hvd_compress.trainers.local_gradients(ddp)
    ddp.require_backward_grad_sync = True  # as nanoGPT sets it in each step
    hvd_compress.average_gradients(compression)
    assert all((p.grad == (size - 1) / 2).all() for p in model.parameters())
    assert other.require_backward_grad_sync


class WithIdleLayer(torch.nn.Module):
    """Its first layer, and so DDP's last bucket, is not used."""

    def __init__(self):
        super().__init__()
        self.idle, self.used = torch.nn.Linear(64, 64), Branches()

    def forward(self, *inputs):
        return self.used(*inputs)


def compiled(kind, compile_step):
    """The weights after six steps, each of them in one function."""
    skips = kind == "a skipped bucket"
    model, optimizer, data = branches(WithIdleLayer if skips else Branches)
    called, after_backward, after_step = model, lambda: None, lambda: None
    if kind == "local":
        after_step = hvd_compress.recipes.low_bit(model, optimizer, 2).step
    else:
        compression = hvd_compress.IWP(model, density=1 / 8)
        if kind == "loop":
            after_backward = partial(hvd_compress.average_gradients, compression)
        else:
            options = {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.001} if skips else {}
            called = DistributedDataParallel(model, find_unused_parameters=True, **options)
            called.register_comm_hook(compression, hvd_compress.ddp_hook)

    def step(images):
        optimizer.zero_grad()
        called(images, range(6)).square().mean().backward()
        after_backward()
        optimizer.step()
        after_step()

    taken = compile_step(step)
    for _ in range(6):
        taken(torch.randn(4, 3, 6, 6, generator=data).to(DEVICE))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@register(CASES, once=True)
def compiled_steps():
    """``torch.compile`` of a whole step, in which it must not compile what exchanges."""
    for kind in ("local", "loop", "hook", "a skipped bucket"):
        expected = compiled(kind, lambda step: step)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=kind != "a skipped bucket"):  # it asserts that buckets are large
            torch.testing.assert_close(compiled(kind, partial(torch.compile, backend=job.apart)), expected)


@register(CASES, once=True)
def local_steps_on_the_same_data():
    """Nothing averages the gradients: a warning."""
    model, optimizer, _ = branches()
    local = hvd_compress.recipes.low_bit(model, optimizer, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            train_step(model, optimizer, torch.Generator().manual_seed(step))
            local.step()
    assert sum("all ranks have the same gradients" in str(w.message) for w in caught) == 1, caught


@register(CASES, once=True)
def one_rank_compares_its_options():
    """After load_state_dict() there. Its first message is as long as that of the others, who are in an exchange."""
    model, optimizer, data = branches()
    local = hvd_compress.LocalSteps(hvd_compress.NoCompression(model), optimizer, 2)
    with refused(RuntimeError, "was load_state_dict() called"):
        for step in range(4):
            if step == 3 and distributed.get_rank() == 0:
                local.load_state_dict(local.state_dict())
            train_step(model, optimizer, data)
            local.step()
    distributed.barrier()


@register(CASES, once=True)
def a_rank_that_is_late():
    """To its first step: the error names it."""
    distributed.barrier()
    model = Branches().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    local = hvd_compress.recipes.low_bit(model, optimizer, 50, start_timeout=0.5)
    if distributed.get_rank() == 1:
        time.sleep(1.5)
        local.step()
    else:
        with refused(RuntimeError, "rank 1 has not compared its options within 0.5 s"):
            local.step()
    distributed.barrier()


@register(CASES, once=True)
def the_specification_of_low_bit():
    """Its example, as a script would copy it, and the recipe make the same weights."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(distributed.get_rank())
    batches = [(torch.randn(8, 40, generator=data), torch.randn(8, 50, generator=data)) for _ in range(8)]
    batches = [(inputs.to(DEVICE), targets.to(DEVICE)) for inputs, targets in batches]
    start, models = torch.nn.Linear(40, 50).to(DEVICE), []
    recipe = "local = hvd_compress.recipes.low_bit(model, optimizer, 3, restore_length=False)"
    example = textwrap.dedent(low_bit.__doc__.partition("Example::")[2])
    assert example.count("local = LowBit(model.parameters(), 3, Group())") == 1
    for code in (example, example.replace("local = LowBit(model.parameters(), 3, Group())", recipe)):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = {"model": model, "optimizer": optimizer, "batches": batches, "LowBit": low_bit.LowBit}
        names |= {"loss_function": torch.nn.functional.mse_loss, "torch": torch, "hvd_compress": hvd_compress}
        exec(code, names)
        models.append(model)
    # finish() sums tensors one by one or together: of more than two ranks, a host adds in another order.
    atol = 0.0 if distributed.get_world_size() == 2 else 1e-6
    for a, b, before in zip(*(model.parameters() for model in (*models, start)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
        assert not torch.allclose(a, before, rtol=0, atol=1e-3)
