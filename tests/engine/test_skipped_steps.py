"""Averages that are not applied: what was sent returns to the residual if it is certain that nobody used it."""

from functools import partial

import pytest
import torch
from harness import HOSTS, Rank, on_hosts_in_turn, random_steps, replicas, residuals, sgd, together, without_loss
from methods import EACH, METHODS, WITHOUT_RESIDUAL
from models import compressed, equal, gradients, mixed_model

from hvd_compress import IWP
from hvd_compress.carriers.threads import ThreadWorld


def of_compressed(rank):
    """(number, name) of the compressed parameters."""
    return [(number, name) for number, (name, p) in enumerate(rank.model.named_parameters()) if compressed(p)]


class Scaler:
    """A GradScaler as far as a compressor sees it."""

    scale = 1.0
    read = 0

    def get_scale(self):
        self.read += 1
        return self.scale


@on_hosts_in_turn
@pytest.mark.alternate("told_by")
@pytest.mark.parametrize("told_by", ["scaler", "call"])
@pytest.mark.parametrize("size", [2, (2, 2)], ids=["2", "2x2"])
@pytest.mark.parametrize("name", ["iwp", "iwp-lanes4", "iwp-lloyd4", "fft", "fft-gather", "mipd", "mipd-lloyd4"])
def test_a_skipped_step_takes_nothing_from_any_residual(name, size, told_by, host):
    """An infinity in one bucket: GradScaler skips the step, and what all other buckets sent returns to the
    residual."""
    scaler = Scaler() if told_by == "scaler" else None
    world, ranks = replicas(size, partial(METHODS[name], density=1 / 16, bucket_mb=0.08, grad_scaler=scaler), host=host)
    assert len(ranks[0].compression.buckets) > 1
    per_node = ranks[0].compression.engine.nodes.ranks
    optimizers = sgd(ranks)
    random_steps(world, ranks, range(2), optimizers=optimizers)
    before = [residuals(r) for r in ranks]
    grads = [gradients(r.model, seed=50 + r.rank) for r in ranks]
    grads[1][6].view(-1)[5] = float("inf")
    given = [[g.double().clone() for g in grad] for grad in grads]
    for grad in given[:per_node] if per_node > 1 else given[1:]:  # its node has no finite sum of this entry
        grad[6].view(-1)[5] = 0.0
    together(world, ranks, grads)
    assert all(held.isfinite().all() for r in ranks for held in residuals(r).values())
    # No optimizer.step(): the next step begins, with gradients of zero.
    Scaler.scale = 0.5
    for rank in ranks if scaler is None else ():
        rank.compression.discard_step()
    zeros = [[torch.zeros_like(g) for g in gradients(r.model, 0)] for r in ranks]
    sent = together(world, ranks, zeros)
    scale, Scaler.scale = 1.0 if scaler is None else Scaler.scale, 1.0
    for number, name in of_compressed(ranks[0]):
        kept = per_node * sum(residuals(r)[name] for r in ranks) + world.size * sent[0][number].double() / scale
        want = per_node * sum(b[name] for b in before) + sum(g[number] for g in given)
        torch.testing.assert_close(kept, want, rtol=0, atol=2e-2)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["iwp", "fft", "mipd-lloyd4", "powersgd"])
def test_a_checkpoint_after_skipping_the_very_first_step_contains_all_gradients(name, host, monkeypatch):
    """A GradScaler may skip steps before the optimizer has ever stepped."""
    world, ranks = replicas(2, partial(METHODS[name], grad_scaler=Scaler()), host=host)
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    given = [[g.double().clone() for g in grad] for grad in grads]
    together(world, ranks, grads)
    monkeypatch.setattr(Scaler, "scale", 0.5)
    for rank, mine in zip(ranks, given, strict=True):
        rank.compression.state_dict()
        for number, key in of_compressed(rank):
            torch.testing.assert_close(residuals(rank)[key], mine[number], rtol=0, atol=1e-4)


def test_a_step_reads_the_loss_scale_once():
    """On a GPU, get_scale() waits for the device."""
    scaler = Scaler()
    _, (rank,) = replicas(1, partial(IWP, grad_scaler=scaler))
    for step in range(3):
        rank.exchange(gradients(rank.model, seed=step))
        assert scaler.read == step + 1


@pytest.mark.parametrize("lowered", [False, True])
def test_an_applied_step_is_not_undone(lowered, monkeypatch):
    """Also if the loss scale is lower afterwards: another optimizer of the same scaler has skipped its step."""
    world, ranks = replicas(2, IWP, density=1 / 16, grad_scaler=Scaler() if lowered else None)
    optimizers = sgd(ranks)
    for step in range(3):
        random_steps(world, ranks, [step])
        before = [residuals(r) for r in ranks]
        for optimizer in optimizers:
            optimizer.step()
    monkeypatch.setattr(Scaler, "scale", 0.5)
    together(world, ranks, [[torch.zeros_like(g) for g in gradients(r.model, 0)] for r in ranks])
    for rank, held in zip(ranks, before, strict=True):
        for name, now in residuals(rank).items():
            assert now.norm() <= held[name].norm() * (1 + 1e-6)


@pytest.mark.parametrize("name", EACH)
def test_loading_after_a_skipped_step_restores_the_saved_state(name):
    """The skipped step is not undone on top of the loaded state."""
    world, ranks = replicas(2, METHODS[name])
    steps = partial(random_steps, world, ranks, optimizers=sgd(ranks))
    steps(range(5))
    states = [r.compression.state_dict() for r in ranks]
    steps([5, 6])
    random_steps(world, ranks, [7])
    for rank, state in zip(ranks, states, strict=True):
        rank.compression.load_state_dict(state)
    held = [residuals(r) for r in ranks]
    first = steps([8])
    again_world, again = replicas(2, METHODS[name])
    for rank, state in zip(again, states, strict=True):
        rank.compression.load_state_dict(state)
    assert all(equal(x.values(), residuals(r).values()) for x, r in zip(held, again, strict=True))
    assert equal(first[0], random_steps(again_world, again, [8])[0])


@on_hosts_in_turn
@pytest.mark.alternate("scaler")
@pytest.mark.parametrize("scaler", [None, Scaler()], ids=["", "scaler"])
@pytest.mark.parametrize("name", EACH)
def test_an_average_that_no_optimizer_used_does_not_come_back(name, scaler, host):
    """The user's own update may have used it; or several backward passes precede a step."""
    world, ranks = replicas(2, partial(METHODS[name], grad_scaler=scaler), host=host)
    random_steps(world, ranks, [0], optimizers=sgd(ranks))
    held = [residuals(r) for r in ranks]
    random_steps(world, ranks, [1])
    after = [residuals(r) for r in ranks]
    for rank in ranks:
        assert rank.compression.state_dict()["step"] == 2  # may undo
        rank.compression.engine.clock.undo_if_skipped()  # as the next step's first gradient
    assert all(equal(a.values(), residuals(r).values()) for a, r in zip(after, ranks, strict=True))
    assert name.startswith(WITHOUT_RESIDUAL) or not equal(held[0].values(), after[0].values())


@on_hosts_in_turn
@pytest.mark.parametrize("name", EACH)
def test_ranks_whose_loss_scales_differ_have_the_same_averages(name, host):
    """As where one scaler serves local steps of other parameters, too, and skips one of them on one rank."""
    averages = []
    for scales in ((1.0, 1.0), (2.0, 8.0)):
        world, ranks = replicas(2, scaled(METHODS[name], scales), host=host)
        optimizers = sgd(ranks)
        for step in range(3):
            grads = [gradients(r.model, seed=10 * step + r.rank, scale=scales[r.rank]) for r in ranks]
            applied = together(world, ranks, grads)
            for optimizer in optimizers:
                optimizer.step()
        averages += [[g / scale for g in of_rank] for of_rank, scale in zip(applied, scales, strict=True)]
    assert all(equal(averages[0], other) for other in averages[1:])


def scaled(build, scales):
    """What builds compressors of ranks with these loss scales."""
    scalers = [Scaler() for _ in scales]
    for scaler, scale in zip(scalers, scales, strict=True):
        scaler.scale = scale
    return lambda named, **options: build(named, grad_scaler=scalers.pop(0), **options)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_a_fused_optimizer_skips_takes_nothing_either(make, fused):
    """GradScaler calls the step of a fused optimizer in any case. The infinity is in a bias: all else is sent."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    world = ThreadWorld(2)
    ranks = [Rank(world, i, mixed_model(), IWP, values="fp32", grad_scaler=scalers[i]) for i in range(2)]
    optimizers = [make(r.model.parameters(), lr=1e-3, fused=fused) for r in ranks]
    name = "wide.weight"
    given = [torch.zeros(47, 301, dtype=torch.float64) for _ in ranks]
    for number in range(3):
        grads = [gradients(r.model, seed=10 * number + r.rank) for r in ranks]
        for i, (rank, scaler) in enumerate(zip(ranks, scalers, strict=True)):
            scaler.scale(torch.zeros(1))
            names = [n for n, _ in rank.model.named_parameters()]
            if number == 1:
                before = [residuals(r)[name] for r in ranks]
                given[i] = grads[i][names.index(name)].double() / scaler.get_scale()
                grads[i][names.index("first.bias")][0] = float("inf")
        together(world, ranks, grads)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        if number == 1:
            for r, was, mine in zip(ranks, before, given, strict=True):
                assert r.compression.grad_scaler.get_scale() == 2.0
                r.compression.state_dict()  # undoes the skipped step
                torch.testing.assert_close(residuals(r)[name], was + mine, rtol=0, atol=1e-4)


def test_users_may_apply_averages_themselves():
    """A true gradient of 1 in every step: what arrives is 1 in every step, also after a large one was dropped."""
    world, ranks = replicas(2, IWP, density=1.0, values="fp32")
    for optimizer in sgd(ranks):
        optimizer.step()  # as hvd.broadcast_optimizer_state()
    for true in (1.0, 1.0, 1000.0, 1.0, 1.0):
        grads = [[torch.full_like(p, true) for p in r.model.parameters()] for r in ranks]
        for applied in together(world, ranks, grads):
            assert all((g == true).all() for g in applied)


def test_a_step_is_discarded_at_most_once():
    world, ranks = replicas(2, IWP, density=1 / 16, values="fp32")
    random_steps(world, ranks, range(3))
    before = [residuals(r) for r in ranks]
    random_steps(world, ranks, [3])
    for rank in ranks:
        rank.compression.discard_step()
        once = residuals(rank)
        rank.compression.discard_step()
        assert equal(once.values(), residuals(rank).values())
        assert not equal(once.values(), before[rank.rank].values())


def test_a_step_in_progress_cannot_be_discarded():
    rank = replicas(1, IWP)[1][0]
    p = rank.model.wide.weight
    p.grad = torch.ones_like(p)
    rank.compression.compress(p.grad)
    with pytest.raises(RuntimeError, match=r"in the middle of a step: with Horovod call"):
        rank.compression.discard_step()


def test_under_ddp_an_average_is_not_undone_because_another_backward_follows():
    """Several synchronised backward passes may come before the optimizer's step."""
    world, ranks = replicas(2, IWP, host="ddp", density=1 / 16)
    random_steps(world, ranks, [0], optimizers=sgd(ranks))
    for step in (1, 2):
        without_loss(world, ranks, [gradients(r.model, seed=10 * step + r.rank) for r in ranks])
