"""What the callbacks share, without a trainer, and the optimizer for trainers that take one."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from harness import mixed_model
from launch import ROOT
from optimizers import step
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import hvd_compress
from hvd_compress import recipes, trainers
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.guards.averaging import ddp_averages
from hvd_compress.hosts import gradient_hook
from hvd_compress.trainers import rank_files
from hvd_compress.trainers.training import Training


def two(model):
    """Optimizers with state, of different parameters."""
    parameters = list(model.parameters())
    return [
        torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9),
        torch.optim.AdamW([{"params": parameters[2:4], "lr": 0.03}, {"params": parameters[4:]}], lr=0.01),
    ]


def test_the_combined_optimizer_steps_schedules_and_resumes_as_its_parts():
    models = [mixed_model() for _ in range(3)]
    apart, joined, resumed = map(two, models)
    joined, other = trainers.CombinedOptimizer(joined), trainers.CombinedOptimizer(resumed)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (*apart, joined)]
    for number in range(4):
        step(models[0], apart, number)
        step(models[1], [joined], number)
        if number > 1:
            step(models[2], [other], number)
        for schedule in schedules:
            schedule.step()
        if number == 1:
            models[2].load_state_dict(models[1].state_dict())
            other.load_state_dict(copy.deepcopy(joined.state_dict()))
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(other, 0.5, last_epoch=2))
            assert [group["lr"] for group in resumed[1].param_groups] == [0.03 / 4, 0.01 / 4]
    for p, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(p, o) for o in others)
    assert joined.state_dict()["state"].keys() == set(range(len(list(models[0].parameters()))))


def test_the_combined_optimizer_calls_a_closure_once_with_gradients_on():
    model, calls = mixed_model(), []
    optimizer = trainers.CombinedOptimizer(two(model))
    with torch.no_grad():
        assert optimizer.step(lambda: calls.append(torch.is_grad_enabled()) or 3.0) == 3.0
    assert calls == [True]


def test_the_combined_optimizer_refuses_none_and_shared_parameters():
    model = mixed_model()
    with pytest.raises(ValueError, match="at least one optimizer"):
        trainers.CombinedOptimizer([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        trainers.CombinedOptimizer([two(model)[0], two(model)[0]])


def test_the_combined_optimizer_refuses_a_group_that_nothing_would_step():
    optimizer = trainers.CombinedOptimizer(two(mixed_model()))
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match="add the group to one of its optimizers before"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == groups


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_the_combined_optimizer_steps_the_copied_model(copied):
    model = mixed_model()
    optimizer = trainers.CombinedOptimizer(two(model))
    step(model, [optimizer], 0)
    other_model, other = copied((model, optimizer))
    before = copy.deepcopy(model.state_dict())
    for group in other.param_groups:
        group["lr"] /= 2
    step(other_model, [other], 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for group in optimizer.param_groups:
        group["lr"] /= 2
    step(model, [optimizer], 1)
    for p, q in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match="takes no parameter groups"):
        other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})


@pytest.fixture
def ddp():
    """A model in DDP, in a process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    distributed.destroy_process_group()


@pytest.mark.parametrize("build", [recipes.low_bit, hvd_compress.Quantized])
def test_after_a_training_the_model_averages_as_before_it(build, ddp, monkeypatch):
    averaged, original = [], gradient_hook.allreduce_hook
    monkeypatch.setattr(
        gradient_hook, "allreduce_hook", lambda group, bucket: averaged.append(group) or original(group, bucket)
    )
    training = Training(build, {"bits": 2} if build is hvd_compress.Quantized else {})
    training.end()
    training.begin(ddp.module, [torch.optim.SGD(ddp.parameters(), lr=0.1)])
    kept = weakref.ref(training.compression)
    flags = []
    seeing = ddp.module.register_forward_pre_hook(
        lambda *_: flags.append((ddp.require_backward_grad_sync, ddp.broadcast_buffers))
    )
    ddp(torch.ones(3, 4)).sum().backward()
    assert flags == [(training.local is None,) * 2]
    seeing.remove()
    assert not averaged
    training.state()
    training.end()
    training.state()
    assert ddp.require_backward_grad_sync and ddp.broadcast_buffers and ddp_averages(ddp)
    del training
    gc.collect()
    assert kept() is None, "the model keeps the compressor"
    ddp.zero_grad()
    torch.manual_seed(0)
    inputs = torch.randn(3, 4)
    ddp(inputs).square().sum().backward()
    assert averaged == [ddp.process_group]
    alone = torch.autograd.grad(ddp.module(inputs).square().sum(), list(ddp.parameters()))
    for p, gradient in zip(ddp.parameters(), alone, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_the_end_of_a_training_does_not_end_a_later_one_of_the_same_model(ddp):
    first, second = Training(recipes.low_bit, {}), Training(recipes.low_bit, {})
    for training in (first, second):
        training.begin(ddp.module, [torch.optim.SGD(ddp.parameters(), lr=0.1)])
    first.end()
    assert not ddp_averages(ddp)
    second.end()
    assert ddp_averages(ddp)
    first.begin(ddp.module, [torch.optim.SGD(ddp.parameters(), lr=0.1)])
    other = DistributedDataParallel(mixed_model())
    first.begin(other.module, [torch.optim.SGD(other.parameters(), lr=0.1)])
    assert ddp_averages(ddp) and not ddp_averages(other)


def test_files_of_another_number_of_ranks_are_deleted_when_all_new_ones_are_there(tmp_path, monkeypatch):
    training, _, _ = of_rank(ThreadWorld(1), 0)
    names = ["hvd_compress-0-of-2.pt", "hvd_compress-1-of-2.pt", "model.pt", "hvd_compress-notes.pt"]
    for name in names:
        (tmp_path / name).touch()
    seen = []
    monkeypatch.setattr(
        rank_files.world, "gather", lambda value: seen.append({p.name for p in tmp_path.iterdir()}) or [value]
    )
    rank_files.save(training, tmp_path)
    assert seen == [{*names, "hvd_compress-0-of-1.pt"}]
    assert {p.name for p in tmp_path.iterdir()} == {*names[2:], "hvd_compress-0-of-1.pt"}
    rank_files.load(training, tmp_path)


def test_lightning_keeps_the_states_of_a_checkpoint_for_a_fit_only():
    pytest.importorskip("lightning")
    callback = trainers.LightningCallback(recipes.low_bit)
    key, states = callback.state_key, {"states": [{"compression": {}}]}
    for stage in ("validate", "test", "predict"):
        callback.setup(None, None, stage)
        callback.on_load_checkpoint(None, None, {"callbacks": {}})
        callback.load_state_dict(states)
        callback.teardown(None, None, stage)
        assert callback.state_dict() == {"states": []}
    callback.setup(None, None, "fit")
    callback.on_load_checkpoint(None, None, {"callbacks": {key: states}})
    callback.load_state_dict(states)
    assert callback.state_dict() == states
    callback.on_exception(None, None, KeyboardInterrupt())
    callback.setup(None, None, "fit")
    assert callback.state_dict() == {"states": []}
    with pytest.raises(ValueError, match=r"has no states of LightningCallback.*without ckpt_path"):
        callback.on_load_checkpoint(None, None, {"callbacks": {"ModelCheckpoint": {}}})


def of_rank(world, rank, model=None):
    """A training of local steps on one of the threads' ranks."""
    model = model or mixed_model()
    training = Training(recipes.low_bit, {"period": 3, "collectives": world.collectives(rank), "min_numel": 1})
    training.begin(model, two(model))
    return training, model, training.local


def train(world, trainings, steps):
    def one(rank):
        training, model, _ = trainings[rank]
        for number in range(steps):
            step(model, training._optimizers, 10 * number + rank)
            training.count_step()

    world.run(one)


def test_on_another_number_of_ranks_a_training_begins_with_the_mean_of_what_was_not_sent():
    world = ThreadWorld(2)
    trainings = [of_rank(world, rank) for rank in range(2)]
    train(world, trainings, 4)
    states = [training.state() for training, _, _ in trainings]
    alone, model, _ = of_rank(ThreadWorld(1), 0)
    with pytest.raises(ValueError, match="differs between rank 0 and rank 1"):
        alone.load(2, states.__getitem__)
    world.run(lambda rank: trainings[rank][0].average())
    states = [training.state() for training, _, _ in trainings]
    model.load_state_dict(trainings[0][1].state_dict())
    alone.load(2, states.__getitem__)
    owed = [state["compression"]["owed"]["residual"] for state in [*states, alone.state()]]
    assert any(r.any() for r in owed[0].values() if r is not None)
    for name, first in owed[0].items():
        if first is not None:
            assert torch.allclose(owed[2][name], (first + owed[1][name]) / 2)


def test_all_weights_are_averaged_once():
    world = ThreadWorld(2)
    trainings = [of_rank(world, rank) for rank in range(2)]
    sent = []
    for steps in (0, 2, 0, 1):
        train(world, trainings, steps)
        before, buffers = trainings[0][0].compression.stats()["total"]["dense_tensor_bytes"], 500
        world.run(lambda rank: trainings[rank][0].average())
        sent.append(trainings[0][0].compression.stats()["total"]["dense_tensor_bytes"] > before + buffers)
        weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for _, model, _ in trainings]
        assert torch.equal(*weights)
    assert sent == [False, True, False, True]


def test_a_checkpoint_of_another_model_or_of_other_optimizers_is_refused():
    training, _, _ = of_rank(ThreadWorld(1), 0)
    state = training.state()
    other, _, _ = of_rank(ThreadWorld(1), 0, torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3))))
    with pytest.raises(ValueError, match=r"parameters\..*the checkpoint has the shape"):
        other.load(1, lambda rank: state)
    state["rank"]["optimizers"].pop()
    with pytest.raises(ValueError, match="the checkpoint has 1 optimizers, this training 2"):
        training.load(1, lambda rank: state)


def test_a_scaler_goes_to_a_compressor_and_is_saved_with_local_steps():
    scaler, model = torch.amp.GradScaler("cpu", init_scale=8.0), mixed_model()
    world = ThreadWorld(1)
    training = Training(hvd_compress.IWP, {"collectives": world.collectives(0)})
    training.begin(model, two(model), scaler)
    assert training.compression.grad_scaler is scaler
    local = Training(recipes.low_bit, {"collectives": world.collectives(0)})
    local.begin(model, two(model), scaler)
    scaler.scale(torch.ones(1))
    state = local.state()
    scaler.update(2.0)
    local.load(1, lambda rank: state)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("build", ["low_bit", None, 3])
def test_what_builds_the_method_must_be_callable(build):
    with pytest.raises(TypeError, match=r"the first argument builds the method.*got"):
        Training(build, {})


def test_what_builds_the_method_must_return_it():
    training = Training(lambda model, optimizers: None, {})
    with pytest.raises(TypeError, match=r"must return hvd_compress\.LocalSteps or a compressor, got None"):
        training.begin(mixed_model(), [])
    with pytest.raises(RuntimeError, match="built when the training begins"):
        _ = training.compression


def test_local_gradients_needs_ddp():
    with pytest.raises(ValueError, match="takes a model in DistributedDataParallel, got Sequential"):
        trainers.local_gradients(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'KerasCallback'"):
        _ = trainers.KerasCallback


def test_every_name_is_documented_and_the_code_of_the_pages_compiles():
    """Also torchtitan's and nanoGPT's, on the pages of nodes and of local steps."""
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("trainers", "nodes", "local_steps")}
    names = re.findall(r"^.. auto\w+:: hvd_compress\.trainers\.(\w+)$", pages["trainers"], re.MULTILINE)
    assert sorted(names) == sorted(trainers.__all__)
    blocks = {
        name: re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for name, page in pages.items()
    }
    assert [len(found) > 3 for found in blocks.values()] == [True] * 3
    for name, found in blocks.items():
        for block in found:
            compile(block, f"docs/{name}.md", "exec")
