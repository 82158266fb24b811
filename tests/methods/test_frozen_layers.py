"""Layers that have no gradient on any rank, for some steps or for ever: momentum does not move them, whichever part of
a compressor has it, as torch.optim.SGD skips them. (methods/test_idle_layers.py: the residual comes to rest.)"""

from functools import partial

import pytest
import torch
from harness import LoopRank, replicas
from torch import Tensor, nn

from hvd_compress import DGC, FFT, IWP, MIPD, MP2, DeMo, SlimDP, TopK

EVERYTHING = {
    "topk": partial(TopK, density=1.0, momentum=0.9),
    "iwp": partial(IWP, density=1.0, values="fp32", momentum=0.9),
    "fft": partial(FFT, density=1.0, values="fp32", momentum=0.9),
    "demo": partial(DeMo, density=1.0, values="fp32", sign=False, decay=1.0, momentum=0.9),
    "dgc": partial(DGC, density=1.0, values="fp32-gather"),
}
SOME = {
    "topk": partial(TopK, density=1 / 4, momentum=0.9),
    "iwp": partial(IWP, density=1 / 4, momentum=0.9),
    "fft-gather": partial(FFT, density=1 / 4, exchange="gather", momentum=0.9),
    "demo": partial(DeMo, density=1 / 4, sign=False, decay=1.0, momentum=0.9),
    "dgc": partial(DGC, density=1 / 4),
    "mp2": partial(MP2, momentum=0.9),
    "mipd": partial(MIPD, density=1 / 4, momentum=0.9),
    "slimdp": partial(SlimDP, density=1 / 4, momentum=0.9),
}
SIZES = pytest.mark.parametrize("size", [2, (2, 2)], ids=["2", "2x2"])
HOSTS = pytest.mark.parametrize("host", ["ddp", "horovod", "loop"])


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 16))


def gradients_of(model: nn.Module, steps: int, frozen: range) -> list[list[Tensor]]:
    """By step. The second layer, a matrix and a bias, has none in the steps ``frozen``."""
    generator = torch.Generator().manual_seed(0)
    found = [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(steps)]
    for step in frozen:
        found[step][2:4] = map(torch.zeros_like, found[step][2:4])
    return found


@pytest.mark.alternate("host")
@HOSTS
@SIZES
@pytest.mark.parametrize("build", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_at_density_1_weights_are_those_of_sgd_that_skips_the_layers(build, size, host):
    """Also afterwards, with the velocities from before. Nobody has a gradient in a loop (None), or it is 0."""
    world, ranks = replicas(size, build, layers(), host)
    reference, frozen = layers(), range(5, 9)
    grads = gradients_of(reference, 14, frozen)
    stock = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step, given in enumerate(grads):
        for p, grad in zip(reference.parameters(), given, strict=True):
            p.grad = None if step in frozen and not grad.any() else grad.clone()
        stock.step()

    def body(i: int) -> None:
        rank = ranks[i]
        optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
        for step, given in enumerate(grads):
            if isinstance(rank, LoopRank):
                rank.model[1].requires_grad_(step not in frozen)
            absent = isinstance(rank, LoopRank) and step in frozen
            rank.exchange([None if absent and not grad.any() else grad.clone() for grad in given])
            optimizer.step()

    world.run(body)
    for rank in ranks:
        torch.testing.assert_close([*rank.model.parameters()], [*reference.parameters()], rtol=1e-4, atol=1e-4)


@pytest.mark.alternate("host")
@HOSTS
@SIZES
@pytest.mark.parametrize("build", SOME.values(), ids=SOME.keys())
def test_what_is_applied_after_freezing_is_what_has_left_the_residual(build, size, host):
    world, ranks = replicas(size, build, layers(), host)
    grads = gradients_of(ranks[0].model, 12, range(6, 12))

    def body(i: int) -> tuple[Tensor, Tensor, Tensor]:
        rank = ranks[i]
        for given in grads[:6]:
            rank.exchange([grad.clone() for grad in given])
        before, applied = rank.compression.residual("1.weight").clone(), torch.zeros(48, 48)
        for given in grads[6:]:
            matrix, bias = rank.exchange([grad.clone() for grad in given])[2:4]
            applied += matrix
            assert not bias.any()
        return before, rank.compression.residual("1.weight"), applied

    found = world.run(body)
    per_node = ranks[0].compression.engine.nodes.ranks
    left = sum(before - after for before, after, _ in found) * per_node / world.size
    assert left.any()
    torch.testing.assert_close(found[0][2], left, rtol=0, atol=1e-3)


@SIZES
def test_a_gradient_on_one_rank_is_enough(size):
    """Its velocity goes on on all ranks, also where the others have no gradient."""
    reference = layers()
    stock = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    world, ranks = replicas(size, EVERYTHING["topk"], layers(), "ddp")
    grads = gradients_of(reference, 8, range(0))
    for given in grads:
        for p, grad in zip(reference.parameters(), given, strict=True):
            p.grad = grad / world.size
        stock.step()

    def body(i: int) -> None:
        optimizer = torch.optim.SGD(ranks[i].model.parameters(), lr=0.1)
        for step, given in enumerate(grads):
            ranks[i].exchange([grad.clone() if i == step % world.size else torch.zeros_like(grad) for grad in given])
            optimizer.step()

    world.run(body)
    torch.testing.assert_close([*ranks[0].model.parameters()], [*reference.parameters()], rtol=1e-4, atol=1e-4)
