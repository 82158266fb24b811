"""A compressor that was dropped in a reference cycle waits for the garbage collector, which may come at any allocation:
of another optimizer's step, of another compressor's exchange or comparison."""

import gc
import inspect
import itertools
import sys
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import Rank, single, toy_model
from members import Lighthouse, Member
from models import gradients
from torch import nn

from hvd_compress import IWP, DeMo, LocalSteps, NoCompression, TopK
from hvd_compress.carriers.mirror import Mirror
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine import comparison, engine, optimizers, registry
from hvd_compress.engine.owner import in_use
from hvd_compress.engine.registry import Registry
from hvd_compress.gradients import step
from hvd_compress.guards.living import living

LAYER = partial(nn.Linear, 32, 32)
BUILD = partial(TopK, density=1 / 16, min_numel=64)


class _Later:
    """A handle whose result is there when it is asked a second time: meanwhile a rank continues other exchanges."""

    def __init__(self, handle):
        self._handle, self._asked = handle, False

    def done(self):
        asked, self._asked = self._asked, True
        return asked

    def result(self, timeout=0.0):
        return self._handle.result()


class Process(Mirror):
    """A process of two that do the same, as a world of :class:`harness.Rank`, and the collectives of its engines."""

    def __init__(self):
        super().__init__(2)
        self.registered, self.formed = Registry(), object()

    def collectives(self, rank):
        return self

    def registry(self):
        return self.registered

    def generation(self):
        return self.formed

    def start(self, request, name):
        return _Later(super().start(request, name))

    def form(self):
        """The set of ranks changes."""
        self.registered, self.formed = Registry(), object()


def drop(*things):
    """Only the collector can free them."""
    global last_dropped
    cycle = [*things]
    cycle.append(cycle)
    last_dropped = weakref.ref(things[0])


@pytest.fixture(scope="module", autouse=True)
def without_collector():
    """A collection looks at what these tests make, and at nothing else."""
    threshold = gc.get_threshold()
    step_of(torch.optim.SGD(LAYER().parameters(), 0.1))  # torch imports most of itself
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


#: What meets other compressors.
MEETING = {*map(inspect.getsourcefile, (optimizers, registry, comparison, engine, step))}


@pytest.fixture(params=["allocation", "line"])
def sweep(request):
    """Lets the collector come at the n-th allocation of ``act()``, or line of ours, after ``prepare()`` has dropped
    something, for every n that ``act()`` reaches. Returns how many that are."""
    yield from at_lines() if request.param == "line" else at_allocations()


def at_lines():
    def swept(prepare, act):
        left, gone = 0, False

        def trace(frame, event, _):
            nonlocal left, gone
            left -= event == "line"
            if event == "line" and left == 0:
                gone = last_dropped() is None  # ours has called the collector itself
                gc.collect()
            return trace if frame.f_code.co_filename in MEETING else None

        for n in itertools.count(1):
            prepare()
            left = n
            sys.settrace(trace)
            try:
                act()
            finally:
                sys.settrace(None)
            gc.collect()
            if left > 0 or gone:
                return n - 1

    yield swept


def at_allocations():
    came = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 0:
            came.append(info)

    def swept(prepare, act):
        for n in itertools.count(1):
            prepare()
            came.clear()
            gc.set_threshold(gc.get_count()[0] + n, 1000, 1000)
            gc.enable()
            try:
                act()
            finally:
                gc.disable()
            gc.collect()
            if not came:
                return n - 1

    gc.callbacks.append(note)
    yield swept
    gc.callbacks.remove(note)


def step_of(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def dropped(process, model=None, trained=True):
    """A rank, with a step behind it, of which the average is not applied yet."""
    rank = Rank(process, 0, model or LAYER(), BUILD)
    rank.model = model or rank.model
    if trained:
        rank.exchange(gradients(rank.model, 0))
    return rank


def drop_compressor(process, optimizer):
    drop(dropped(process).compression)


def drop_untrained(process, optimizer):
    drop(dropped(process, trained=False).compression)


def drop_in_a_step(process, optimizer):
    """As after an exception between two gradients."""
    rank = dropped(process)
    p = rank.model.weight
    p.grad = torch.ones_like(p)
    rank.compression.compress(p.grad)
    drop(rank.compression)


def drop_local_steps(process, optimizer):
    model = LAYER()
    mine = torch.optim.SGD(model.parameters(), 0.1)
    local = LocalSteps(BUILD(model, collectives=process), mine, 2)
    step_of(mine)
    local.step()
    drop(local, mine)


def drop_older_of_the_parameters(process, optimizer):
    """Which has served another optimizer: a second one would be an error if it were in use."""
    parameters = optimizer.param_groups[0]["params"]
    compression = BUILD([(str(i), p) for i, p in enumerate(parameters)], collectives=process)
    earlier = torch.optim.SGD(parameters, 0.0)
    step_of(earlier)
    drop(compression, earlier)


def drop_older_local_steps(process, optimizer):
    """Which were not given the optimizer that steps now."""
    parameters = optimizer.param_groups[0]["params"]
    compression = BUILD([(str(i), p) for i, p in enumerate(parameters)], collectives=process)
    drop(LocalSteps(compression, torch.optim.SGD(parameters, 0.1), 2))


def drop_signs(process, optimizer):
    """Momentum would count twice if it were in use."""
    parameters = optimizer.param_groups[0]["params"]
    drop(DeMo([(str(i), p) for i, p in enumerate(parameters)], collectives=ThreadWorld(1, ordered=True).collectives(0)))


DROPS = (
    drop_compressor,
    drop_untrained,
    drop_in_a_step,
    drop_local_steps,
    drop_older_of_the_parameters,
    drop_older_local_steps,
    drop_signs,
)
every_drop = pytest.mark.parametrize("dropping", DROPS, ids=lambda f: f.__name__.removeprefix("drop_"))


@every_drop
def test_no_other_optimizer_meets_a_dropped_compressor(dropping, sweep):
    process, optimizer = Process(), torch.optim.SGD(LAYER().parameters(), 0.1, momentum=0.9)
    _kept = single()  # whose hooks torch calls, too
    step_of(optimizer)
    assert sweep(lambda: dropping(process, optimizer), lambda: step_of(optimizer)) > 10


@every_drop
def test_no_other_compressor_meets_a_dropped_one(dropping, sweep):
    process, ours = Process(), LAYER()
    rank, optimizer = dropped(process, ours), torch.optim.SGD(ours.parameters(), 0.1)
    other = torch.optim.SGD(LAYER().parameters(), 0.1, momentum=0.9)

    def train():
        rank.exchange(gradients(rank.model, 0))
        optimizer.step()

    assert sweep(lambda: dropping(process, other), train) > 10


@every_drop
def test_no_comparison_meets_a_dropped_compressor(dropping, sweep):
    process, ours = Process(), LAYER()
    rank, other = dropped(process, ours), torch.optim.SGD(LAYER().parameters(), 0.1, momentum=0.9)

    def compare():
        rank.compression.engine.comparison.changed()
        rank.compression.engine.compare()

    assert sweep(lambda: dropping(process, other), compare) > 0


@every_drop
def test_no_change_of_ranks_meets_a_dropped_compressor(dropping, sweep):
    process, ours = Process(), LAYER()
    rank, optimizer = dropped(process, ours), torch.optim.SGD(ours.parameters(), 0.1)
    other = torch.optim.SGD(LAYER().parameters(), 0.1, momentum=0.9)

    def change():
        process.form()
        optimizer.step()
        rank.compression.engine.compare()

    assert sweep(lambda: dropping(process, other), change) > 10


@pytest.mark.parametrize("sweep", ["allocation"], indirect=True)  # lines are counted in one thread
@pytest.mark.parametrize("dropping", [drop_untrained, drop_in_a_step])
def test_ranks_stay_in_step(dropping, sweep):
    """Two ranks in threads: the collector comes on one of them, and frees what both have dropped."""
    world = ThreadWorld(2, timeout=20)
    worlds = [_Share(world, i) for i in range(2)]
    ranks = [dropped(worlds[i], trained=False) for i in range(2)]
    run = partial(world.run, lambda i: ranks[i].exchange(gradients(ranks[i].model, i)))
    run()

    def prepare():
        if dropping is drop_in_a_step:
            world.run(lambda i: dropping(worlds[i], None))
        else:
            for share in worlds:
                dropping(share, None)
        for rank in ranks:
            rank.compression.engine.comparison.changed()

    sweep(prepare, run)


class _Share:
    """A rank's share of a world of threads."""

    def __init__(self, world, rank):
        self._world, self._rank, self.size = world, rank, world.size

    def collectives(self, _):
        return self._world.collectives(self._rank)

    def __getattr__(self, name):
        return getattr(self._world.collectives(self._rank), name)


def test_a_manager_meets_no_dropped_compressor(sweep):
    member = Member(Lighthouse(), "a")

    def prepare():
        model = LAYER()
        compression = IWP(model, collectives=member, min_numel=64)
        drop(LocalSteps(compression, torch.optim.SGD(model.parameters(), 0.1), 2))

    def heal():
        member.load(member.save())

    assert sweep(prepare, heal) > 2


def test_an_error_of_a_compressor_in_use_stays():
    model = LAYER()
    first, second = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    cycle = {"compression": single(model)}
    cycle["self"] = cycle
    step_of(first)
    with pytest.raises(ValueError, match="serves a SGD already") as error:
        step_of(second)
    assert [entry.name for entry in error.traceback][-1] == "before_step", "the way to the error is shown"
    del cycle, error
    step_of(second)


def test_nothing_finds_what_was_dropped():
    class Wrapper(nn.Linear):
        pass

    drop(Wrapper(1, 1))
    kept = Wrapper(1, 1)
    assert [each is kept for each in living(Wrapper)] == [True]
    alive = weakref.ref(toy_model())
    assert in_use(alive) is None


def test_a_compressor_that_could_not_be_built_takes_no_part():
    """An exception's frames keep it."""

    class Fails(NoCompression):
        def options(self):
            raise AssertionError("it takes part in a comparison")

    process, model = Process(), LAYER()
    rank = dropped(process, trained=False)
    whole = Mirror.in_nodes
    process.in_nodes = lambda nodes: whole(process, nodes)
    watched = len([each for each in optimizers._watching if each() is not None])
    with pytest.raises(RuntimeError, match="host") as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fails, "_around", replace(Fails._around, clock=_no_host))
        Fails(model, collectives=process)
    rank.exchange(gradients(rank.model, 0))
    step_of(torch.optim.SGD(model.parameters(), 0.1))
    assert kept.value and watched == len([each for each in optimizers._watching if each() is not None])


def _no_host(*_):
    raise RuntimeError("no host")
