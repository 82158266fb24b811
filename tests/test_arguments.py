"""What a user can get wrong, and what the error says."""

import copy
import gc
import weakref

import pytest
import torch
from harness import Scheduled, gradients, mixed_model, replicas, together
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_compress import IWP
from hvd_compress.hosts.threads import ThreadCollectives, ThreadWorld


def build(model=None, **options):
    model = model or mixed_model()
    return IWP(model.named_parameters(), collectives=ThreadWorld(1).collectives(0), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"density": 0.0}, r"density must lie in \(0, 1\], got 0.0"),
        ({"density": 1.5}, "got 1.5"),
        ({"values": "fp8"}, "values must be one of fp32, fp16, lanes2 to lanes16.*got 'fp8'"),
        ({"values": "lanes17"}, "lanes take 2 to 16 bits, got 17"),
        ({"values": "lloyd9"}, "lloyd takes 1 to 8 bits, got 9"),
        ({"values": "range3"}, "range takes 4 to 16 bits, got 3"),
        ({"values": "lanes4-gather"}, "got 'lanes4-gather'"),
        ({"dense_values": "int8"}, "dense_values must be fp16 or fp32, got 'int8'"),
        ({"selection": "magic"}, "selection must be one of block, topk, got 'magic'"),
        ({"leaders": 0}, "leaders must be at least 1"),
        ({"explore": 1.1}, r"explore must lie in \[0, 1\], got 1.1"),
        ({"floor": 0.0}, "floor must be above 0"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"budget_interval": -1}, "budget_interval must not be negative"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0"),
        ({"min_numel": 0}, "min_numel must be at least 1"),
    ],
)
def test_bad_arguments_say_what_is_allowed(options, says):
    with pytest.raises(ValueError, match=says):
        build(**options)


def test_named_parameters_must_be_pairs():
    with pytest.raises(TypeError, match="pairs"):
        IWP(mixed_model().parameters(), collectives=ThreadWorld(1).collectives(0))


def test_used_up_iterator_is_recognised():
    iterator = mixed_model().named_parameters()
    list(iterator)
    with pytest.raises(ValueError, match="used up"):
        IWP(iterator, collectives=ThreadWorld(1).collectives(0))


def test_duplicate_names_are_refused():
    p = torch.nn.Parameter(torch.zeros(64, 64))
    q = torch.nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(ValueError, match="more than once: w"):
        IWP([("w", p), ("w", q)], collectives=ThreadWorld(1).collectives(0))


def test_integer_gradient_is_refused_by_name():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)
            self.linear = torch.nn.Linear(64, 64)

    model = Odd()
    compression = build(model)
    model.codes.grad = torch.ones(64, 64, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"codes: gradient of dtype torch.int32; allowed are float32"):
        compression.compress(model.codes.grad)


def test_state_made_with_another_momentum_changes_nothing():
    model = torch.nn.Linear(64, 64)
    state = build(model, momentum=0.9).state_dict()
    state["tensors"]["weight"]["residual"].fill_(7.0)
    other = build(model, momentum=0.8)
    with pytest.raises(ValueError, match=r"made with momentum 0.9, this compressor has 0.8"):
        other.load_state_dict(state)
    assert other.stats()["residual_norm"] == 0.0


def test_parameter_that_moved_is_refused_by_name():
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    compression.engine.places[id(model.weight)].bucket.device = torch.device("cuda", 0)
    model.weight.grad = torch.ones(64, 64)
    with pytest.raises(
        ValueError, match="weight: was on cuda:0 when the compressor was built and its gradient is on cpu"
    ):
        compression.compress(model.weight.grad)


def test_momentum_must_not_count_twice():
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.SGD, {})):
        model = torch.nn.Linear(64, 64)
        compression = build(model, momentum=0.9)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        if options or kind is torch.optim.Adam:
            with pytest.raises(ValueError, match=r"momentum would count twice: 0.9 in this compressor and 0.9"):
                optimizer.step()
        else:
            optimizer.step()
        assert compression.stats()["steps"] == 0


def test_take_momentum_moves_it_and_back():
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert compression.take_momentum(optimizer) == 0.9
    assert optimizer.param_groups[0]["momentum"] == 0.0
    optimizer.step()
    assert compression.return_momentum(optimizer) == 0.9
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert "momentum" not in repr(compression)
    optimizer.step()


def test_take_momentum_refuses_what_it_does_not_know():
    model = torch.nn.Linear(64, 64)
    for other in (torch.optim.Adam(model.parameters()), torch.optim.RMSprop(model.parameters(), momentum=0.9)):
        with pytest.raises(TypeError, match=f"not of {type(other).__name__}"):
            build(model).take_momentum(other)
    groups = [{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias], "momentum": 0.5}]
    with pytest.raises(ValueError, match="one momentum"):
        build(model).take_momentum(torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match="nesterov"):
        build(model).take_momentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))


def test_parameters_without_a_compressor_would_lose_their_momentum():
    model, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    compression = build(model)
    with pytest.raises(ValueError, match="2 of the optimizer's parameters were not given"):
        compression.take_momentum(optimizer)
    head.requires_grad_(False)
    compression.take_momentum(optimizer)
    head.requires_grad_(True)
    optimizer._compression = compression
    with pytest.raises(ValueError, match="would lose their momentum"):
        optimizer.step()


def test_an_optimizer_that_was_not_given_the_compressor_would_lose_its_momentum():
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression.take_momentum(optimizer)
    optimizer._compression = object()
    with pytest.raises(ValueError, match="pass compression="):
        optimizer.step()


def test_alone_the_optimizer_keeps_its_momentum(monkeypatch):
    """Horovod calls no compressor in a process alone."""
    monkeypatch.setattr(ThreadCollectives, "active", property(lambda self: False))
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    assert compression.take_momentum(optimizer) == 0.9
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.01
    optimizer.step()
    assert compression.return_momentum(optimizer) == 0.9
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.01
    other = torch.nn.Linear(64, 64)
    compression = build(other, momentum=0.9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="momentum would be lost: in a process alone"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    assert compression.take_momentum(optimizer) == 0.9
    optimizer.step()
    # The state of an optimizer whose momentum was taken, in a job of several processes.
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match=r"left 0.9 to the optimizer, which has another momentum now"):
        optimizer.step()


def test_parameters_that_were_not_given_are_mentioned():
    model, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    compression = build(model)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    optimizer._compression = compression
    with pytest.warns(UserWarning, match="2 of the optimizer's parameters were not given to this compressor"):
        optimizer.step()


def test_sparse_gradients_have_no_momentum_here():
    compression = build(momentum=0.9)
    with pytest.raises(ValueError, match="sparse_as_dense"):
        compression.decompress(torch.ones(64, 64).to_sparse(), None)


def test_two_optimizers_are_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    compression = build(model)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    first.step()
    first.step()
    with pytest.raises(ValueError, match="serves a SGD already and a second optimizer"):
        second.step()
    del compression
    second.step()


def test_a_compressor_may_be_collected_while_an_optimizer_steps():
    compression = build()
    gone = weakref.ref(compression)
    kept = [compression]
    del compression

    def collect(*_):
        kept.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    _kept = build()  # torch's list goes on after `collect`
    try:
        torch.optim.SGD(torch.nn.Linear(64, 64).parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert gone() is None


def test_an_optimizer_of_other_parameters_is_none_of_our_business():
    model, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    compression = build(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert compression.stats()["steps"] == 0


def test_state_of_other_parameters_is_refused():
    state = build(torch.nn.Linear(64, 64)).state_dict()
    with pytest.raises(ValueError, match="different parameters"):
        build().load_state_dict(state)
    with pytest.raises(ValueError, match=r"needs shape \(128, 64\), the state has shape \(64, 64\)"):
        build(torch.nn.Linear(64, 128)).load_state_dict(state)
    with pytest.raises(ValueError, match="the state of Other"):
        build(torch.nn.Linear(64, 64)).load_state_dict({**state, "method": "Other"})


@pytest.mark.parametrize(
    ("options", "says"), [({"seed": 1.0}, "seed"), ({"seed": None}, "seed"), ({"grad_scaler": True}, "grad_scaler")]
)
def test_what_is_not_of_the_right_kind_is_refused_at_once(options, says):
    with pytest.raises(TypeError, match=f"{says} must be"):
        build(**options)


def test_state_dict_in_the_middle_of_a_step_is_refused():
    model = mixed_model()
    compression = build(model)
    model.wide.weight.grad = torch.ones(47, 301)
    compression.compress(model.wide.weight.grad)
    with pytest.raises(RuntimeError, match="middle of a step"):
        compression.state_dict()


def test_repr_says_what_it_does():
    text = repr(build(density=1 / 64, warmup_steps=10, leaders=2, momentum=0.9))
    parts = "IWP(density 1/64", "warm-up 10 steps", "2 random leader", "lanes4", "correction 0.9", "3 of 9 tensors"
    for part in parts:
        assert part in text, text


def test_parameters_that_horovod_never_sends_do_not_stop_the_others():
    """A compressor given more than the optimizer holds: it says so, once, and goes on."""
    world, ranks = replicas(2, IWP, density=1 / 16, bucket_mb=1)
    for r in ranks:
        # Horovod wrapped all but `deep`.
        r.model.deep = torch.nn.Identity()
    with pytest.warns(UserWarning, match=r"never sent the gradients of deep.weight"):
        for step in range(3):
            applied = together(world, ranks, [gradients(r.model, step * 2 + r.rank) for r in ranks], shuffle=step)
    assert all(torch.equal(a, b) for a, b in zip(*applied, strict=True))
    assert all(a.isfinite().all() for a in applied[0])


def test_sparse_gradients_pass_through():
    compression = build()
    grad = torch.ones(64, 64).to_sparse()
    assert compression.decompress(grad, None) is grad


def test_adasum_hands_in_parameters_which_go_as_they_are():
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    with pytest.warns(UserWarning, match="Adasum"):
        payload, ctx = compression.compress(model.weight)
    assert torch.equal(payload, model.weight) and ctx is None


def test_one_parameter_under_two_names_is_refused():
    p = torch.nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(ValueError, match="a and b are one parameter"):
        IWP([("a", p), ("b", p)], collectives=ThreadWorld(1).collectives(0))


def test_momentum_is_taken_once_and_returned_once():
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.75, weight_decay=0.01)
    with pytest.raises(ValueError, match="no momentum to return"):
        compression.return_momentum(optimizer)
    compression.take_momentum(optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.04
    with pytest.raises(ValueError, match="no momentum to take"):
        compression.take_momentum(optimizer)
    compression.return_momentum(optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


def test_a_compressor_of_another_copy_of_the_model_is_refused():
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    optimizer._compression = compression
    with pytest.raises(ValueError, match="holds none of its compressor's parameters"):
        optimizer.step()
    with pytest.raises(TypeError, match="build a new one for a copy"):
        copy.deepcopy(compression)


def test_an_optimizer_and_the_one_around_it_are_one():
    """hvd.broadcast_optimizer_state() steps the plain optimizer; Horovod's wrapper shares its parameter groups."""
    model = torch.nn.Linear(64, 64)
    compression = build(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step()
    wrapper = torch.optim.SGD(plain.param_groups, lr=0.1)
    assert wrapper.param_groups[0] is plain.param_groups[0]
    wrapper.step()
    assert compression.stats()["steps"] == 0
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.param_groups[0] is not plain.param_groups[0]
    wrapper.step()
    plain.step()


@pytest.mark.parametrize("density", [0.0, 1.5, float("nan")])
def test_a_schedule_that_returns_no_density_is_told(density):
    world, ranks = replicas(1, IWP, density=Scheduled(lambda step: density))
    with pytest.raises(ValueError, match=r"density must lie in \(0, 1\]"):
        together(world, ranks, [gradients(ranks[0].model, 0)])
