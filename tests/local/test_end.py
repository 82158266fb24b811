"""Where local steps end: model and optimizers can be trained in any other way, and what is each rank's own is said."""

import copy
import gc
import weakref
from collections import OrderedDict, UserDict, UserList
from functools import partial
from typing import NamedTuple

import pytest
import torch
from local_workers import Worker, on_both_hosts, same, sgd, workers
from models import equal, gradients, mixed_model
from optimizers import muon_and_adamw
from torch import distributed
from torch.distributed.optim import ZeroRedundancyOptimizer

from hvd_compress import DCPState, LocalSteps, NoCompression, Quantized, recipes, reshard
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.wrappers import inside
from hvd_compress.trainers import CombinedOptimizer

DELAYED = dict(period=2, delay=2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def tensor_rate(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), amsgrad=True)


def combined(parameters):
    return CombinedOptimizer(muon_and_adamw(list(parameters)))


class Counting(torch.optim.SGD):
    """Keeps numbers and nested values in its state, and a number of its own in a group."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + float(group["params"][0].grad.sum())
            for p in group["params"]:
                state = self.state[p]
                state["own"] = {
                    "sums": [p.grad.sum()],
                    "count": state.get("own", {"count": 0})["count"] + 1,
                    "name": "x",
                }


class Held(OrderedDict):
    """A dict of one's own, as the outputs of transformers."""


class Point(NamedTuple):
    mean: torch.Tensor
    count: int


class Keeping(torch.optim.SGD):
    """Keeps nested values in containers that torch's pytree does not know, and in a tuple with names."""

    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            own = Held(sum=p.grad.sum(), nested=UserDict(items=UserList([p.grad.mean(), float(p.grad.max())])))
            self.state[p]["own"] = Held(own, point=Point(p.grad.amax(), int(1e6 * p.grad.abs().max())))


class ByName(torch.optim.Optimizer):
    """Holds optimizers in a dict, one of them twice, and is known to one of them."""

    def __init__(self, first, second):
        self.optimizers, self.defaults, first.whole = {"first": first, "both": [first, second]}, {}, self

    @property
    def param_groups(self):
        return [group for one in self.optimizers["both"] for group in one.param_groups]

    def step(self, closure=None):
        for one in self.optimizers["both"]:
            one.step()


OPTIMIZERS = [
    sgd,
    adamw,
    tensor_rate,
    combined,
    muon_and_adamw,
    lambda parameters: Counting(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
]


def dense_steps(group, count, optimizers=None):
    """As DDP: the same gradients on all ranks."""
    for step in range(count):
        for worker in group:
            used = optimizers[worker.rank] if optimizers else worker.optimizers
            for p, grad in zip(worker.model.parameters(), gradients(worker.model, 77 + step), strict=True):
                p.grad = grad
            for optimizer in used:
                optimizer.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_stay_equal_with_the_same_optimizers(optimizer):
    world, group = workers(3, build=Quantized, unsent="buffer", optimizer=optimizer)
    world.run(lambda i: (group[i].train(4), group[i].local.end(group[i].model)))
    assert same(group[0], group[1]) and same(group[0], group[2])
    dense_steps(group, 3)
    assert same(group[0], group[1]) and same(group[0], group[2])


def test_optimizers_in_wrappers_and_in_another_order():
    """SAM holds AdamW, whose moments are its own; one rank lists its optimizers the other way round."""
    world = ThreadWorld(2)
    kept = []

    def sam(parameters):
        kept.append(SAM(parameters, torch.optim.AdamW, lr=0.01))
        return kept[-1]

    group = [Worker(world, rank, optimizer=sam, unsent="buffer") for rank in range(2)]
    world.run(lambda i: (group[i].train(4), group[i].local.end()))
    one, other = ([state["exp_avg"] for state in optimizer.base.state.values()] for optimizer in kept)
    assert equal(one, other)

    def halves(parameters):
        parameters = list(parameters)
        first, second = (torch.optim.AdamW(part, lr=1e-2) for part in (parameters[::2], parameters[1::2]))
        return [first, second] if len(orders) % 2 else [second, first]

    orders = []
    group = []
    for rank in range(2):
        group.append(Worker(world, rank, optimizer=halves, unsent="buffer"))
        orders.append(rank)
    world.run(lambda i: (group[i].train(4), group[i].local.end()))
    dense_steps(group, 2)
    assert same(*group)


def test_values_in_containers_of_ones_own_become_rank_0s():
    """They stayed each rank's own, without a warning."""
    world, group = workers(2, unsent="buffer", optimizer=lambda parameters: Keeping(parameters, lr=0.1))
    world.run(lambda i: group[i].train(4))
    one, other = ([state["own"] for state in worker.optimizers[0].state.values()] for worker in group)
    before = copy.deepcopy(one)
    assert one != other
    world.run(lambda i: group[i].local.end())
    for worker in group:
        after = [state["own"] for state in worker.optimizers[0].state.values()]
        assert after == before and {*map(type, after)} == {Held}
        assert {type(own["nested"]) for own in after} == {UserDict} and {type(own["point"]) for own in after} == {Point}


@pytest.mark.parametrize("averages", [False, True])
def test_optimizers_in_a_dict(averages):
    world, group = ThreadWorld(2), []
    for rank in range(2):
        model = mixed_model()
        muon, dense = muon_and_adamw(model.parameters())
        container = ByName(muon, dense)
        compression = NoCompression(model.named_parameters(), collectives=world.collectives(rank))
        more = {"on_averaged_gradients": container} if averages else {}
        group.append((model, container, LocalSteps(compression, container, 2, **more)))

    def train(rank):
        model, container, local = group[rank]
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            for p, grad in zip(model.parameters(), gradients(model, 100 * step + rank), strict=True):
                p.grad = grad
            container.step()
            if not step:
                assert equal(before, [p.detach() for p in model.parameters()]) == averages
            local.step()
        local.end()
        states = [state for one in container.optimizers["both"] for state in one.state.values()]
        return [value for state in states for value in state.values()]

    one, other = world.run(train)
    assert one and equal(one, other)


def test_optimizers_that_hold_themselves():
    """Containers in a circle, as callbacks of a user make them, and optimizers in one another."""
    outer, inner = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    circle = {"optimizers": [inner, outer]}
    circle["self"], inner.owner, outer.held = [circle], outer, circle
    assert inside(outer) == [outer, inner] and inside(inner) == [inner, outer]


@on_both_hosts
def test_another_call_on_one_rank_is_an_error_on_all(ordered):
    world, group = workers(2, ordered=ordered)
    world.run(lambda i: group[i].train(2))

    def body(i):
        with pytest.raises(RuntimeError, match=r"rank 0 in finish\(\), rank 1 in end\(\)"):
            (group[i].local.end if i else group[i].local.finish)()

    world.run(body)


def test_settings_that_cannot_be_compared_stay():
    world, group = workers(2, optimizer=adamw)
    for rank, worker in enumerate(group):
        own = {"call": partial(int, rank), "seed": 2**62 + 1, "huge": 2**70, "lr": 0.1 * (1 + rank)}
        worker.optimizers[0].param_groups[0].update(own)
    world.run(lambda i: (group[i].train(2), group[i].local.end()))
    settings = [worker.optimizers[0].param_groups[0] for worker in group]
    assert [s["lr"] for s in settings] == [0.1, 0.1] and {s["seed"] for s in settings} == {2**62 + 1}
    assert {s["huge"] for s in settings} == {2**70} and settings[0]["call"] is not settings[1]["call"]


@on_both_hosts
def test_without_an_end_they_drift(ordered):
    """What the end is for."""
    world, group = workers(2, ordered=ordered, optimizer=adamw)
    world.run(lambda i: (group[i].train(4), group[i].local.finish(group[i].model)))
    dense_steps(group, 2)
    assert not same(*group)


def test_a_state_that_one_rank_does_not_have_begins_anew():
    world, group = workers(2, optimizer=adamw)
    rank0, rank1 = group
    world.run(lambda i: group[i].train(3))
    lost, other = list(rank1.model.parameters())[:2]
    del rank1.optimizers[0].state[lost]
    world.run(lambda i: group[i].local.end())
    assert lost not in rank1.optimizers[0].state and len(rank0.optimizers[0].state) == len(rank1.optimizers[0].state)
    mine, theirs = (next(iter(w.optimizers[0].state.values())) for w in group)
    assert equal([mine["exp_avg"]], [theirs["exp_avg"]]) and other in rank1.optimizers[0].state
    dense_steps(group, 2)
    assert same(*group)


@pytest.mark.parametrize("end", ["end", "close"])
def test_optimizers_are_free(end):
    """A new one, the same ones, and others of the same model, while the ended local steps live."""
    world, group = workers(2)
    world.run(lambda i: group[i].train(4))
    world.run(lambda i: getattr(group[i].local, end)())
    dense_steps(group, 2)
    dense_steps(group, 2, [[adamw(worker.model.parameters())] for worker in group])
    head = torch.optim.SGD(list(group[0].model.parameters())[:1], 0.1)
    dense_steps(group[:1], 1, [[head]])


@pytest.mark.parametrize("end", ["end", "close"])
def test_then_calls_are_refused_but_the_state_can_be_saved(end):
    world, group = workers(2, unsent="buffer")
    world.run(lambda i: group[i].train(4))
    world.run(lambda i: [getattr(group[i].local, end)() for _ in range(2)])
    worker = group[0]
    for call in (worker.local.step, worker.local.finish, worker.local.take_weights):
        with pytest.raises(RuntimeError, match="these local steps have ended: build a new compressor"):
            call()
    states = world.run(lambda i: group[i].saved())
    assert states[0][0]["local_steps"]["steps"] == 4


@on_both_hosts
def test_a_rank_closes_alone_and_at_once(ordered):
    """In flight, in the middle of a period; the weights stay as they are."""
    world, group = workers(2, ordered=ordered, **DELAYED)
    world.run(lambda i: group[i].train(2))
    assert not group[0].idle
    before = group[0].weights()
    group[0].local.close()  # in this thread: waiting for the other rank would not end
    assert equal(group[0].weights(), before)
    dense_steps(group[:1], 1)


def test_a_training_after_it():
    """With new local steps of the same model and optimizers."""
    world, group = workers(2, build=Quantized, unsent="buffer", optimizer=adamw)
    world.run(lambda i: (group[i].train(4), group[i].local.end()))
    later = []
    for worker in group:
        compression = Quantized(worker.model, collectives=world.collectives(worker.rank))
        later.append(LocalSteps(compression, worker.optimizers, 2))

    def again(i):
        for step in range(4):
            group[i].local_step(step)
            later[i].step()

    world.run(again)
    assert same(*group)


def test_what_has_ended_keeps_nothing_alive():
    worker = Worker(ThreadWorld(1), 0)
    worker.train(2)
    worker.local.end()
    kept = weakref.ref(worker.local), weakref.ref(worker.model)
    del worker
    gc.collect()
    assert not any(reference() for reference in kept)


def test_an_optimizer_that_was_not_given_names_the_end():
    world, group = workers(1)
    world.run(lambda i: group[i].train(2))
    with pytest.raises(ValueError, match=r"was not given it.*call local\.end\(model\) on all ranks"):
        dense_steps(group, 1, [[adamw(group[0].model.parameters())]])


# A state and other weights.


def trained(**options):
    world, group = workers(2, unsent="buffer", optimizer=sgd, **options)
    world.run(lambda i: group[i].train(5))
    return world, group


RECIPES = {
    "low_bit": dict(build=Quantized),
    "sparse": {},
    "diloco": dict(build=NoCompression, outer_lr=0.7, outer_momentum=0.9),
    "delayed": DELAYED,
}


@pytest.mark.parametrize("first", ["model", "state"])
@pytest.mark.parametrize("options", RECIPES.values(), ids=RECIPES)
def test_other_weights_than_those_of_the_state_are_an_error(options, first):
    world, group = trained(**options)
    best = world.run(lambda i: group[i].saved())
    world.run(lambda i: group[i].train(3, first=5))
    last = world.run(lambda i: group[i].saved())

    def load(i):
        compression, _, _ = last[i]
        steps = [
            lambda: group[i].model.load_state_dict(best[0][2]),
            lambda: group[i].compression.load_state_dict(compression),
        ]
        for step in steps if first == "model" else reversed(steps):
            step()
        with pytest.raises(RuntimeError, match=r"others than those with which the loaded state.*take_weights\(\)"):
            group[i].train(1)
        # The cure.
        group[i].model.load_state_dict(best[0][2])
        group[i].local.take_weights()
        group[i].train(8)

    world.run(load)


def test_the_cure_before_any_step():
    world, group = trained()
    other = mixed_model(seed=5).state_dict()
    last = world.run(lambda i: group[i].saved())

    def load(i):
        group[i].compression.load_state_dict(last[i][0])
        group[i].model.load_state_dict(other)
        group[i].local.take_weights()
        group[i].train(4)
        group[i].local.finish()

    world.run(load)


def test_other_weights_on_one_rank_are_an_error_on_all():
    """The model of rank 0 from between two exchanges."""
    world, group = trained()
    saved = world.run(lambda i: group[i].saved())

    def load(i):
        group[i].resume((saved[i][0], saved[i][1], saved[0][2]))
        with pytest.raises(RuntimeError, match="weights of another time than the loaded state"):
            group[i].train(1)

    world.run(load)


def test_a_step_that_applies_nothing_is_no_first_one():
    """As DCP's, which creates an optimizer's state."""
    world, group = trained()
    saved = world.run(lambda i: group[i].saved())

    def load(i):
        group[i].compression.load_state_dict(saved[i][0])
        with torch.no_grad():
            next(group[i].model.parameters()).add_(1.0)
        for p in group[i].model.parameters():
            p.grad = torch.zeros_like(p)
        for optimizer in group[i].optimizers:
            optimizer.step()
        group[i].resume(saved[i])
        group[i].train(3)

    world.run(load)


@pytest.mark.parametrize("call", ["finish", "end"])
def test_other_weights_at_the_next_average(call):
    world, group = trained()
    last = world.run(lambda i: group[i].saved())

    def load(i):
        group[i].compression.load_state_dict(last[i][0])
        with torch.no_grad():
            next(group[i].model.parameters()).add_(0.1)
        with pytest.raises(RuntimeError, match="others than those"):
            getattr(group[i].local, call)()

    world.run(load)


@pytest.mark.parametrize("averaged", [False, True])
def test_weights_of_the_state_resume(averaged):
    """Each rank's own; or, after an average, those of one rank on all."""
    world, group = trained()
    if averaged:
        world.run(lambda i: group[i].local.finish())
    saved = world.run(lambda i: group[i].saved())
    world, again = workers(2, unsent="buffer")

    def resume(i):
        compression, optimizers, model = saved[i]
        again[i].resume((compression, optimizers, saved[0][2] if averaged else model))
        again[i].train(3)

    world.run(resume)


def test_a_state_of_other_ranks_resumes_with_its_weights():
    world, group = trained()
    world.run(lambda i: (group[i].train(1), group[i].local.finish()))
    saved = world.run(lambda i: group[i].saved())
    state = reshard([compression for compression, _, _ in saved])
    world, three = workers(3, unsent="buffer")

    def resume(i, model):
        three[i].model.load_state_dict(model)
        three[i].compression.load_state_dict(copy.deepcopy(state))
        three[i].train(3)

    world.run(lambda i: resume(i, saved[0][2]))
    world, three = workers(3, unsent="buffer")
    with pytest.raises(RuntimeError, match="others than those"):
        world.run(lambda i: resume(i, mixed_model(seed=5).state_dict()))


# One rank.


@pytest.mark.parametrize("where", ["finish", "state", "end of a period"])
@pytest.mark.parametrize(
    "options", [{**options, "outer_momentum": 0.0, "outer_lr": 1.0} for options in RECIPES.values()]
)
def test_one_rank_has_nothing_to_send_later(options, where):
    """At learning rate 0 the weights of the ranks that go on stay."""
    world, group = workers(1, unsent="buffer", **options)
    period = group[0].local.period
    world.run(lambda i: group[i].train(2 * period + (where != "end of a period")))
    if where == "finish":
        world.run(lambda i: group[i].local.finish(group[i].model))
    (saved,) = world.run(lambda i: group[i].saved())
    state = reshard([saved[0]])
    world, two = workers(2, unsent="buffer", **options)

    def go_on(i):
        two[i].model.load_state_dict(saved[2])
        two[i].compression.load_state_dict(copy.deepcopy(state))
        for optimizer in two[i].optimizers:
            for settings in optimizer.param_groups:
                settings["lr"] = 0.0
        before = two[i].weights()
        two[i].train(2 * period)
        two[i].local.finish()
        torch.testing.assert_close(two[i].weights(), before, rtol=1e-4, atol=1e-5)

    world.run(go_on)


# Steps that need another look at the weights.


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret et al., ICLR 2021) that restores the weights by subtraction, as many do."""

    def __init__(self, parameters, base, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def move(self, sign):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(self.state[p]["gradient"], alpha=sign * 0.05)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["gradient"] = p.grad / p.grad.norm().clamp(min=1e-12)
        self.move(1)
        self.move(-1)
        self.base.step()


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("given", ["sam", "base"])
def test_steps_that_are_added_and_subtracted(given, base):
    """By each rank's own gradient: the weights before the first step are equal but for rounding."""
    world = ThreadWorld(2, timeout=20)
    kept = []

    def optimizer(parameters):
        kept.append(SAM(parameters, base, lr=0.01))
        return kept[-1].base if given == "base" else kept[-1]

    group = [Worker(world, i, optimizer=optimizer, unsent="buffer") for i in range(2)]
    for worker, sam in zip(group, kept, strict=True):
        worker.optimizers = [sam]
    world.run(lambda i: (group[i].train(4), group[i].local.finish()))
    assert same(*group)


def test_weights_that_differ_by_more_than_rounding_are_an_error():
    world, group = workers(2)
    with torch.no_grad():
        next(group[1].model.parameters()).mul_(1 + 1e-4)
    with pytest.raises(RuntimeError, match="were they broadcast"):
        world.run(lambda i: group[i].train(3))


class ScheduleFree(torch.optim.SGD):
    def train(self):
        pass

    def eval(self):
        pass


@pytest.mark.parametrize(
    "wrap", [lambda o: o, lambda o: [o], lambda o: CombinedOptimizer([o]), lambda o: [CombinedOptimizer([o])]]
)
def test_optimizers_that_evaluate_other_weights_are_refused(wrap):
    model = mixed_model()
    optimizer = wrap(ScheduleFree(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"ScheduleFree evaluates other weights than it trains.*schedule"):
        recipes.low_bit(model, optimizer, collectives=ThreadWorld(1).collectives(0))


def test_torchfts_wrappers_name_the_cure():
    optim = pytest.importorskip("torchft.optim")
    model = mixed_model()
    compression = NoCompression(model, collectives=ThreadWorld(1).collectives(0))
    with pytest.raises(ValueError, match="OptimizerWrapper votes on each step"):
        LocalSteps(compression, optim.OptimizerWrapper(None, sgd(model.parameters())), 2)

    class ManagedProcessGroup:
        pass

    with pytest.raises(ValueError, match="give its Manager, process_group=manager"):
        NoCompression(model, process_group=ManagedProcessGroup())


def test_zero_redundancy_optimizer_is_refused():
    """Each rank steps its own parameters only, and gets the others' weights."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = mixed_model()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        for given in (optimizer, CombinedOptimizer([optimizer])):
            with pytest.raises(ValueError, match="ZeroRedundancyOptimizer sends weights in each step: give and step"):
                recipes.low_bit(model, given, collectives=ThreadWorld(1).collectives(0))
    finally:
        distributed.destroy_process_group()


def test_layers_that_were_frozen_when_it_was_built_name_the_cure():
    model = mixed_model()
    first = next(model.parameters()).requires_grad_(False)
    compression = NoCompression(model, collectives=ThreadWorld(1).collectives(0))
    local = LocalSteps(compression, sgd(model.parameters()), 2)
    first.requires_grad_(True)
    with pytest.raises(ValueError, match="Build both while all are trained, and freeze"):
        local.finish()


@pytest.mark.parametrize("options", [dict(period=4), DELAYED], ids=["at once", "in flight"])
def test_saving_changes_no_statistics(options):
    """Those of a training that saves are those of one that does not."""
    found = []
    for saves in (False, True):
        world, group = workers(2, ordered=True, unsent="buffer", **options)
        for step in range(8):
            ended = world.run(lambda i, group=group, step=step: group[i].train(1, first=step))
            if saves:
                world.run(lambda i, group=group: group[i].local.state_dict())
            if saves and ended[0][0] and "delay" not in options:
                world.run(lambda i, group=group: DCPState(group[i].local).state_dict())
        world.run(lambda i, group=group: group[i].local.state_dict())  # waits for what is in flight
        found.append([worker.compression.stats() for worker in group])
    for one, other in zip(*found, strict=True):
        assert (one["total"], one["last"], one["steps"]) == (other["total"], other["last"], other["steps"])
