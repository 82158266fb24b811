"""What must hold for every method, on real Horovod. Run by tests/test_parallel.py:  scripts/run.sh [--gloo] NP
check_training.py METHOD[:CASE,CASE...] ...

METHOD is one of tests/methods.py; without cases it goes through all that do not belong to another. Every case trains a
model whose branches run in an order of each rank's own, so that hooks fire in different orders, and in which a branch
is unused on one rank every fifth step. A case prints one line; a failed assertion ends the job.
"""

import copy
import random
import sys
import tempfile
from pathlib import Path

import horovod.torch as hvd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from methods import EXACT, FORGETFUL, METHODS, TRAINED, fitting

import hvd_compress

CASES = {}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS = 40
# Only for IWP's own options, or run with settings of their own.
IWP_ONLY = ("topk", "one_leader", "sparse_as_dense", "usual_script", "plain_allreduce_with_compression", "refusals")
APART = ("checkpoint", "local_steps", "hundreds_of_steps")


def case(function):
    CASES[function.__name__] = function
    return function


class Tested:
    """The method under test; cases add options of their own to it."""

    name = "iwp"

    @classmethod
    def build(cls, named_parameters, **options):
        method = METHODS[cls.name]
        return method(named_parameters, **fitting(method, options))

    @classmethod
    def family(cls):
        return cls.name.partition("-")[0]

    @classmethod
    def rounds(cls):
        """Whether the ring rounds sums: those of 16-bit floats."""
        return METHODS[cls.name].keywords.get("values") == "fp16"


class Branches(torch.nn.Module):
    """Parallel branches, a dense head, a small conv that is not compressed: ``order`` says in which order they run."""

    def __init__(self, width=48, branches=6):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.conv = torch.nn.Conv2d(8, 24, 3, padding=1)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(24, width) for _ in range(branches))
        self.mix = torch.nn.ModuleList(torch.nn.Linear(width, 40) for _ in range(branches))
        self.head = torch.nn.Linear(40, 4)

    def forward(self, x, order):
        x = self.conv(self.norm(self.stem(x)).relu()).relu().mean((2, 3))
        return self.head(sum(self.mix[i](self.branches[i](x).tanh()) for i in order))


class Job:
    """One replica in training: the user's script, in small."""

    def __init__(self, seed=0, dtype=torch.float32, channels_last=False, compression=None, process_set=None, **options):
        torch.manual_seed(seed)
        self.model = Branches().to(DEVICE, dtype)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        momentum = options.pop("optimizer_momentum", 0.0)
        groups, passes = options.pop("groups", None), options.pop("backward_passes_per_step", 1)
        take_momentum = options.pop("take_momentum", False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=momentum)
        arguments = {"process_set": process_set} if process_set is not None else {}
        build = options.pop("build", Tested.build)
        self.compression = compression or build(self.model.named_parameters(), bucket_mb=0.02, **arguments, **options)
        if take_momentum:
            self.compression.take_momentum(self.optimizer)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
            groups=groups,
            backward_passes_per_step=passes,
            **arguments,
        )
        self.passes, self.dtype, self.process_set = passes, dtype, process_set
        # A group of which one rank lacks a member is never formed there: stock Horovod stalls on it by itself.
        self.unused = groups is None
        self.random = random.Random(seed * 100 + hvd.rank())
        self.data = torch.Generator().manual_seed(seed * 100 + hvd.rank())

    def loss(self, step):
        order = list(range(6))
        self.random.shuffle(order)
        if self.unused and step % 5 == 4 and hvd.rank() == 1:
            order.remove(3)
        x = torch.randn(4, 3, 6, 6, generator=self.data).to(DEVICE, self.dtype)
        target = x.mean((1, 2, 3)).gt(0).long() + 2 * x[:, 0].mean((1, 2)).gt(0).long()
        return torch.nn.functional.cross_entropy(self.model(x, order).float(), target)

    def step(self, step):
        for _ in range(self.passes):
            self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps=STEPS):
        for step in range(steps):
            self.step(step)
        return self

    def assert_equal_replicas(self):
        mine = torch.cat([p.detach().double().flatten() for p in self.model.parameters()]).cpu()
        assert mine.isfinite().all()
        options = {"process_set": self.process_set} if self.process_set is not None else {}
        everyone = hvd.allgather(mine[None], name="check.equal", **options)
        assert all(torch.equal(everyone[0], other) for other in everyone), "replicas differ"
        return self


@case
def plain():
    """Conservation: what all ranks said by a step is what was applied and what they still hold."""
    job = Job()
    names = {name: p for name, p in job.model.named_parameters() if name in job.compression.state_dict()["tensors"]}
    assert len(names) > 8
    said = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in names.items()}
    applied = copy.deepcopy(said)
    compress = job.compression.compress

    def spy(grad):
        for name, p in names.items():
            if p.grad is grad:
                said[name] += grad.detach().double().cpu()
        return compress(grad)

    job.compression.compress = spy
    for step in range(STEPS):
        job.loss(step).backward()
        job.optimizer.synchronize()
        for name, p in names.items():
            applied[name] += hvd.size() * p.grad.double().cpu()
        with job.optimizer.skip_synchronize():
            job.optimizer.step()
        job.optimizer.zero_grad()
    for name in names if Tested.name not in FORGETFUL else ():
        held = job.compression.residual(name).double().cpu()
        everyone = hvd.allreduce(said[name] - held, op=hvd.Sum, name=f"check.{name}")
        torch.testing.assert_close(applied[name], everyone, rtol=0, atol=1e-2 if Tested.rounds() else 1e-4)
    job.assert_equal_replicas()
    stats = job.compression.stats()
    assert stats["steps"] == STEPS and stats["total"]["wire_bytes"] > 0


@case
def dense_at_density_one():
    """Density 1 with fp32 values takes the same steps as stock Horovod."""
    ours = Job(build=EXACT[Tested.family()], optimizer_momentum=0.9).train()
    stock = Job(compression=hvd.Compression.none, optimizer_momentum=0.9).train()
    for (name, a), b in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@case
def thousand_steps():
    Job(build=TRAINED[Tested.family()]).train(1000).assert_equal_replicas()


@case
def hundreds_of_steps():
    """Past every interval of a method's own, where a thousand would take minutes."""
    Job(build=TRAINED[Tested.family()]).train(250).assert_equal_replicas()


@case
def groups():
    Job(density=1 / 32, groups=2).train().assert_equal_replicas()


@case
def backward_passes_per_step():
    Job(density=1 / 32, backward_passes_per_step=2).train().assert_equal_replicas()


@case
def process_set():
    """All ranks but the first train together; the first, with the same script, trains for itself. (Two ranks: Horovod
    knows that set already.)"""
    if hvd.size() == 2:
        Job(density=1 / 32, process_set=hvd.global_process_set).train().assert_equal_replicas()
        return
    members = list(range(1, hvd.size()))
    chosen = hvd.add_process_set(hvd.ProcessSet(members))
    job = Job(density=1 / 32, process_set=chosen).train()
    if hvd.rank() in members:
        job.assert_equal_replicas()
    else:
        assert job.compression.stats()["steps"] == 0
    hvd.barrier()
    hvd.remove_process_set(chosen)


@case
def topk():
    Job(density=1 / 64, selection="topk").train().assert_equal_replicas()


@case
def one_leader():
    Job(density=1 / 64, leaders=1).train().assert_equal_replicas()


@case
def momentum_taken_over():
    job = Job(density=1 / 64, optimizer_momentum=0.9, take_momentum=True)
    assert job.compression.stats()["steps"] == 0
    assert all(group["momentum"] == 0 for group in job.optimizer.param_groups)
    job.train().assert_equal_replicas()


@case
def channels_last():
    Job(density=1 / 32, channels_last=True).train().assert_equal_replicas()


@case
def bfloat16_parameters():
    Job(density=1 / 32, dtype=torch.bfloat16).train().assert_equal_replicas()


@case
def clipping():
    """The documented order: synchronize, clip, step without a second synchronize."""
    job = Job(density=1 / 32)
    for step in range(STEPS):
        job.loss(step).backward()
        job.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        with job.optimizer.skip_synchronize():
            job.optimizer.step()
        job.optimizer.zero_grad()
    job.assert_equal_replicas()


@case
def grad_scaler():
    """An infinity on one rank makes every rank skip the step; the residual is in unscaled units and stays finite."""
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=10)
    job = Job(density=1 / 32, grad_scaler=scaler)
    skipped = 0
    for step in range(STEPS):
        loss = job.loss(step)
        if step == 7 and hvd.rank() == 0:
            loss = loss * float("inf")
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        job.optimizer.synchronize()
        scaler.unscale_(job.optimizer)
        with job.optimizer.skip_synchronize():
            scaler.step(job.optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        job.optimizer.zero_grad()
    assert skipped == 1, skipped
    assert scaler.get_scale() > 2.0**10
    assert job.compression.stats()["residual_norm"] < 1e3
    job.assert_equal_replicas()


@case
def checkpoint():
    """Saved on every rank, resumed in fresh objects: the same weights to the last bit.

    Only without fusion: which tensors Horovod fuses varies from run to run, and with it, from three ranks on, the order
    in which a ring adds. Run it with HOROVOD_FUSION_THRESHOLD=0.
    """
    options = dict(density=1 / 32, optimizer_momentum=0.9, budget_interval=7)
    straight = Job(**options).train(20)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{hvd.rank()}.pt"
        torch.save(straight.compression.state_dict(), file)
        resumed = Job(**options)
        resumed.model.load_state_dict(straight.model.state_dict())
        resumed.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
        resumed.compression.load_state_dict(torch.load(file, weights_only=True))
    resumed.random.setstate(straight.random.getstate())
    resumed.data.set_state(straight.data.get_state())
    straight.train(20)
    resumed.train(20)
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@case
def refusals():
    """Settings of Horovod's optimizer that would train wrongly, or never return, are refused before any update."""
    for options, says in (({"op": hvd.Sum}, "must be hvd.Average"), ({"process_set": "other"}, "same process_set")):
        other = None
        if options.get("process_set") == "other":
            # Two ranks know only one set of both: one of a single rank stands for another.
            other = hvd.add_process_set(hvd.ProcessSet([0]))
            options = {"process_set": other}
        model = torch.nn.Linear(64, 64).to(DEVICE)
        compression = hvd_compress.IWP(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            compression=compression,
            **options,
        )
        before = model.weight.detach().clone()
        try:
            optimizer.step()
            raise AssertionError(f"{options} was not refused")
        except ValueError as error:
            assert says in str(error), error
        assert torch.equal(model.weight, before)
        if other is not None:
            hvd.barrier()
            hvd.remove_process_set(other)


@case
def sparse_as_dense():
    """Two equal tables whose sparse gradients Horovod densifies."""
    torch.manual_seed(0)
    tables = torch.nn.ModuleList(torch.nn.Embedding(200, 16, sparse=True) for _ in range(2)).to(DEVICE)
    head = torch.nn.Linear(32, 8).to(DEVICE)
    named = [*tables.named_parameters(), *head.named_parameters()]
    compression = hvd_compress.IWP(named, density=1 / 16)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in named], lr=0.1),
        named_parameters=named,
        compression=compression,
        sparse_as_dense=True,
    )
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        words = torch.randint(0, 200, (2, 9), generator=data).to(DEVICE)
        x = torch.cat([table(word) for table, word in zip(tables, words, strict=True)], 1)
        head(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compression.stats()["last"]["wire_ratio"] > 5
    everyone = hvd.allgather_object([p.detach().cpu() for _, p in named])
    assert all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


@case
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
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, STEPS)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), compression=compression)
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        words = torch.randint(0, 100, (16,), generator=data).to(DEVICE)
        torch.nn.functional.cross_entropy(model(words), (words + 1) % 100).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    everyone = hvd.allgather_object([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


@case
def plain_allreduce_with_compression():
    """A tensor that is nobody's gradient passes through."""
    job = Job(density=1 / 32)
    x = torch.full((7, 300), float(hvd.rank()), device=DEVICE)
    mean = hvd.allreduce(x, compression=job.compression, name="check.plain")
    assert torch.equal(mean, torch.full_like(x, (hvd.size() - 1) / 2))
    assert x[0, 0] == hvd.rank()


@case
def local_steps():
    """Slim-DP around a plain optimizer: a few steps of each rank's own, then what is not sent drifts on."""
    torch.manual_seed(0)
    model = Branches().to(DEVICE)
    options = dict(mode="local", period=4, density=1 / 8, bucket_mb=0.02)
    compression = hvd_compress.SlimDP(model.named_parameters(), **options)
    optimizer = compression.wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    data = torch.Generator().manual_seed(hvd.rank())
    for _ in range(STEPS):
        x = torch.randn(4, 3, 6, 6, generator=data).to(DEVICE)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x, range(6)), x.mean((1, 2, 3)).gt(0).long()).backward()
        optimizer.step()
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = hvd.allgather(mine[None], name="check.local")
    assert not torch.equal(everyone[0], everyone[1]), "what was not sent drifts"
    compression.finish()
    assert compression.stats()["steps"] == STEPS // 4 + 1
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    together = hvd.allgather(mine[None], name="check.finish")
    assert all(torch.equal(together[0], other) for other in together)
    torch.testing.assert_close(together[0], everyone.mean(0), rtol=0, atol=1e-5)


def cases_of(method):
    """All that make sense for a method."""
    skipped = (*APART, *(IWP_ONLY if method != "iwp" else ()))
    return [name for name in CASES if name not in skipped]


def main():
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    assert hvd.size() > 1
    for argument in sys.argv[1:]:
        Tested.name, _, cases = argument.partition(":")
        for name in cases.split(",") if cases else cases_of(Tested.name):
            CASES[name]()
            line = f"ok {Tested.name} {name}"
            print(line if hvd.rank() == 0 else f"rank {hvd.rank()} {line}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
