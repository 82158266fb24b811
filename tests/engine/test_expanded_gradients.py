"""Gradients made by ``expand()``, whose entries share memory: averages cannot be written to that."""

import pytest
import torch
from harness import KINDS, replicas, together

from hvd_compress import IWP, Quantized


@pytest.mark.parametrize("host", ["horovod", "loop"])
@pytest.mark.parametrize("build", [IWP, Quantized])
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 1)], ids=str)
def test_expanded_gradients_are_averaged_as_others(host, build, shape):
    assert host in KINDS

    def averages(expanded):
        world, ranks = replicas(2, build, model=torch.nn.Linear(64, 64), host=host)
        grads = []
        for rank in range(2):
            torch.manual_seed(rank)
            weight, bias = torch.randn(shape).expand(64, 64), torch.randn(1).expand(64)
            grads.append([weight, bias] if expanded else [weight.clone().contiguous(), bias.clone().contiguous()])
        torch.manual_seed(0)
        return together(world, ranks, grads)

    torch.manual_seed(0)
    ours, same = averages(True)
    torch.manual_seed(0)
    theirs, _ = averages(False)
    for one, other, expected in zip(ours, same, theirs, strict=True):
        assert torch.equal(one, expected) and torch.equal(one, other) and one.is_contiguous()
