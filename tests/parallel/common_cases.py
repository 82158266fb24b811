"""Cases for both hosts."""

import os
import warnings
from pathlib import Path

import job
import torch
from cases import Cases, has_exact_options, has_momentum, is_demo, refused, register
from job import DEVICE, Accounts, Branches, Job
from methods import EXACT, FORGETFUL, METHODS, TRAINED, WITHOUT_RESIDUAL
from optimizers import muon_and_adamw

import hvd_compress
from hvd_compress.engine.two_levels import NotOwned

CASES: Cases = {}


@register(CASES)
def plain():
    """Conservation: the sum over ranks of all gradients is what was applied plus the residuals."""
    trained = Job()
    accounts = Accounts(trained.model, trained.compression)
    names = {id(p): name for name, p in accounts.parameters.items()}

    def observe(parameter, grad):
        if (name := names.get(id(parameter))) is not None:
            accounts.given[name] += grad.detach().double().cpu()

    trained.observe = observe
    for step in range(job.steps):
        trained.backward(step)
        job.host.synchronize(trained)
        accounts.take()
        trained.apply()
    if job.method not in FORGETFUL:
        accounts.check(atol=1e-2 if "fp16" in METHODS[job.method].keywords.values() else 1e-4)
    trained.assert_equal_replicas()
    stats = trained.compression.stats()
    assert stats["steps"] == job.steps and stats["total"]["wire_bytes"] > 0


@register(CASES, applies=has_exact_options)
def dense_at_density_one():
    """Density 1 with fp32 values takes the same steps as the host without compression."""
    ours = Job(build=EXACT[job.family()], optimizer_momentum=0.9).train()
    stock = Job(build=None, optimizer_momentum=0.9).train()
    ours, stock = (dict(trained.model.named_parameters()) for trained in (ours, stock))
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


@register(CASES, named=True)
def thousand_steps():
    Job(build=TRAINED[job.family()]).train(1000).assert_equal_replicas()


@register(CASES, named=True)
def hundreds_of_steps():
    """More than any interval of a method."""
    Job(build=TRAINED[job.family()]).train(250).assert_equal_replicas()


@register(CASES)
def accumulation():
    """Several backward passes per step: backward_passes_per_step of Horovod, no_sync() of DDP."""
    Job(density=1 / 32, passes=2).train().assert_equal_replicas()


@register(CASES, applies=is_demo)
def signs():
    """DeMo with its decay and its sign, as it is by default."""
    trained = Job(build=hvd_compress.DeMo, exchange=METHODS[job.method].keywords.get("exchange", "ring"))
    for step in range(job.steps):
        trained.backward(step)
        job.host.synchronize(trained)
        for p in trained.model.parameters():
            assert set(p.grad.unique().tolist()) <= {-1.0, 0.0, 1.0}
        trained.apply()
    trained.assert_equal_replicas()


@register(CASES, applies=is_demo)
def orthogonal():
    Job(build=hvd_compress.DeMo, orthogonal=True).train().assert_equal_replicas()


@register(CASES, once=True)
def one_leader():
    Job(density=1 / 64, leaders=1).train().assert_equal_replicas()


@register(CASES, applies=has_momentum)
def momentum_taken_over():
    trained = Job(density=1 / 64, optimizer_momentum=0.9, take_momentum=True)
    assert all(group["momentum"] == 0 for group in trained.optimizer.param_groups)
    trained.train().assert_equal_replicas()


@register(CASES)
def channels_last():
    Job(density=1 / 32, channels_last=True).train().assert_equal_replicas()


@register(CASES)
def bfloat16_parameters():
    """As scripts for language models make them."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        Job(density=1 / 32, dtype=torch.bfloat16).train().assert_equal_replicas()
    finally:
        torch.set_default_dtype(torch.float32)


@register(CASES)
def clipping():
    """Gradients are clipped after they are averaged."""
    trained = Job(density=1 / 32)
    for step in range(job.steps):
        trained.backward(step)
        job.host.synchronize(trained)
        torch.nn.utils.clip_grad_norm_(trained.model.parameters(), 0.1)
        trained.apply()
    trained.assert_equal_replicas()


@register(CASES)
def grad_scaler():
    """An infinity on one rank makes every rank skip the step; residuals are in unscaled units and stay finite."""
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10, growth_interval=3)
    trained = Job(density=1 / 32, grad_scaler=scaler)
    skipped = 0
    for step in range(8):
        before = scaler.get_scale()
        factor = float("inf") if step == 4 and job.host.rank() == 0 else 1.0
        trained.backward(step, lambda loss, factor=factor: scaler.scale(loss * factor))
        job.host.synchronize(trained)
        scaler.unscale_(trained.optimizer)
        trained.apply(scaler.step)
        scaler.update()
        skipped += scaler.get_scale() < before
    assert skipped == 1, skipped
    assert scaler.get_scale() > 2.0**10
    assert trained.compression.stats()["residual_norm"] < 1e3
    trained.assert_equal_replicas()


@register(CASES, named=True)
def local_steps():
    """The plain model and optimizer: common weights are equal after each exchange, and nothing is lost. At the end all
    ranks have the same parameters and BatchNorm statistics."""
    for unsent in ("weights", "buffer"):
        _local_steps(unsent, adamw)


@register(CASES, named=True)
def dropped_in_progress():
    """What check_training.py lets no case do."""
    trained = LocalJob(adamw, delay=1)
    for _ in range(4):
        trained.local_step()
        trained.local.step()


@register(CASES, named=True)
def local_steps_of_two_optimizers():
    for unsent in ("weights", "buffer"):
        _local_steps(unsent, muon_and_adamw)


@register(CASES, named=True)
def local_steps_in_flight():
    """One half of the weights after the other, and averages that arrive later."""
    for unsent in ("weights", "buffer"):
        _local_steps(unsent, adamw, fragments=2, delay=1)


@register(CASES, once=True)
def restored_lengths():
    """Common weights are equal, and come further than by plain averages."""
    distances = []
    for restore_length in (False, True):
        torch.manual_seed(0)
        model = Branches().to(DEVICE)
        optimizer, data = torch.optim.SGD(model.parameters(), lr=0.01), torch.Generator().manual_seed(job.host.rank())
        options = {"restore_length": restore_length, "fragments": 2, "delay": 1, "bucket_mb": 0.02}
        local = hvd_compress.recipes.low_bit(model, optimizer, 2, **options)
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        for _ in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=data).to(DEVICE)
            optimizer.step()
            local.step()
        common = _everyone(weight.common for weight in local._rounds._common.weights)
        assert all(torch.equal(common[0], other) for other in common)
        distances.append((common[0] - before.double().cpu()).norm())
        local.finish(model)
    assert distances[1] > 1.1 * distances[0], distances


@register(CASES, once=True)
def local_steps_in_different_calls():
    """finish() on one rank, unequal numbers of batches: all ranks say who is where, and the group still works."""
    job.host.barrier()
    first = job.host.rank() == 0
    for alone in (True, False):
        trained = LocalJob(adamw)

        def train(count, trained=trained):
            for _ in range(count):
                trained.local_step()
                trained.local.step()

        mine, others = ("finish()", "step() 16") if alone else ("step() 12", "finish()")
        with refused(RuntimeError, f"rank 0 in {mine}, rank") as raised:
            train(13 if first or alone else 10)
            if first or not alone:
                trained.local.finish(trained.model)
            train(8)
        assert f" in {others}" in str(raised.value), raised.value
        job.host.barrier()


def two_clocks_model():
    """A head and an embedding beside hidden matrices."""
    body = torch.nn.Linear(48, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 48, bias=False)
    return torch.nn.Sequential(torch.nn.Embedding(40, 48), *body, torch.nn.LayerNorm(48), torch.nn.Linear(48, 40)).to(
        DEVICE
    )


@register(CASES, once=True)
def averaged_gradients():
    """Embedding, norm and head by AdamW on averaged gradients: its state, too, is the same on all ranks after each
    call."""
    torch.manual_seed(0)
    model, data = two_clocks_model(), torch.Generator().manual_seed(job.host.rank())
    optimizer = torch.optim.AdamW(hvd_compress.hidden_matrices(model)[1].values(), lr=0.01)
    check_two_clocks(model, optimizer, data, on_averaged_gradients=True)
    moments = _everyone(tensor for state in optimizer.state.values() for tensor in state.values())
    assert len(optimizer.state) == 5 and moments[0].any()
    assert all(torch.equal(moments[0], other) for other in moments)


def check_two_clocks(model, others_optimizer, data, average=lambda: None, on_averaged_gradients=False):
    """Hidden matrices take local steps, and differ between ranks in between; the other parameters never do.
    ``average``: averages the gradients of these, if neither the optimizer nor the local steps do."""
    matrices, others = hvd_compress.hidden_matrices(model)
    muon = torch.optim.Muon(matrices.values(), lr=0.01)
    given = model if on_averaged_gradients else matrices.items()
    more = {"on_averaged_gradients": others_optimizer} if on_averaged_gradients else {}
    local, losses = hvd_compress.recipes.low_bit(given, muon, 3, restore_length=True, **more), []
    for step in range(1, 31):
        words = torch.randint(40, (64,), generator=data).to(DEVICE)
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(words), (3 * words + 1) % 40)
        loss.backward()
        losses.append(loss.item())
        average()
        muon.step()
        others_optimizer.step()
        ended = local.step()
        assert ended == (step % 3 == 0)
        for group, equal in ((others, True), (matrices, ended)):
            everyone = _everyone(group.values())
            assert all(torch.equal(everyone[0], other) for other in everyone) == equal, (step, list(group))
    assert losses[-1] < 0.8 * losses[0], losses


def adamw(parameters):
    return [torch.optim.AdamW(parameters, lr=0.01)]


class LocalJob:
    """Training by local steps."""

    def __init__(self, optimizers, **options):
        torch.manual_seed(0)
        self.model = Branches().to(DEVICE)
        self.compression = job.build(self.model.named_parameters(), density=1 / 8, bucket_mb=0.02)
        self.optimizers = optimizers(self.model.parameters())
        self.local = hvd_compress.LocalSteps(self.compression, self.optimizers, 4, **{"unsent": "weights", **options})
        self.data = torch.Generator().manual_seed(job.host.rank())
        #: What the optimizers have made of the first weights.
        self.made = self.weights()

    def weights(self):
        return [p.detach().double().cpu() for p in self.model.parameters()]

    def local_step(self):
        before = self.weights()
        x = torch.randn(4, 3, 6, 6, generator=self.data).to(DEVICE)
        self.model.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x, range(6)), x.mean((1, 2, 3)).gt(0).long()).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.made = [m + now - b for m, now, b in zip(self.made, self.weights(), before, strict=True)]

    def common(self):
        return [weight.common for weight in self.local._rounds._common.weights]

    def with_residuals(self):
        names = (name for name, _ in self.model.named_parameters())
        return [p + self.compression.residual(n).double().cpu() for p, n in zip(self.weights(), names, strict=True)]


def _everyone(tensors):
    return job.host.gather(torch.cat([t.detach().double().flatten() for t in tensors]).cpu())


def _local_steps(unsent, optimizers, fragments=1, delay=0):
    trained = LocalJob(optimizers, unsent=unsent, fragments=fragments, delay=delay)
    model, local = trained.model, trained.local
    kept = trained.with_residuals if unsent == "buffer" else trained.weights
    for call in range(1, 17 + delay):
        trained.local_step()
        ended = local.step()
        assert ended == (call > delay and (call - delay) % (4 // fragments) == 0)
        if ended:
            common = _everyone(trained.common())
            assert all(torch.equal(common[0], other) for other in common)
            if job.method not in FORGETFUL:
                atol = 5e-2 if "fp16" in METHODS[job.method].keywords.values() else 5e-5
                mean, made = _everyone(kept()).mean(0), _everyone(trained.made).mean(0)
                torch.testing.assert_close(mean, made, rtol=0, atol=atol)
    mine = _everyone(model.parameters())
    at_once = fragments == 1 and not delay
    assert torch.equal(mine[0], mine[1]) == (at_once and (unsent == "buffer" or job.method in WITHOUT_RESIDUAL))
    statistics = _everyone([model.norm.running_mean, model.norm.running_var])
    assert not torch.equal(statistics[0], statistics[1])
    local.finish(model)
    assert trained.compression.stats()["steps"] == 16 // 4 * fragments
    after = _everyone(model.parameters())
    assert all(torch.equal(after[0], other) for other in after)
    torch.testing.assert_close(after[0], mine.mean(0), rtol=0, atol=1e-5)
    after = _everyone([model.norm.running_mean, model.norm.running_var])
    torch.testing.assert_close(after, statistics.mean(0).expand_as(after), rtol=1e-6, atol=1e-6)
    job.host.barrier()


@register(CASES, named=True)
def nodes():
    """Four ranks as two nodes: two compressors in turn, each with groups of its own; bytes apart; other counts of nodes
    are refused; a single node is dense."""
    first, second = Job(seed=1, nodes=2, density=1 / 32), Job(seed=2, nodes=2, density=1 / 32)
    for step in range(4):
        for trained in (first, second)[:: 1 if step % 2 else -1]:
            trained.step(step)
    for trained in (first, second):
        trained.assert_equal_replicas()
        engine, last = trained.compression.engine, trained.compression.stats()["last"]
        assert (engine.nodes.between.size, engine.nodes.ranks, engine.nodes.rank) == (2, 2, job.host.rank() % 2)
        assert last["inside_bytes"] > 0 and last["wire_bytes"] > 0
        assert 0 < sum(isinstance(work, NotOwned) for work in engine.works) < len(engine.works)
    with refused(ValueError, "divisor of the number of ranks, 4, got 3"):
        Job(nodes=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alone = Job(nodes=True, density=1 / 32)
    assert any("all ranks are on one node" in str(w.message) for w in caught)
    stock = Job(build=None).train(3)
    alone.train(3)
    torch.testing.assert_close([*alone.model.parameters()], [*stock.model.parameters()])


@register(CASES, named=True)
def bits():
    """Saves the averages of given gradients to $HVD_COMPRESS_TEST_BITS, to be compared with the other host's."""
    trained, applied = Job(unused=False), []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + job.host.rank())
        given = [torch.randn(p.shape, generator=generator).to(DEVICE) for p in trained.model.parameters()]
        # Every parameter's gradient is that of this loss: forward() only makes DDP expect them.
        loss = sum((p * g).sum() for p, g in zip(trained.model.parameters(), given, strict=True))
        output = trained.forward(torch.zeros(4, 3, 6, 6, device=DEVICE), range(6))
        (loss + 0.0 * output.sum()).backward()
        job.host.synchronize(trained)
        applied += [p.grad.detach().cpu().clone() for p in trained.model.parameters()]
        trained.apply()
    file = f"{job.host.name}-{job.method}-{job.host.rank()}.pt"
    torch.save(applied, Path(os.environ["HVD_COMPRESS_TEST_BITS"]) / file)
