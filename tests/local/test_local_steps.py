"""Local steps around every compressor: what ranks share, what each keeps, and how both are resumed."""

import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
from harness import random_steps, replicas, set_collectives, together, toy_model
from local_workers import (
    CALL,
    DELAYED,
    IN_TURN,
    SPARSE,
    Worker,
    alone_at,
    assert_nothing_is_lost,
    fail,
    in_a_new_world,
    mean,
    on_both_hosts,
    on_both_kinds,
    resumes_bit_exactly,
    same,
    sgd,
    workers,
)
from methods import EACH, EXACT, FORGETFUL, METHODS, SMALL, TRAINED, WITHOUT_RESIDUAL, fitting
from models import compressed, equal, gradients, mixed_model
from optimizers import muon_and_adamw

from hvd_compress import IWP, DeMo, LocalSteps, NoCompression, Quantized, SlimDP, TopK
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.hosts.ddp import DDPHost
from hvd_compress.methods.coded_work import CodedWork


def doubles(worker):
    return [weight.double() for weight in worker.weights()]


def assert_mean(worker, alone):
    """Its weights are the mean of those of others."""
    torch.testing.assert_close(doubles(worker), mean([other.weights() for other in alone]), rtol=0, atol=1e-6)


@pytest.mark.alternate("mode")
@pytest.mark.parametrize("mode", [{"period": 2}, DELAYED], ids=["at once", "delayed"])
@on_both_kinds
@pytest.mark.parametrize("name", EACH)
def test_common_weights_are_bit_equal_and_nothing_is_lost(name, unsent, mode):
    build, delayed = partial(METHODS[name], **SMALL), "delay" in mode
    world, group = workers(3, build=build, unsent=unsent, **mode)
    for step in range(7):
        world.run(lambda i, step=step: group[i].local_step(step))
        exchanged = world.run(lambda i: group[i].local.step())
        assert exchanged == [step in ((2, 4, 6) if delayed else (1, 3, 5))] * 3
        assert equal(group[0].common(), group[1].common()) and equal(group[0].common(), group[2].common())
        if unsent == "buffer" and exchanged[0] and not delayed:
            assert same(group[0], group[1]) and equal(group[0].weights(), group[0].common())
        if name not in FORGETFUL and (unsent == "weights" or group[0].idle):
            rounds = "fp16" in build.keywords.values()  # an allreduce of 16-bit floats
            assert_nothing_is_lost(group, unsent, atol=2e-2 if rounds else 5e-6)
    assert group[0].compression.stats()["steps"] == 3


@pytest.mark.alternate("mode")
@pytest.mark.parametrize("mode", [{}, DELAYED], ids=["at once", "delayed"])
@pytest.mark.parametrize("name", EACH)
def test_both_hosts_give_the_same_bits(name, mode):
    results = []
    for ordered in (False, True):
        world, group = workers(2, build=partial(METHODS[name], **SMALL), ordered=ordered, **mode)
        world.run(lambda i, group=group: group[i].train(7))
        results.append([*group[1].weights(), *group[1].common()])
    assert equal(*results)


@pytest.mark.parametrize("name", EACH)
def test_the_whole_residual_is_scaled(name):
    world, ranks = replicas(2, METHODS[name])
    random_steps(world, ranks, range(3))
    compression, names = ranks[0].compression, [n for n, _ in ranks[0].model.named_parameters()]
    before = [compression.residual(n) for n in names]
    assert any(r.any() for r in before) == (name not in WITHOUT_RESIDUAL)
    for work in compression.engine.works:
        work.scale_residual(0.5)
    assert equal([r * 0.5 for r in before], [compression.residual(n) for n in names])


def test_unsent_differences_stay_in_the_own_weights():
    world, group = workers(3, build=partial(SlimDP, density=1 / 16, values="fp32"))
    alone = [alone_at(rank) for rank in range(3)]
    world.run(lambda i: group[i].train(3))
    for worker in alone:
        worker.train(3)
    average = mean([worker.weights() for worker in alone])
    for number, (name, p) in enumerate(group[0].model.named_parameters()):
        now, free = ([worker.weights()[number] for worker in w] for w in (group, alone))
        agreed = torch.stack([w == now[0] for w in now]).all(0)
        torch.testing.assert_close(now[0][agreed].double(), average[number][agreed], rtol=0, atol=1e-6)
        share = float(agreed.float().mean())
        if not compressed(p):
            assert share == 1.0, name
        else:
            assert 0.05 < share < 0.08, name
            for w, f in zip(now, free, strict=True):
                torch.testing.assert_close(w[~agreed], f[~agreed], rtol=0, atol=1e-6)


@pytest.mark.alternate("ordered")
@on_both_hosts
@on_both_kinds
@pytest.mark.parametrize("name", EXACT)
def test_density_one_is_local_sgd(name, unsent, ordered):
    """Plain averaging of the weights after each period, written by hand."""
    build = partial(EXACT[name], **fitting(EXACT[name], {"momentum": 0.0}))
    world, group = workers(3, build=build, unsent=unsent, ordered=ordered)
    alone = [alone_at(rank) for rank in range(3)]
    world.run(lambda i: group[i].train(6))
    for first in (0, 3):
        for worker in alone:
            worker.train(3, first)
        average = mean([worker.weights() for worker in alone])
        for worker in alone:
            for p, value in zip(worker.model.parameters(), average, strict=True):
                p.data.copy_(value)
    for worker in group:
        torch.testing.assert_close(worker.weights(), alone[0].weights(), rtol=1e-5, atol=2e-6)


def test_period_one_with_a_buffer_is_the_method_in_gradient_mode():
    """For SGD without momentum, whose step is linear in the gradient."""
    plain = partial(torch.optim.SGD, lr=0.1)
    world, group = workers(2, unsent="buffer", period=1, optimizer=plain)
    world.run(lambda i: group[i].train(5))
    other, ranks = replicas(2, SPARSE)
    optimizers = [plain(r.model.parameters()) for r in ranks]
    for step in range(5):
        together(other, ranks, [gradients(r.model, 100 * step + r.rank) for r in ranks])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(group[0].weights(), [*ranks[0].model.parameters()], rtol=1e-5, atol=1e-6)


def test_a_node_takes_local_steps_as_one_rank():
    """Two nodes whose ranks have the same gradients, as with DDP inside, everything sent: two flat ranks."""
    model, options = mixed_model(), dict(unsent="buffer", period=2)
    world, build = ThreadWorld(4, ordered=True), partial(TopK, density=1.0)
    group = world.run(lambda i: Worker(world, i, partial(build, nodes=2), model, **options))
    for worker in group:
        worker.rank //= 2
    flat_world, flat = workers(2, build=build, ordered=True, model=model, **options)
    world.run(lambda i: group[i].train(5))
    flat_world.run(lambda i: flat[i].train(5))
    for rank, worker in enumerate(group):
        torch.testing.assert_close(worker.weights(), flat[rank // 2].weights(), rtol=0, atol=1e-6)


@pytest.mark.alternate("delay")
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", EACH)
def test_ranks_of_nodes_have_the_same_weights_after_local_steps(name, delay):
    world, model = ThreadWorld(4, ordered=True), mixed_model()
    build = partial(METHODS[name], nodes=2, **SMALL)
    group = world.run(lambda i: Worker(world, i, build, model, unsent="buffer", period=2, delay=delay))
    world.run(lambda i: group[i].train(6 + delay))
    assert all(equal(group[0].common(), other.common()) for other in group)
    if not delay:
        assert all(same(group[0], other) for other in group)


def test_what_nodes_did_not_send_cannot_stay_in_the_weights():
    world, model = ThreadWorld(4, ordered=True), mixed_model()
    with pytest.raises(ValueError, match='unsent="buffer"'):
        world.run(lambda i: Worker(world, i, partial(TopK, nodes=2), model))
    world = ThreadWorld(4, ordered=True)  # nothing is left unsent
    group = world.run(lambda i: Worker(world, i, partial(NoCompression, nodes=2), model))
    world.run(lambda i: group[i].train(3))
    assert all(same(group[0], other) for other in group)


def test_the_outer_optimizer_is_nesterov_sgd():
    """DiLoCo, with torch's own optimizer as the outer one."""
    model = torch.nn.Linear(64, 32)
    options = dict(period=2, outer_lr=0.7, outer_momentum=0.9)
    world, group = workers(2, build=partial(TopK, density=1.0), model=model, **options)
    world.run(lambda i: group[i].train(8))
    common = copy.deepcopy(model)
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    alone = [alone_at(rank, model=model) for rank in range(2)]
    for first in (0, 2, 4, 6):
        for worker in alone:
            worker.model.load_state_dict(common.state_dict())
            worker.train(2, first)
        for p, average in zip(common.parameters(), mean([w.weights() for w in alone]), strict=True):
            p.grad = (p.detach() - average).float()
        outer.step()
    for worker in group:
        torch.testing.assert_close(worker.weights(), [*common.parameters()], rtol=1e-5, atol=1e-5)


def test_the_buffer_is_error_feedback_with_decay():
    """SparseLoCo's update by hand, with exact top-k of each rank."""
    model = torch.nn.Linear(64, 32, bias=False)
    build = partial(TopK, density=1 / 8)
    options = dict(period=2, unsent="buffer", decay=0.75, outer_lr=0.5)
    world, group = workers(2, build=build, model=model, **options)
    world.run(lambda i: group[i].train(8))
    weight, buffers = model.weight.detach().double().flatten(), [torch.zeros(2048).double()] * 2
    alone = [alone_at(rank, model=model) for rank in range(2)]
    for first in (0, 2, 4, 6):
        sent = []
        for rank, worker in enumerate(alone):
            worker.model.weight.data.copy_(weight.view(32, 64))
            worker.train(2, first)
            total = buffers[rank] + worker.weights()[0].flatten().double() - weight
            chosen = total.abs().topk(2048 // 8).indices
            sent.append(torch.zeros_like(total).index_copy_(0, chosen, total[chosen]))
            buffers[rank] = 0.75 * (total - sent[-1])
        weight = weight + 0.5 * (sent[0] + sent[1]) / 2
    for rank, worker in enumerate(group):
        torch.testing.assert_close(worker.weights()[0].flatten().double(), weight, rtol=0, atol=1e-5)
        held = worker.compression.residual("weight").flatten().double()
        torch.testing.assert_close(held, buffers[rank], rtol=0, atol=1e-5)


@pytest.mark.alternate("options")
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"unsent": "buffer", "decay": 0.9}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        *({**DELAYED, "delay": 2}, {"period": 6, "delay": 5, "unsent": "buffer", "decay": 0.9}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_resumes_bit_exactly(name, options):
    """Saved in the middle of a period, and with an exchange in flight."""
    methods = {**METHODS, "mp2": METHODS["mp2-guessing"]}
    build = partial(methods[name], **SMALL)
    resumes_bit_exactly(dict(build=build, optimizer=partial(torch.optim.AdamW, lr=0.01), **options))


@on_both_hosts
def test_local_steps_of_two_optimizers(ordered):
    """Muon and AdamW: as one optimizer that steps both groups would, also when they are saved in mid-period."""
    for mode in ({}, {"build": partial(SPARSE, **SMALL), **DELAYED}):
        resumes_bit_exactly(dict(optimizer=muon_and_adamw, ordered=ordered, **mode), saved_after=6)
    world, group = workers(3, optimizer=muon_and_adamw, build=partial(TopK, density=1.0), ordered=ordered)
    alone = [alone_at(rank, optimizer=muon_and_adamw) for rank in range(3)]
    assert world.run(lambda i: group[i].train(3)) == [[False, False, True]] * 3
    for worker in alone:
        worker.train(3)
    assert_mean(group[0], alone)


def test_each_optimizers_parameters_are_taken_before_its_own_first_step():
    """hvd.broadcast_optimizer_state() steps each new optimizer, perhaps before the weights are broadcast."""
    world, group = workers(2, optimizer=muon_and_adamw, model=mixed_model(1))
    for worker in group:
        for optimizer in worker.optimizers:
            worker.optimizers, all_of_them = [optimizer], worker.optimizers
            worker.local_step(worker.rank)
            worker.optimizers = all_of_them
        worker.model.load_state_dict(mixed_model(2).state_dict())
    world.run(lambda i: group[i].train(1))
    assert all(equal(worker.common(), mixed_model(2).parameters()) for worker in group)
    world.run(lambda i: group[i].train(2, first=1))  # compares what was taken
    assert equal(group[0].common(), group[1].common())


def test_an_optimizer_that_local_steps_were_not_given_raises_an_error():
    _, (worker,) = workers(1, optimizer=muon_and_adamw)
    worker.train(2)
    with pytest.raises(ValueError, match="SGD steps parameters of this compressor, and LocalSteps was not given it"):
        sgd([worker.model.wide.weight]).step()


def test_a_state_fits_the_same_local_steps_only():
    world, (worker,) = workers(1)
    world.run(lambda i: worker.train(3))
    state = worker.compression.state_dict()
    for options, says in (
        ({"unsent": "buffer"}, "local_steps.made_with.unsent: the state was made with 'weights'"),
        ({"outer_momentum": 0.9}, "local_steps.made_with.outer momentum: the state was made with False"),
    ):
        _, (other,) = workers(1, **options)
        with pytest.raises(ValueError, match=says):
            other.compression.load_state_dict(state)
    _, (rank,) = replicas(1, SPARSE)
    with pytest.raises(ValueError, match=r"^local_steps: not of this compressor"):
        rank.compression.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^local_steps: missing from the state"):
        worker.compression.load_state_dict(rank.compression.state_dict())


def test_stats_count_the_dense_bytes_of_all_local_steps():
    world, group = workers(2, period=4)
    world.run(lambda i: group[i].train(4))
    last = group[0].compression.stats()["last"]
    dense = 4 * sum(p.numel() for p in group[0].model.parameters())  # 2 (N - 1) / N times four bytes
    assert last["dense_bytes"] == 4 * dense
    assert last["wire_ratio"] > 4 * 6
    world.run(lambda i: group[i].train(1))
    world.run(lambda i: group[i].local.finish())
    stats = group[0].compression.stats()
    assert stats["steps"] == 1
    assert stats["last"]["dense_bytes"] == stats["last"]["wire_bytes"] - CALL == dense
    assert stats["total"]["dense_bytes"] == 5 * dense


def test_the_ranks_of_a_node_count_the_dense_bytes_of_its_card():
    world, model = ThreadWorld(4, ordered=True), mixed_model()
    build = partial(TopK, density=1 / 16, nodes=2)
    group = world.run(lambda i: Worker(world, i, build, model, unsent="buffer", period=4))
    world.run(lambda i: group[i].train(4))
    dense = 4 * 2 * 3 / 4 * sum(p.numel() for p in model.parameters())
    stats = [worker.compression.stats()["last"] for worker in group]
    assert stats[0]["dense_bytes"] + stats[1]["dense_bytes"] == pytest.approx(4 * dense)
    world.run(lambda i: group[i].train(1))
    world.run(lambda i: group[i].local.finish())
    stats = [worker.compression.stats()["last"] for worker in group]
    assert stats[0]["dense_bytes"] + stats[1]["dense_bytes"] == pytest.approx(dense)
    assert stats[0]["wire_bytes"] + stats[1]["wire_bytes"] == pytest.approx(dense + 3 * CALL)


@on_both_hosts
@on_both_kinds
def test_finish_averages_the_weights_and_the_statistics_of_a_model(unsent, ordered):
    world, group = workers(7, unsent=unsent, ordered=ordered)
    for rank, worker in enumerate(group):
        worker.model.norm.running_mean.fill_(float(rank))
        worker.model.norm.num_batches_tracked.fill_(rank)
        worker.model.register_buffer("mask", torch.tensor([0.7, -math.inf]))
    world.run(lambda i: group[i].train(4))
    free, residuals = mean([w.weights() for w in group]), [w.with_residuals() for w in group]
    world.run(lambda i: group[i].local.finish(group[i].model))
    assert all(same(group[0], other) for other in group)
    torch.testing.assert_close(doubles(group[0]), free, rtol=0, atol=1e-6)
    for rank, worker in enumerate(group):
        assert worker.model.norm.running_mean.eq(3.0).all()
        assert worker.model.norm.num_batches_tracked == 0, "rank 0's"
        assert worker.model.mask.tolist() == torch.tensor([0.7, -math.inf]).tolist()
        held = worker.compression.residual("wide.weight")
        assert held.any() == (unsent == "buffer")
        if unsent == "buffer":
            number = [name for name, _ in worker.model.named_parameters()].index("wide.weight")
            before = residuals[rank][number] - held
            assert not torch.equal(before, worker.weights()[number].double()), "the weights were averaged"
    # The period begins anew.
    assert world.run(lambda i: [group[i].local.step() for _ in range(3)]) == [[False, False, True]] * 7


def test_a_step_that_a_grad_scaler_skips_on_one_rank_counts():
    """The optimizer does not step then: also before the common weights are taken."""
    skipped = {(0, 0), (1, 1)}
    world, group = workers(2, build=partial(TopK, density=1.0))
    alone = [alone_at(rank) for rank in range(2)]

    def body(i, trained, finished):
        for step in range(3):
            if (step, i) not in skipped:
                trained.local_step(step)
            assert trained.local.step() == (finished and step == 2)

    world.run(lambda i: body(i, group[i], True))
    for rank, worker in enumerate(alone):
        body(rank, worker, False)
    assert_mean(group[0], alone)


@on_both_kinds
def test_a_new_rank_joins(unsent):
    """Elastic: one rank is in the middle of a period, the other is new; state.sync() has broadcast the weights."""
    options = dict(unsent=unsent, outer_momentum=0.5)
    world, group = workers(2, **options)
    world.run(lambda i: group[i].train(4))
    anew = ThreadWorld(2)
    set_collectives(group[0].compression, anew.collectives(0))
    group[1] = Worker(anew, 1, **options)
    # hvd.broadcast_optimizer_state() steps a new optimizer, perhaps before the weights are broadcast.
    group[1].local_step(0)
    group[1].model.load_state_dict(group[0].model.state_dict())
    anew.run(lambda i: group[i].train(1))
    assert group[0].compression.residual("wide.weight").any() == (unsent == "buffer")
    exchanged = anew.run(lambda i: group[i].train(6, first=1))
    assert exchanged == [[False, True, False, False, True, False]] * 2
    assert group[0].compression.stats()["steps"] == group[1].compression.stats()["steps"] == 2
    assert equal(group[0].common(), group[1].common())
    anew.run(lambda i: group[i].local.finish())
    assert same(*group)


@pytest.mark.alternate("unsent", "mode")
@on_both_kinds
@pytest.mark.parametrize(
    "damage", [("wide.weight", math.inf), ("wide.weight", math.nan), ("wide.weight", 3e38), ("wide.bias", math.nan)]
)
@pytest.mark.parametrize("mode", [{"period": 1}, {"period": 2, "delay": 1}], ids=["at once", "delayed"])
@pytest.mark.parametrize("name", TRAINED)
def test_an_infinity_reaches_every_rank_and_is_gone_once_the_parameters_are_restored(name, mode, damage, unsent):
    place, value = damage
    world, group = workers(2, build=METHODS[name], unsent=unsent, **mode)
    world.run(lambda i: group[i].train(3))
    saved = copy.deepcopy(group[0].model.state_dict())
    damaged = group[1].model.get_parameter(place).data.view(-1)[30:31]
    damage = group[1].optimizers[0].register_step_post_hook(lambda *_: damaged.fill_(value))
    world.run(lambda i: group[i].train(mode["period"], first=3))
    damage.remove()
    if not math.isfinite(value):
        assert not any(worker.model.get_parameter(place).isfinite().all() for worker in group)
    for worker in group:
        worker.model.load_state_dict(saved)
    world.run(lambda i: group[i].local.take_weights())
    world.run(lambda i: group[i].train(3, first=4))
    assert all(w.isfinite().all() and w.abs().max() < 50 for worker in group for w in worker.weights())
    for worker in group:
        distance = (worker.model.get_parameter(place) - saved[place]).abs().max()
        assert distance < 10, "the restored weights, and four steps"
    world.run(lambda i: group[i].local.finish())
    assert same(*group)


@pytest.mark.parametrize("unsent, decay", [("weights", 1.0), ("buffer", 1.0), ("buffer", 0.5)])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", ["iwp", "fft", "topk"])
def test_a_failed_exchange_loses_nothing(name, stage, unsent, decay):
    world, group = workers(2, build=partial(METHODS[name], **SMALL), unsent=unsent, decay=decay)
    world.run(lambda i: group[i].train(5))
    for worker in group:
        worker.local_step(5)
    kept = (lambda w: w.weights()) if unsent == "weights" else (lambda w: w.with_residuals())
    before, common = mean(map(kept, group)), copy.deepcopy(group[0].common())

    def step(i):
        fail(group[i], at=stage)
        with pytest.raises(ConnectionError):
            group[i].local.step()

    world.run(step)
    assert equal(common, group[0].common())
    torch.testing.assert_close(mean(map(kept, group)), before, rtol=0, atol=1e-6)
    in_a_new_world(group).run(lambda i: group[i].local.step())
    assert equal(group[0].common(), group[1].common())
    if decay == 1.0:
        torch.testing.assert_close(mean(map(kept, group)), before, rtol=0, atol=1e-6)


@pytest.mark.alternate("dtype", "unsent")
@on_both_kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", TRAINED)
def test_parameters_of_other_dtypes(name, dtype, unsent):
    """16-bit ones are compressed and have common weights in float32; those in float64 are averaged completely."""
    build = partial(METHODS[name], **SMALL)
    world, group = workers(2, build=build, model=mixed_model().to(dtype), unsent=unsent)
    world.run(lambda i: group[i].train(6))
    wide = torch.promote_types(dtype, torch.float32)
    assert all(c.dtype == wide for c in group[0].common())
    assert equal(group[0].common(), group[1].common())
    if unsent == "buffer" or dtype == torch.float64:
        assert same(*group)
    before = mean([worker.weights() for worker in group])
    world.run(lambda i: group[i].local.finish())
    assert same(*group)
    torch.testing.assert_close(doubles(group[0]), before, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_common_weights_do_not_take_over_the_rounding_of_16_bit_parameters():
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    world, group = workers(2, build=partial(TopK, density=1.0), model=model)
    world.run(lambda i: group[i].train(3))
    before = copy.deepcopy(group[0].common())
    assert not equal(before, group[0].weights()), "they are more precise"
    world.run(lambda i: [group[i].local.step() for _ in range(3)])
    assert equal(before, group[0].common()), "no optimizer has stepped"


def test_with_one_process_or_outside_the_process_set_nothing_is_exchanged():
    """As Horovod's optimizer does."""
    worker, alone = (Worker(ThreadWorld(1), 0, period=period) for period in (3, 10**6))
    worker.compression.engine.collectives.active = False
    worker.train(3)
    alone.train(3)
    worker.local.finish()
    assert same(worker, alone)
    assert worker.compression.stats()["steps"] == 0


@pytest.mark.alternate("options")
@pytest.mark.parametrize(
    "options",
    [{}, {"unsent": "buffer", "decay": 0.95}, {"outer_lr": 0.7, "outer_momentum": 0.5}],
    ids=["weights", "buffer", "outer"],
)
@pytest.mark.parametrize("name", ["iwp", "fft", "topk", "slimdp"])
def test_training_works(name, options):
    """With AdamW, at a sixteenth of the entries every fourth step."""
    build, adamw = partial(METHODS[name], density=1 / 16), partial(torch.optim.AdamW, lr=0.01)
    world, group = workers(2, build=build, model=toy_model(), optimizer=adamw, period=4, **options)

    def body(i):
        worker, generator = group[i], torch.Generator().manual_seed(i)
        for _ in range(200):
            x = torch.randn(8, 32, generator=generator)
            worker.model.zero_grad()
            loss(worker.model, x).backward()
            worker.optimizers[0].step()
            worker.local.step()
        worker.local.finish()

    def loss(model, x):
        return (model(x) - x[:, :8].sin()).square().mean()

    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(100))
    before = loss(group[0].model, x).item()
    world.run(body)
    assert loss(group[0].model, x).item() < 0.25 * before


def test_wrong_arguments_raise_an_error():
    model, other = mixed_model(), torch.nn.Linear(4, 4)
    named = [*model.named_parameters()]
    make, demo = (partial(build, collectives=ThreadWorld(1).collectives(0)) for build in (IWP, DeMo))
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for build, given, options, says in (
        (make(named), optimizer, {"period": 0}, "period must be an integer, at least 1, got 0"),
        (make(named), optimizer, {"unsent": "lost"}, "unsent must be weights or buffer, got 'lost'"),
        (make(named), optimizer, {"unsent": "weights", "decay": 0.9}, 'it goes with unsent="buffer"'),
        (
            make(named),
            optimizer,
            {"unsent": "buffer", "decay": 1.5},
            r"decay must be a finite number, at least 0 and at most 1, got 1.5",
        ),
        (make(named), optimizer, {"outer_lr": 0.0}, "outer_lr must be a finite number, above 0"),
        (
            make(named),
            optimizer,
            {"outer_momentum": 1.0},
            r"outer_momentum must be a finite number, at least 0 and below 1",
        ),
        (demo(named), optimizer, {}, "with sign=False"),
        (demo(named, sign=False), optimizer, {"unsent": "weights"}, "build .* with decay=1 and subtract=1"),
        (make(named, momentum=0.9), optimizer, {}, "build the compressor with momentum=0"),
        (make(named, grad_scaler=scaler), optimizer, {}, "without grad_scaler"),
        (make(named), sgd(other.parameters()), {}, "holds none of the compressor's parameters"),
        (make(named[1:]), optimizer, {}, "1 of the optimizer's parameters would never be averaged"),
        (make(named), [], {}, "got an empty list"),
        (make(named), [optimizer, sgd(other.parameters())], {}, "SGD holds none of the compressor's parameters"),
        (make(named), [optimizer, sgd([named[0][1]])], {}, "1 parameters are held by two of the optimizers"),
    ):
        with pytest.raises(ValueError, match=says):
            LocalSteps(build, given, **{"period": 2, **options})
    with pytest.raises(TypeError, match="compression must be a compressor"):
        LocalSteps(None, optimizer, 2)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, or a list of several, got 'sgd'"):
        LocalSteps(make(named), [optimizer, "sgd"], 2)
    optimizer._compression = None  # as Horovod's optimizer has
    with pytest.raises(ValueError, match="take the plain optimizer, not Horovod's"):
        LocalSteps(make(named), optimizer, 2)


def test_a_compressor_with_local_steps_serves_no_host():
    _, (worker,) = workers(1)
    p = worker.model.wide.weight
    p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="belongs to LocalSteps"):
        worker.compression.compress(p.grad)
    with pytest.raises(RuntimeError, match="belongs to LocalSteps"):
        worker.compression.use(DDPHost)
    with pytest.raises(ValueError, match="momentum stays in the optimizer"):
        worker.compression.take_momentum(worker.optimizers[0])
    with pytest.raises(ValueError, match="has local steps already"):
        LocalSteps(worker.compression, worker.optimizers, 2)
    worker.model.extra = torch.nn.Parameter(torch.zeros(3))
    worker.optimizers[0].add_param_group({"params": [worker.model.extra]})
    with pytest.raises(ValueError, match="1 of the optimizer's parameters would never be averaged"):
        worker.local.take_weights()


@pytest.mark.parametrize("optimizer", [sgd, muon_and_adamw])
def test_a_forgotten_step_is_warned_about(optimizer, recwarn):
    """After so many rounds of steps, of however many optimizers."""
    _, (worker,) = workers(1, optimizer=optimizer)
    for step in range(99):
        worker.local_step(step)
    assert not recwarn
    with pytest.warns(UserWarning, match="100 optimizer steps without"):
        worker.local_step(99)


def test_the_last_average_cannot_be_taken_back():
    """discard_step() would return what was sent to the residual, but the common weights have moved."""
    world, group = workers(2, build=SPARSE)
    world.run(lambda i: group[i].train(3))
    before = group[0].with_residuals()
    group[0].compression.discard_step()
    assert equal(before, group[0].with_residuals())


def test_no_differences_are_held_between_exchanges():
    world, group = workers(2, period=2)
    world.run(lambda i: group[i].train(2))
    assert not any(bucket.gradients or bucket.incomplete for bucket in group[0].compression.buckets)


def test_the_optimizer_does_not_keep_local_steps_alive():
    world = ThreadWorld(1)
    worker = Worker(world, 0)
    kept, (optimizer,) = weakref.ref(worker.local), worker.optimizers
    del worker
    gc.collect()
    assert kept() is None
    optimizer.step()


def test_parameters_that_share_memory_move_as_one():
    """Without delay the memory of a parameter holds its progress, which must not be taken twice."""
    first = torch.rand(40, 40)
    world = ThreadWorld(2)

    def rank(i):
        p = torch.nn.Parameter(first.clone())
        q = torch.nn.Parameter(p.data)
        optimizer = torch.optim.SGD([p, q], lr=0.1)
        compression = Quantized([("p", p), ("q", q)], 8, collectives=world.collectives(i), min_numel=1)
        local = LocalSteps(compression, optimizer, 1)
        p.grad, q.grad = torch.ones(40, 40), torch.ones(40, 40)
        optimizer.step()
        local.step()
        return p.detach()

    for weight in world.run(rank):
        assert torch.allclose(weight, first - 0.2, atol=0.02)


@pytest.mark.parametrize("mode", [{}, IN_TURN, DELAYED], ids=str)
def test_weights_with_the_residual_are_made_without_a_copy_of_it(mode, monkeypatch):
    """Which would be held until all weights have landed: 4 bytes a parameter."""
    copied, unsent = [], CodedWork.unsent

    def spy(work):
        residual = unsent(work)
        copied.append(residual is not work.bucket.residual)
        return residual

    monkeypatch.setattr(CodedWork, "unsent", spy)
    world, group = workers(2, build=partial(Quantized, **SMALL), unsent="weights", **mode)
    world.run(lambda i: group[i].train(9))
    assert copied and not any(copied)


def _save_within(group):
    """Makes the workers save a state the next time that their engines wait for an exchange."""
    for worker in group:

        def interrupted(engine=worker.compression.engine, local=worker.local):
            del engine.finish
            local.state_dict()
            engine.finish()

        worker.compression.engine.finish = interrupted
    return pytest.raises(RuntimeError, match=r"^state_dict\(\) was called during step\(\).* save after step")


@on_both_kinds
def test_a_state_is_not_saved_within_a_step(unsent):
    """By a signal handler, as Lightning's for SLURM: without a delay the parameters are not weights there."""
    world, group = workers(2, unsent=unsent)
    world.run(lambda i: group[i].train(4))
    with _save_within(group):
        world.run(lambda i: group[i].train(2, first=4))
    for worker in group:  # one of them may have failed before it came there
        vars(worker.compression.engine).pop("finish", None)
    assert_nothing_is_lost(group, unsent)
    world = in_a_new_world(group)
    world.run(lambda i: group[i].train(3, first=6))
    assert_nothing_is_lost(group, unsent)
    assert world.run(lambda i: group[i].saved())


@on_both_kinds
def test_a_state_is_not_saved_while_a_step_resumes_an_exchange(unsent):
    """The state would wait for the exchange that is being resumed."""
    world, group = workers(2, unsent=unsent, delay=1)
    world.run(lambda i: group[i].train(4))
    with _save_within(group):
        world.run(lambda i: group[i].train(3, first=4))
