"""How trainings end, and trainings of one process, without a trainer's loop. test_endings.py: with one."""

import contextlib
import gc

import pytest
import torch
from harness import mixed_model
from members import Lighthouse
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress import recipes
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.guards.averaging import ddp_averages
from hvd_compress.hosts import gradient_hook
from hvd_compress.trainers.training import Training


@pytest.fixture
def ddp():
    """A model in DDP, in a process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    distributed.destroy_process_group()


@pytest.fixture
def averaged(monkeypatch):
    """The process groups in which gradients were averaged."""
    groups, original = [], gradient_hook.allreduce_hook
    monkeypatch.setattr(
        gradient_hook, "allreduce_hook", lambda group, bucket: groups.append(group) or original(group, bucket)
    )
    return groups


def begin(ddp, build=recipes.low_bit, lasts=lambda: True, **options):
    training = Training(build, options)
    training.begin(ddp.module, [torch.optim.SGD(ddp.parameters(), lr=0.1)], None, lasts)
    return training


def backward(ddp):
    ddp(torch.randn(3, 4)).sum().backward()


METHODS = [(recipes.low_bit, {}), (recipes.sparseloco, {"min_numel": 1}), (hvd_compress.Quantized, {"bits": 2})]


@pytest.mark.parametrize(("build", "options"), METHODS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_training_that_does_not_last_ends_in_the_next_forward_pass(build, options, ddp, averaged):
    running = [True]
    training = begin(ddp, build, lambda: running[0], **options)
    backward(ddp)
    assert not averaged
    running[0] = False
    with torch.no_grad():
        ddp(torch.ones(3, 4))
    if training.local is not None:  # without it, DDP would take the next backward pass for that of this forward pass
        ddp.eval()(torch.ones(3, 4))
        ddp.train()
    assert training.ends, "a forward pass that one rank may take alone"
    with ddp.no_sync():  # the first one while gradients are accumulated
        backward(ddp)
    assert not training.ends and not averaged
    backward(ddp)
    assert averaged and ddp_averages(ddp)
    torch.optim.AdamW(ddp.parameters()).step()  # any optimizer may step the model


@pytest.mark.parametrize(("build", "options"), METHODS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_training_that_was_dropped_goes_on_until_another_one_begins(build, options, ddp, averaged):
    """It would end on each rank when the garbage collector runs there."""
    training = begin(ddp, build, **options)
    backward(ddp)
    del training
    gc.collect()
    backward(ddp)
    assert not averaged
    if build is not hvd_compress.Quantized:
        with pytest.raises(ValueError, match=r"call local\.end\(model\) on all ranks"):
            torch.optim.AdamW(ddp.parameters()).step()
    begin(ddp, build, **options).close()
    backward(ddp)
    assert averaged


@pytest.mark.parametrize("synchronises", [True, False])
@pytest.mark.parametrize("broadcasts", [True, False])
def test_ddps_flags_are_the_users_between_forward_passes(synchronises, broadcasts, ddp):
    hvd_compress.trainers.local_gradients(ddp)
    ddp.require_backward_grad_sync, ddp.broadcast_buffers = synchronises, broadcasts
    seen = []
    ddp.module.register_forward_pre_hook(
        lambda *_: seen.append((ddp.require_backward_grad_sync, ddp.broadcast_buffers))
    )
    for inputs, error in ((torch.ones(3, 4), None), (torch.ones(3, 5), RuntimeError)):
        with pytest.raises(error) if error else contextlib.nullcontext():
            ddp(inputs)
        assert (ddp.require_backward_grad_sync, ddp.broadcast_buffers) == (synchronises, broadcasts)
    assert seen == [(False, False)] * 2


@pytest.mark.parametrize(("build", "options"), METHODS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_second_training_of_a_model_ends_the_first(build, options, ddp):
    """As a notebook's cell that is run again."""
    first = begin(ddp)
    first.ends.append(lambda: ended.append(first))
    ended = []
    second = begin(ddp, build, **options)
    assert ended == [first] and not first.ends and second.ends
    other = DistributedDataParallel(mixed_model())
    begin(other)
    assert second.ends, "of another model"
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    backward(ddp)
    if second.local is None:
        optimizer.step()
    with pytest.raises(RuntimeError, match="have ended: build a new"):
        first.count_step()


BUILDS = [
    (recipes.low_bit, {"period": 3}),
    (lambda model, optimizers: recipes.low_bit(model, optimizers, fragments=1), {}),
    (hvd_compress.Quantized, {"bits": 2}),
    (hvd_compress.IWP, {"density": 1 / 16}),
]


@pytest.mark.parametrize(
    ("build", "options"),
    [(hvd_compress.DeMo, {}), (hvd_compress.IWP, {"momentum": 0.9}), (hvd_compress.DGC, {})],
)
def test_one_process_without_a_group_does_not_lose_momentum_or_signs(build, options):
    with pytest.raises(RuntimeError, match="with momentum or signs also in one process"):
        Training(build, options).begin(mixed_model(), [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)])


@pytest.mark.parametrize(("build", "options"), BUILDS)
def test_one_process_without_a_group_trains_as_without_us(build, options):
    models = mixed_model(), mixed_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    training = Training(build, options)
    training.begin(models[0], optimizers[:1])
    for number in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(number)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        training.count_step()
        if number == 2:
            training.average()
            training.load(1, [training.state()].__getitem__)
    training.end()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    with pytest.raises(ValueError, match="init_process_group"):  # not by a trainer: it may have been forgotten
        hvd_compress.Quantized(models[1], bits=2)


def test_one_process_without_a_group_resumes_from_two_ranks():
    world, states, model = ThreadWorld(2), [], mixed_model()
    for where in (*map(world.collectives, range(2)), None):
        training = Training(recipes.low_bit, {"period": 3, **({} if where is None else {"collectives": where})})
        training.begin(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        if where is not None:
            states.append(training.state())
    training.load(2, states.__getitem__)
    training.count_step()


def joined(training):
    step(training, 0)
    training.count_step()


def raw(training):
    step(training, 0)


def untouched(training):
    pass


def step(training, number):
    torch.manual_seed(number)
    for p in training._model.parameters():
        p.grad = torch.randn_like(p)
    training._optimizers[0].step()


@pytest.mark.parametrize("before", [joined, raw, untouched], ids=lambda function: function.__name__)
def test_peers_are_not_averaged_between_rounds(before):
    """finish() with a torchft Manager would drop what the rank has done since the last round."""
    training, model = Training(recipes.low_bit, {"period": 3, "collectives": Lighthouse().collectives("a")}), None
    model = mixed_model()
    training.begin(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    before(training)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"torchft\.Manager there is no average between rounds"):
        training.average()
    assert all(map(torch.equal, model.parameters(), weights))
