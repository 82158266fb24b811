"""Momentum correction, and moving the momentum between optimizer and compressor."""

import pytest
import torch
from harness import replicas, sgd, single, together
from models import gradients, mixed_model

from hvd_compress import IWP
from hvd_compress.carriers.threads import ThreadWorld


def test_momentum_must_not_count_twice():
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {}), (torch.optim.SGD, {})):
        model = torch.nn.Linear(64, 64)
        compression = single(model, momentum=0.9)
        optimizer = kind(model.parameters(), lr=0.1, **options)
        if options or kind is torch.optim.Adam:
            with pytest.raises(ValueError, match=r"momentum would count twice: 0.9 in this compressor and 0.9"):
                optimizer.step()
        else:
            optimizer.step()
        assert compression.stats()["steps"] == 0


def test_the_momentum_is_taken_once_and_before_the_first_step():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.75, weight_decay=0.01)
    assert compression.take_momentum(optimizer) == compression.momentum.value == 0.75
    assert optimizer.param_groups[0]["momentum"] == 0.0 and optimizer.param_groups[0]["weight_decay"] == 0.04
    with pytest.raises(ValueError, match="no momentum to take"):
        compression.take_momentum(optimizer)
    optimizer.step()
    del compression  # taken back: with a new one
    optimizer.param_groups[0].update(momentum=0.75, weight_decay=0.01)
    other = single(model)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    with pytest.warns(UserWarning, match="its velocities are dropped"):
        other.take_momentum(optimizer)


def test_a_schedule_must_not_give_the_momentum_back():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain, cycling = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=cycles) for cycles in (False, True)
    )
    optimizer.param_groups[0]["momentum"] = 0.9
    compression.take_momentum(optimizer)
    optimizer.step()
    plain.step()
    optimizer.step()
    cycling.step()
    with pytest.raises(ValueError, match="momentum would count twice"):
        optimizer.step()


def test_the_momentum_is_taken_before_the_compressors_first_step():
    world, (rank,) = replicas(1, IWP)
    together(world, [rank], [gradients(rank.model, 0)])
    with pytest.raises(ValueError, match="before the compressor's first step: build a new compressor"):
        rank.compression.take_momentum(torch.optim.SGD(rank.model.parameters(), lr=0.1, momentum=0.9))


def test_take_momentum_raises_an_error_for_any_other_momentum():
    model = torch.nn.Linear(64, 64)
    for other in (torch.optim.Adam(model.parameters()), torch.optim.RMSprop(model.parameters(), momentum=0.9)):
        with pytest.raises(TypeError, match=f"not of {type(other).__name__}"):
            single(model).take_momentum(other)
    groups = [{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias], "momentum": 0.5}]
    with pytest.raises(ValueError, match="one momentum"):
        single(model).take_momentum(torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match="nesterov"):
        single(model).take_momentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))


def test_parameters_outside_the_compressor_must_not_lose_their_momentum():
    model, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    compression = single(model)
    with pytest.raises(ValueError, match="2 of the optimizer's parameters were not given"):
        compression.take_momentum(optimizer)
    head.requires_grad_(False)
    compression.take_momentum(optimizer)
    head.requires_grad_(True)
    optimizer._compression = compression
    with pytest.raises(ValueError, match="would lose their momentum"):
        optimizer.step()


def test_an_optimizer_without_the_compressor_must_not_lose_its_momentum():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression.take_momentum(optimizer)
    optimizer._compression = object()
    with pytest.raises(ValueError, match="pass compression="):
        optimizer.step()


def alone(model, **options):
    """As with one process under Horovod, which then calls no compressor."""
    collectives = ThreadWorld(1).collectives(0)
    collectives.active = False
    return IWP(model.named_parameters(), collectives=collectives, **options)


def test_with_one_process_the_optimizer_keeps_its_momentum():
    model = torch.nn.Linear(64, 64)
    compression = alone(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    assert compression.take_momentum(optimizer) == 0.9
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.01
    optimizer.step()
    other = torch.nn.Linear(64, 64)
    compression = alone(other, momentum=0.9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="momentum would be lost: with one process"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.9
    assert compression.take_momentum(optimizer) == 0.9
    optimizer.step()


def test_sparse_gradients_with_momentum_raise_an_error():
    compression = single(momentum=0.9)
    with pytest.raises(ValueError, match="sparse_as_dense"):
        compression.decompress(torch.ones(64, 64).to_sparse(), None)


@pytest.mark.parametrize("size", [1, (2, 2)], ids=["1", "2x2"])
def test_taking_the_momentum_does_not_change_dense_training(size):
    """Uncompressed parameters, and all parameters at density 1, move as under SGD with momentum."""
    reference = mixed_model()
    stock = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9, weight_decay=0.001)
    world, ranks = replicas(size, IWP, model=reference, density=1.0, values="fp32")
    ours = sgd(ranks, lr=0.01, momentum=0.9)
    for rank, optimizer in zip(ranks, ours, strict=True):
        rank.compression.take_momentum(optimizer)
    stock.param_groups[0]["weight_decay"] = 0.0
    for step in range(30):
        grads = gradients(reference, seed=step)
        for p, grad in zip(reference.parameters(), grads, strict=True):
            p.grad = grad.clone()
        stock.step()
        together(world, ranks, [[grad.clone() for grad in grads] for _ in ranks])
        for optimizer in ours:
            optimizer.step()
    for rank in ranks:
        torch.testing.assert_close([*reference.parameters()], [*rank.model.parameters()], rtol=1e-4, atol=1e-5)
