"""Weights that somebody else than the optimizers has changed between local steps."""

import copy
from functools import partial

import pytest
import torch
from local_workers import SPARSE, assert_nothing_is_lost, on_both_hosts, same, sgd, workers

from hvd_compress import LocalSteps, NoCompression, Quantized

LOW_BIT = dict(build=partial(Quantized, bits=2), unsent="buffer")
SETTINGS = {
    "low_bit": LOW_BIT,
    "low_bit, delayed": {**LOW_BIT, "delay": 2},
    "sparse buffer": dict(build=SPARSE, unsent="buffer", decay=0.95),
    "sparse weights": dict(build=SPARSE),
    "diloco": dict(build=NoCompression, outer_lr=0.7, outer_momentum=0.9),
    "local sgd in fp16": dict(build=partial(NoCompression, values="fp16")),
    "local sgd, delayed": dict(build=NoCompression, delay=1),
}


def load(worker, saved):
    worker.model.load_state_dict(saved)


def switch(worker, saved):
    for name, p in worker.model.named_parameters():
        p.data.copy_(saved[name])


def average(worker, saved):
    with torch.no_grad():
        for name, p in worker.model.named_parameters():
            p.lerp_(saved[name], 0.5)


def initialised(worker, saved):
    for module in worker.model:
        module.reset_parameters()


def merged(worker, saved):
    with torch.no_grad():
        for p in worker.model.parameters():
            p.add_(saved["first.weight"].mean())


CHANGES = {"load_state_dict": load, "EMA switch": switch, "SWA": average, "anew": initialised, "merge": merged}


def zero_a_bias(worker):
    torch.nn.init.zeros_(worker.model.wide.bias)


def trained(settings, steps=8):
    """Workers, and weights of some steps before."""
    world, group = workers(2, ordered=True, **{"period": 3, **settings})
    world.run(lambda i: (group[i].train(steps - 5), group[i].local.finish()))
    saved = copy.deepcopy(group[0].model.state_dict())
    world.run(lambda i: group[i].train(5, first=steps - 5))
    return world, group, saved


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_change_that_was_not_told_raises_an_error(settings, change):
    _, group, saved = trained(SETTINGS[settings])
    errors = []
    for worker in group:
        CHANGES[change](worker, saved)
        with pytest.raises(RuntimeError, match=r"take_weights\(\)") as error:
            worker.local_step(9)
        errors.append(str(error.value))
    assert len({*errors}) == 1


@pytest.mark.parametrize("settings", SETTINGS)
def test_finish_after_a_change_raises_an_error(settings):
    """With nothing unsent it would be right; with a buffer or momentum it would come back."""
    _, group, saved = trained(SETTINGS[settings])
    load(group[0], saved)
    with pytest.raises(RuntimeError, match=r"take_weights\(\)"):
        group[0].local.finish()


@on_both_hosts
@pytest.mark.parametrize("settings", SETTINGS)
def test_nothing_of_what_was_replaced_comes_back(settings, ordered):
    world, group = workers(2, ordered=ordered, **{"period": 3, **SETTINGS[settings]})
    saved = copy.deepcopy(group[0].model.state_dict())
    world.run(lambda i: group[i].train(8))
    for worker in group:
        load(worker, saved)
        for p in worker.model.parameters():
            p.grad = None
    world.run(lambda i: group[i].local.take_weights())

    def idle(worker):
        for _ in range(12):
            for optimizer in worker.optimizers:
                optimizer.zero_grad()
                optimizer.step()
            worker.local.step()
        worker.local.finish()

    world.run(lambda i: idle(group[i]))
    assert same(*group)
    for name, p in group[0].model.named_parameters():
        torch.testing.assert_close(p.detach(), saved[name], rtol=0, atol=1e-7, msg=name)


def test_replaced_weights_of_plain_averages_need_no_word():
    """All ranks have replaced them, and the mean of equal weights is what they are."""
    world, group, saved = trained(dict(build=NoCompression))
    for worker in group:
        load(worker, saved)
    world.run(lambda i: group[i].train(4, first=8))
    world.run(lambda i: group[i].local.finish())
    assert same(*group)


def test_training_goes_on_after_weights_were_taken():
    world, group, saved = trained(LOW_BIT)
    for worker in group:
        load(worker, saved)
    world.run(lambda i: (group[i].local.take_weights(), group[i].train(9, first=8), group[i].local.finish()))
    assert same(*group)


def clamp(worker, bound=0.02):
    with torch.no_grad():
        for p in worker.model.parameters():
            p.clamp_(-bound, bound)


@pytest.mark.parametrize("skips", [False, True], ids=["", "with skipped steps"])
@pytest.mark.parametrize("before_step", [False, True], ids=["after step()", "before step()"])
def test_a_change_in_every_step_belongs_to_the_training(before_step, skips):
    """A step that a GradScaler skips changes nothing."""
    world, group = workers(2, ordered=True, period=3, **LOW_BIT)

    def train(worker):
        for step in range(12):
            if not skips or step % 4 != 2:
                worker.local_step(step)
            if before_step:
                clamp(worker)
            worker.local.step()
            if not before_step:
                clamp(worker)
            if step == 6:
                worker.local.finish()

    world.run(lambda i: train(group[i]))


def trains(group, world, change, steps=12, **options):
    """Local steps with a change of the weights after each of them, given its number."""

    def train(worker):
        for step in range(steps):
            worker.local_step(step)
            worker.local.step()
            change(worker, step)

    world.run(lambda i: train(group[i]))


def test_a_projection_that_matters_later_is_warned_about():
    """Of few weights: a constraint on norms, pruning."""
    world, group = workers(2, ordered=True, period=3, **LOW_BIT)
    with pytest.warns(UserWarning, match="some weights have changed") as caught:
        trains(group, world, lambda worker, step: zero_a_bias(worker) if step > 5 else None)
    assert len([w for w in caught if "some weights" in str(w.message)]) <= 2


def test_any_change_is_allowed_if_nobody_watches():
    world, group = workers(2, ordered=True, period=3, watch_weights=False, **LOW_BIT)
    trains(group, world, lambda worker, step: clamp(worker) if step % 5 == 4 else None)


def test_weights_that_no_optimizer_holds_may_change():
    """Such as those of a target network."""
    some = lambda parameters: sgd([*parameters][:3])  # noqa: E731
    world, group = workers(2, ordered=True, period=3, optimizer=some, **LOW_BIT)

    def copy_target(worker, step):
        if step % 5 == 4:
            torch.nn.init.ones_(worker.model.deep.weight)
            torch.nn.init.ones_(worker.model.wide.weight)

    trains(group, world, copy_target)


class Lookahead(torch.optim.Optimizer):
    """Slow weights, every third step, around another optimizer, whose parameter groups it shares."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.count = inner, inner.param_groups, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        fast = [p for group in self.param_groups for p in group["params"]]
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, fast, strict=True):
                    p.copy_(slow.lerp_(p, 0.5))


@pytest.mark.parametrize("given", ["outer", "inner"])
def test_lookahead(given):
    world, group = workers(2, ordered=True, period=2, **LOW_BIT)
    for worker in group:
        outer = Lookahead(worker.optimizers[0])
        worker.optimizers = [outer]
        if given == "outer":
            compression = Quantized(worker.model, 2, collectives=world.collectives(worker.rank))
            worker.local = LocalSteps(compression, outer, 2, unsent="buffer")
    world.run(lambda i: (group[i].train(10), group[i].local.finish()))
    assert same(*group)


@pytest.mark.parametrize("moved", [False, True])
def test_on_a_gpu_samples_are_compared_if_counters_have_moved(moved):
    """A look at them would wait for the GPU."""
    world, group, saved = trained(LOW_BIT)
    for worker in group:
        worker.local._rounds._guards._weights.free = False
        (load if moved else switch)(worker, saved)
    if not moved:
        world.run(lambda i: group[i].local_step(9))
        return
    for worker in group:
        with pytest.raises(RuntimeError, match=r"take_weights\(\)"):
            worker.local_step(9)


def test_a_change_in_a_hook_of_the_optimizer_belongs_to_its_step():
    world, group = workers(2, ordered=True, period=3, **LOW_BIT)
    for worker in group:
        hook = partial(zero_a_bias, worker)
        worker.optimizers[0].register_step_post_hook(lambda optimizer, *_, hook=hook: hook())
    world.run(lambda i: group[i].train(10))


@pytest.mark.parametrize("rounds", [False, True], ids=["copied", "rounded"])
def test_weights_that_are_swapped_out_and_in_again_have_not_changed(rounds):
    """As for a validation with averaged weights: by copies, or, as some optimizers do, by an addition and its
    inverse."""
    world, group = workers(2, ordered=True, period=3, **LOW_BIT)

    def validate(worker):
        own = worker.weights()
        with torch.no_grad():
            for p, mine in zip(worker.model.parameters(), own, strict=True):
                p.lerp_(torch.ones_like(p), 0.9)
                p.lerp_(torch.ones_like(p), 1 - 1 / (1 - 0.9)) if rounds else p.copy_(mine)

    def train(worker):
        worker.train(4)
        validate(worker)
        worker.train(6, first=4)

    world.run(lambda i: train(group[i]))


def test_a_loaded_state_is_no_change():
    """In either order with the model's."""
    world, group, _ = trained(LOW_BIT)
    states = world.run(lambda i: group[i].saved())
    world.run(lambda i: group[i].train(2, first=8))
    for worker, (compression, _, model) in zip(group, states, strict=True):
        if worker.rank:
            worker.model.load_state_dict(model)
        worker.local.load_state_dict(compression)
        if not worker.rank:
            worker.model.load_state_dict(model)
    world.run(lambda i: group[i].train(4, first=8))


def test_ranks_must_take_the_same_weights():
    world, group, saved = trained(LOW_BIT)
    load(group[1], saved)
    with pytest.raises(RuntimeError, match="different weights in take_weights"):
        world.run(lambda i: group[i].local.take_weights())


def reordered(group):
    for worker in group:
        worker.model.conv.to(memory_format=torch.contiguous_format)
        worker.model.conv.weight.grad = None


@pytest.mark.parametrize("settings", ["low_bit", "low_bit, delayed", "sparse buffer", "sparse weights"])
def test_another_memory_order_is_refused_and_nothing_is_lost(settings):
    world, group = workers(2, ordered=True, **{**SETTINGS[settings], "period": 3, "watch_weights": False})
    reordered(group)

    def refused(i):
        group[i].train(2)
        group[i].local_step(2)
        with pytest.raises(ValueError, match=r"conv\.weight: had strides"):
            group[i].local.step()

    world.run(refused)
    assert_nothing_is_lost(group, SETTINGS[settings].get("unsent", "weights"))


def test_a_landing_is_that_of_tensors_by_index():
    """Parameters in another memory order than at the beginning of the round; and a graph of before is out of date."""
    (world, group), (other_world, others) = (workers(2, ordered=True, **LOW_BIT, period=3, delay=2) for _ in range(2))
    world.run(lambda i: group[i].train(4))
    reordered(group)
    versions = [p._version for p in group[0].model.parameters()]
    world.run(lambda i: group[i].local_step(4))
    stepped = [p._version for p in group[0].model.parameters()]
    assert world.run(lambda i: group[i].local.step()) == [True] * 2
    landed = [p._version for p in group[0].model.parameters()]
    assert all(a < b < c for a, b, c in zip(versions, stepped, landed, strict=True))
    other_world.run(lambda i: others[i].train(5))
    assert all(same(one, two) for one, two in zip(group, others, strict=True))
