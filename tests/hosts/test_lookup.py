"""Finding the parameter of a gradient, which Horovod does not name."""

import gc

import torch
from models import mixed_model

from hvd_compress import IWP
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.hosts.lookup import GradientLookup


def test_a_gradient_is_found_by_its_hook_or_by_a_scan():
    parameters = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    lookup = GradientLookup(parameters)
    (parameters[0] * parameters[1]).sum().backward()
    assert lookup.find(parameters[0].grad) == 0 and lookup.find(parameters[1].grad) == 1
    # Horovod fills in the gradient of an unused parameter: no hook fired.
    parameters[2].grad = torch.zeros(4, 4)
    assert lookup.find(parameters[2].grad) == 2
    # An old gradient belongs to no parameter, even if its id was recorded.
    old = parameters[0].grad
    parameters[0].grad = None
    assert lookup.find(old) is None
    assert lookup.find(torch.zeros(4, 4)) is None
    assert lookup.is_parameter(parameters[1]) and not lookup.is_parameter(parameters[1].data)


def test_dense_copies_of_sparse_gradients_are_found():
    tables = [torch.nn.Embedding(50, 8, sparse=True) for _ in range(2)]
    lookup = GradientLookup([table.weight for table in tables])
    (tables[0](torch.tensor([1, 2])).sum() + tables[1](torch.tensor([3])).sum()).backward()
    for number in (1, 0):
        assert tables[number].weight.grad.is_sparse
        assert lookup.find(tables[number].weight.grad.to_dense()) == number


def test_equal_copies_of_sparse_gradients_are_told_apart():
    """By the hook that ran last, since Horovod's follows it; in synchronize(), by which had no copy yet."""
    tables = [torch.nn.Embedding(50, 8, sparse=True) for _ in range(2)]
    lookup = GradientLookup([table.weight for table in tables])
    found = []
    for table in tables:  # as Horovod's hooks, which run after the lookup's
        table.weight.register_post_accumulate_grad_hook(lambda p: found.append(lookup.find(p.grad.to_dense())))
    word = torch.tensor([1])
    (tables[1](word) + tables[0](word)).sum().backward()
    assert sorted(found) == [0, 1]
    lookup.clear()
    late = [lookup.find(table.weight.grad.to_dense()) for table in tables]
    assert sorted(late) == [0, 1]
    lookup.clear()
    nearly = tables[0].weight.grad.to_dense() * (1 + 1e-6)  # a GPU sums rows in any order
    assert lookup.find(nearly) is not None and lookup.find(nearly * 2) is None


def test_a_dense_copy_with_nan_is_found():
    table = torch.nn.Embedding(50, 8, sparse=True)
    lookup = GradientLookup([table.weight])
    (table(torch.tensor([1])) * float("nan")).sum().backward()
    assert lookup.find(table.weight.grad.to_dense()) == 0, "all values are NaN"
    assert lookup.find(torch.ones(50, 8)) is None, "of the same shape, but no copy"


def test_records_are_dropped_if_no_step_ever_begins():
    parameters = [torch.nn.Parameter(torch.randn(4)) for _ in range(3)]
    lookup, alive = GradientLookup(parameters), []
    for _ in range(20):
        sum(p.sum() for p in parameters).backward()
        alive += [p.grad for p in parameters]  # so that no id is reused
        for p in parameters:
            p.grad = None
    assert len(lookup._number_by_id) <= 2 * len(parameters) + 1


def test_hooks_are_removed_with_the_compressor():
    model = mixed_model()
    for _ in range(3):
        IWP(model.named_parameters(), collectives=ThreadWorld(1).collectives(0))
        gc.collect()
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
