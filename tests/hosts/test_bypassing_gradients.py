"""Gradients that an optimizer applies although they have not passed through the compressor: of parameters that
DistributedDataParallel ignores, and of layers that were unfrozen after the model was wrapped."""

from collections.abc import Callable, Collection
from functools import partial

import pytest
import torch
from fake_ddp import FakeBucket, in_backward
from harness import KINDS, Rank
from torch import nn

from hvd_compress import DGC, FFT, IWP, DeMo, TopK, ddp_hook
from hvd_compress.carriers.threads import ThreadWorld

REFUSED = "its gradient has not passed through this compressor"


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 8))


def one(build: Callable, host: str) -> Rank:
    return KINDS[host](ThreadWorld(1, ordered=host != "horovod"), 0, layers(), build)


def backward(rank: Rank, passed: Collection[str]) -> None:
    """New gradients of all trained parameters, of which those ``passed`` are averaged."""
    trained = {name: p for name, p in rank.model.named_parameters() if p.requires_grad}
    for p in trained.values():
        p.grad = torch.randn_like(p)
    given = [p for name, p in trained.items() if name in passed]
    if rank.ordered:
        buckets = [FakeBucket(i, [p], p.grad.view(-1), i == len(given) - 1) for i, p in enumerate(given)]
        in_backward(lambda: [ddp_hook(rank.compression, bucket) for bucket in buckets])
        return
    pending = [rank.compression.compress(p.grad) for p in given]
    for p, (payload, place) in zip(given, pending, strict=True):
        p.grad.set_(rank.compression.decompress(payload, place))


HOSTS = pytest.mark.parametrize("host", ["ddp", "horovod"])
IGNORED = {"a matrix": ["2.weight"], "a bias": ["2.bias"], "a layer": ["4.weight", "4.bias"], "most": ["0.", "2."]}
BUILDS = {
    "taken": TopK,
    "taken in a transform": FFT,
    "dgc": DGC,
    "demo": DeMo,
    "demo with matrices": partial(DeMo, orthogonal=True),
}


def optimizer_of(rank: Rank, build: Callable) -> torch.optim.Optimizer:
    taken = build in (TopK, FFT)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1, momentum=0.9 if taken else 0.0)
    if taken:
        rank.compression.take_momentum(optimizer)
    if not rank.ordered:
        optimizer._compression = rank.compression
    return optimizer


@HOSTS
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
@pytest.mark.parametrize("ignored", IGNORED.values(), ids=IGNORED.keys())
def test_parameters_that_the_host_ignores(ignored, build, host):
    rank = one(build, host)
    optimizer = optimizer_of(rank, build)
    passed = {name for name, _ in rank.model.named_parameters() if not name.startswith(tuple(ignored))}
    backward(rank, passed)
    with pytest.raises(ValueError, match=rf"^{ignored[0]}.*: {REFUSED}"):
        optimizer.step()


@HOSTS
@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
def test_layers_that_are_unfrozen_after_the_model_was_wrapped(build, host):
    rank = one(build, host)
    optimizer = optimizer_of(rank, build)
    rank.model[0].requires_grad_(False)
    passed = {"2.weight", "2.bias", "4.weight", "4.bias"}
    for _ in range(3):
        optimizer.zero_grad()
        backward(rank, passed)
        optimizer.step()
    rank.model[0].requires_grad_(True)
    backward(rank, passed)
    with pytest.raises(ValueError, match=f"^0.weight: {REFUSED}.*unfrozen"):
        optimizer.step()


@pytest.mark.parametrize("build", [IWP, partial(DeMo, sign=False, decay=1.0)], ids=["iwp", "demo without sign"])
def test_methods_without_momentum_leave_them_alone(build):
    """Such as a rank's own experts."""
    rank = one(build, "ddp")
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        backward(rank, {"0.weight", "0.bias"})
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("build", [TopK, DeMo], ids=["taken", "demo"])
def test_an_optimizer_of_their_own_has_a_momentum_of_its_own(build):
    """The cure that the error names."""
    model = layers()
    expert = model[4]
    del model[4]
    rank = KINDS["ddp"](ThreadWorld(1, ordered=True), 0, model, build)
    optimizer, own = optimizer_of(rank, build), torch.optim.SGD(expert.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for p in expert.parameters():
            p.grad = torch.ones_like(p)
        backward(rank, dict(rank.model.named_parameters()))
        for o in (optimizer, own):
            o.step()
            o.zero_grad()
    assert own.state[expert.weight]["momentum_buffer"].all()


@HOSTS
def test_several_passes_before_a_step_and_several_optimizers(host):
    """What has passed since the last step counts; a layer without a gradient need not pass."""
    rank = one(TopK, host)
    groups = [[*rank.model[0].parameters()], [*rank.model[2].parameters()]]
    optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups[: 2 if rank.ordered else 1]]
    for optimizer in optimizers:
        rank.compression.take_momentum(optimizer)
    for _ in range(3):
        for layer in (0, 2):
            rank.model.requires_grad_(False)
            rank.model[layer].requires_grad_(True)
            backward(rank, [f"{layer}.weight", f"{layer}.bias"])
        rank.model.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
