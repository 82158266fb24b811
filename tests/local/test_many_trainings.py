"""Several trainings in a process, wrapped optimizers, models that have other parameters now, another period."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from harness import HOSTS, random_steps, replicas, toy_model
from local_workers import SPARSE, Worker, same, sgd, workers
from models import equal, gradients, mixed_model
from optimizers import muon_and_adamw
from torch import nn

from hvd_compress import IWP, LocalSteps, NoCompression, Quantized, recipes
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.hosts.ddp import DDPHost


@pytest.fixture
def without_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def trained_of(model, optimizer, world, build=NoCompression, steps=3):
    local = LocalSteps(build(model, collectives=world.collectives(0)), optimizer, 2)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        local.step()
    return local


@pytest.mark.parametrize("build", [NoCompression, IWP, Quantized, SPARSE], ids=str)
def test_nothing_stays_alive(build, without_collection):
    model = toy_model()
    local = trained_of(model, sgd(model.parameters()), ThreadWorld(1), build)
    alive = [weakref.ref(thing) for thing in (local, local.compression, local.compression.engine)]
    del local
    assert [reference() for reference in alive] == [None] * 3


def test_a_second_training_of_a_model(without_collection):
    """The first is dropped, kept, or kept with another optimizer."""
    model, world = toy_model(), ThreadWorld(1)
    first = trained_of(model, torch.optim.AdamW(model.parameters()), world)
    second = trained_of(model, sgd(model.parameters()), world)
    del first
    trained_of(model, torch.optim.SGD(model.parameters(), 0.1), world)
    kept = sgd(model.parameters())
    trained_of(model, kept, world)
    assert second.compression.engine.clock is second._rounds


def trained_ranks(host, steps, **options):
    """Two ranks with local steps, and their compressors, after so many steps."""
    world = ThreadWorld(2, ordered=host == "ddp")
    models = [toy_model() for _ in range(2)]
    compressions = [IWP(model, density=1 / 4, collectives=world.collectives(i)) for i, model in enumerate(models)]
    optimizers = [sgd(model.parameters()) for model in models]
    pairs = zip(compressions, optimizers, strict=True)
    local = [LocalSteps(compression, optimizer, 2, **options) for compression, optimizer in pairs]

    def train(i):
        for step in range(steps):
            for p, grad in zip(models[i].parameters(), gradients(models[i], 10 * step + i), strict=True):
                p.grad = grad
            optimizers[i].step()
            local[i].step()

    world.run(train)
    return world, models, compressions, local


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("host", HOSTS)
def test_a_compressor_stays_with_local_steps_that_were_dropped(host, delay):
    """What it has not sent is progress of weights, which is never mixed with gradients."""
    world, models, compressions, local = trained_ranks(host, 2, delay=delay)
    local.clear()
    gc.collect()
    for model, compression in zip(models, compressions, strict=True):
        with pytest.raises(RuntimeError, match="belongs to LocalSteps"):
            compression.compress(torch.ones_like(next(model.parameters())))
        with pytest.raises(RuntimeError, match="belongs to LocalSteps"):
            compression.use(DDPHost)
        with pytest.raises(ValueError, match="has local steps already"):
            LocalSteps(compression, sgd(model.parameters()), 2)
    world.run(lambda i: compressions[i].reset())
    for compression in compressions:
        assert not any(piece._stand_in is not None for bucket in compression.buckets for piece in bucket.pieces)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("build", [IWP, Quantized, NoCompression])
def test_a_compressor_of_gradients_takes_no_local_steps(build, host):
    """What it has not sent is a gradient."""
    world, ranks = replicas(2, build, model=toy_model(), host=host)
    random_steps(world, ranks, [0])
    for rank in ranks:
        with pytest.raises(ValueError, match="has exchanged gradients"):
            LocalSteps(rank.compression, sgd(rank.model.parameters()), 2)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("build", [IWP, Quantized])
def test_a_first_step_that_has_failed_leaves_gradients(build, host):
    """They are in the residuals, though no step was counted."""
    _, ranks = replicas(2, build, model=toy_model(), host=host)
    for rank in ranks:
        rank.compression.reset()  # makes the host's side
        rank.compression.buckets[0].residual.fill_(1.0)
        with pytest.raises(ValueError, match="has exchanged gradients"):
            LocalSteps(rank.compression, sgd(rank.model.parameters()), 2)


def fails_once(rank):
    """The first step, before anything was sent: ranks have compared their options."""
    rank.compression.engine.clock.arrive(0, gradients(rank.model, 0)[0])
    rank.compression.reset()
    rank.compression.load_state_dict(rank.compression.state_dict())


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.parametrize("host", HOSTS)
def test_options_are_compared_after_a_first_step_of_gradients(host, period):
    world, ranks = replicas(2, NoCompression, model=toy_model(), host=host)
    world.run(lambda i: fails_once(ranks[i]))
    local = [LocalSteps(r.compression, sgd(r.model.parameters()), (2, period)[r.rank], outer_lr=0.7) for r in ranks]

    def train(i):
        for p, grad in zip(ranks[i].model.parameters(), gradients(ranks[i].model, i), strict=True):
            p.grad = grad
        local[i]._rounds._optimizers.all[0].step()
        local[i].step()

    if period == 2:
        world.run(train)
        return
    with pytest.raises(RuntimeError, match="period"):
        world.run(train)


def test_an_optimizer_of_nobody_is_still_refused():
    model = toy_model()
    local = trained_of(model, sgd(model.parameters()), ThreadWorld(1))
    other = sgd(model.parameters())
    with pytest.raises(ValueError, match="LocalSteps was not given it"):
        other.step()
    assert local.step()


class Accelerated(torch.optim.Optimizer):
    """As Accelerate's: a subclass without super().__init__()."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Lightning:
    """As Lightning's: no optimizer, but all its attributes."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def optimizer(self):
        return self._optimizer

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


@pytest.mark.parametrize("recipe", [recipes.low_bit, recipes.diloco])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("wrap", [Accelerated, Lightning, lambda o: Accelerated(Accelerated(o))], ids=["a", "l", "aa"])
def test_optimizers_in_wrappers(wrap, several, recipe):
    world = ThreadWorld(2, ordered=True)
    models = [mixed_model() for _ in range(2)]

    def train(rank):
        model = models[rank]
        given = muon_and_adamw(model.parameters()) if several else [sgd(model.parameters())]
        optimizers = [wrap(optimizer) for optimizer in given]
        local = recipe(model, optimizers if several else optimizers[0], 2, collectives=world.collectives(rank))
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape)
            for optimizer in optimizers:
                optimizer.step()
            local.step()
        local.finish(model)

    world.run(train)
    assert equal(*(list(model.parameters()) for model in models))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda o: torch.optim.lr_scheduler.ConstantLR(o),
        lambda o: o.step,
        lambda o: {"sgd": o},
        lambda o: [o, None],
        lambda o: "sgd",
        lambda o: o.param_groups,
        lambda o: o.state_dict(),
    ],
)
def test_what_is_no_optimizer(wrong):
    model = toy_model()
    compression = IWP(model, collectives=ThreadWorld(1).collectives(0))
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, or a list of several"):
        LocalSteps(compression, wrong(sgd(model.parameters())), 2)


def test_two_optimizers_as_two_arguments():
    model = toy_model()
    compression = IWP(model, collectives=ThreadWorld(1).collectives(0))
    with pytest.raises(TypeError, match=r"LocalSteps\(compression, \[first, second\], period\)"):
        LocalSteps(compression, sgd(model.parameters()), sgd(model.parameters()))


def test_a_step_after_each_of_two_optimizers_is_warned_about():
    _, (worker,) = workers(1, ordered=True, optimizer=muon_and_adamw)
    for p in worker.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="after several optimizers, call it once"):
        for optimizer in worker.optimizers:
            optimizer.step()
            worker.local.step()


def test_an_optimizer_that_steps_less_often_is_right(recwarn):
    _, (worker,) = workers(1, ordered=True, optimizer=muon_and_adamw)
    for p in worker.model.parameters():
        p.grad = torch.ones_like(p)
    for step in range(9):
        worker.optimizers[0].step()
        if step % 3 == 0:
            worker.optimizers[1].step()
        worker.local.step()
    assert not recwarn


def test_steps_without_the_optimizers_are_warned_about():
    """After load_state_dict(assign=True) and a new optimizer nobody trains the old parameters."""
    _, (worker,) = workers(1, ordered=True)
    with pytest.warns(UserWarning, match="without a step of the optimizers"):
        for _ in range(100):
            worker.local.step()


class Container(torch.optim.Optimizer):
    """As torchtitan's: steps other optimizers, whose groups it repeats."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def test_a_container_of_optimizers_names_the_cure():
    model = mixed_model()
    container = Container(muon_and_adamw(list(model.parameters())))
    _kept = LocalSteps(NoCompression(model, collectives=ThreadWorld(1).collectives(0)), container, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"build LocalSteps\(compression, \[first, second\], period\) with all"):
        container.step()


@pytest.mark.parametrize("build", [NoCompression, Quantized, SPARSE], ids=str)
def test_a_model_may_become_one_of_16_bits_later(build):
    world, group = workers(2, ordered=True, build=build, model=toy_model(), unsent="buffer")

    def train(worker):
        worker.model.to(torch.bfloat16)
        for step in range(7):
            grads = gradients(worker.model, 10 * step + worker.rank)
            for p, grad in zip(worker.model.parameters(), grads, strict=True):
                p.grad = grad.to(p.dtype)
            worker.optimizers[0].step()
            worker.local.step()
        worker.local.finish()

    world.run(lambda i: train(group[i]))
    assert same(*group) and group[0].weights()[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("save", "says"),
    [
        (copy.deepcopy, "cannot be copied with them: .* build a new compressor"),
        (pickle.dumps, r"cannot be pickled: .* compression\.state_dict\(\)"),
        (lambda local: torch.save({"local": local}, io.BytesIO()), "cannot be pickled"),
    ],
)
def test_local_steps_are_neither_copied_nor_saved_as_an_object(save, says):
    _, (worker,) = workers(1)
    with pytest.raises(TypeError, match=says):
        save(worker.local)


def assigned(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def one_assigned(model):
    model[2].load_state_dict(copy.deepcopy(model[2].state_dict()), assign=True)


def new_layer(model):
    model[2] = nn.Linear(64, 32)


def new_parameter(model):
    model[0].weight = nn.Parameter(torch.zeros(64, 32))


@pytest.mark.parametrize("change", [assigned, one_assigned, new_layer, new_parameter])
@pytest.mark.parametrize("call", [LocalSteps.step, LocalSteps.take_weights])
def test_a_model_with_other_parameters_is_refused(call, change):
    model, world = toy_model(), ThreadWorld(1, ordered=True)
    compression = NoCompression(model, collectives=world.collectives(0))
    local = LocalSteps(compression, sgd(model.parameters()), 1, outer_lr=0.7)
    change(model)
    with pytest.raises(ValueError, match="the model has other parameters than the compressor was given"):
        call(local)


@pytest.mark.parametrize("call", [LocalSteps.step, LocalSteps.take_weights, LocalSteps.finish, LocalSteps.end])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_model_that_was_on_the_meta_device_is_refused(call, ordered):
    """``to_empty()`` makes other parameters."""
    with torch.device("meta"):
        model = toy_model()
    compression = Quantized(model, collectives=ThreadWorld(2, ordered=ordered).collectives(0))
    local = LocalSteps(compression, sgd(model.parameters()), 1)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="the model has other parameters than the compressor was given"):
        call(local)


@pytest.mark.parametrize("way", ["parametrization", "swapped tensors"])
def test_other_ways_to_keep_the_parameters(way):
    world = ThreadWorld(2, ordered=True)
    models = [toy_model() for _ in range(2)]

    def train(rank):
        model = models[rank]
        optimizer = sgd(model.parameters())
        local = recipes.low_bit(model, optimizer, 2, collectives=world.collectives(rank))
        if way == "parametrization":
            nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
        for step in range(4):
            if way == "swapped tensors" and step == 2:  # set_swap_module_params_on_conversion() is global
                for p in model.parameters():
                    torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
            optimizer.zero_grad()
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            local.step()
        local.finish(model)

    world.run(train)
    assert equal(*(list(model.parameters()) for model in models))


def test_the_period_can_change():
    world, group = workers(2, ordered=True, period=2)

    def train(worker):
        ended = []
        for step, period in enumerate([2] * 6 + [5] * 10 + [1] * 2):
            worker.local.period = period
            worker.local_step(step)
            ended.append(worker.local.step())
        return [step for step, has in enumerate(ended, 1) if has]

    assert world.run(lambda i: train(group[i])) == [[2, 4, 6, 11, 16, 17, 18]] * 2
    world.run(lambda i: group[i].local.finish())
    assert same(*group)


def test_a_period_that_shrinks_ends_what_is_in_flight():
    world, group = workers(2, ordered=True, period=6, delay=2, build=NoCompression)

    def train(worker):
        for step in range(20):
            if step == 7:
                worker.local.period = 2
            worker.local_step(step)
            worker.local.step()
        worker.local.finish()

    world.run(lambda i: train(group[i]))
    assert same(*group)


@pytest.mark.parametrize(("period", "error"), [(3, ValueError), (0, ValueError), (2, ValueError), (4.0, TypeError)])
def test_a_wrong_new_period(period, error):
    world = ThreadWorld(1)
    worker = Worker(world, 0, period=8, fragments=2, delay=2, build=NoCompression)
    with pytest.raises(error, match="period must"):
        worker.local.period = period
    assert worker.local.period == 8


def test_local_steps_leave_no_hooks_of_a_host():
    """Under Horovod, a hook of every parameter tells which gradient is passed in, from the first one on."""
    model = toy_model()
    compression = IWP(model, collectives=ThreadWorld(1).collectives(0))
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert all(hooks)
    LocalSteps(compression, sgd(model.parameters()), 2)
    assert not any(hooks) and not any(p._backward_hooks for p in model.parameters())
