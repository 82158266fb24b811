"""Averages that are zeroed without a step: what was not sent of their gradients must not be applied later unnoticed."""

import warnings
from functools import partial

import pytest
import torch
from harness import LoopRank
from torch import nn

from hvd_compress import IWP, NoCompression, PowerSGD, Quantized, TopK, average_gradients
from hvd_compress.carriers.threads import ThreadWorld

ZEROED = "averages were zeroed before an optimizer has applied them"
BUILDS = {
    "iwp": partial(IWP, density=1 / 16),
    "topk": partial(TopK, density=1 / 16),
    "quantized": partial(Quantized, bits=2),
    "powersgd": PowerSGD,
}
ALL = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS.keys())
SGD = partial(torch.optim.SGD, lr=0.1)


class Adversaries:
    """A discriminator with a compressor, and a generator without one: the hooks would call average_gradients() in each
    backward pass that goes through the discriminator."""

    def __init__(self, build, optimizer=SGD):
        torch.manual_seed(0)
        self.g, model = nn.Linear(8, 40), nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 32))
        rank = LoopRank(ThreadWorld(1, ordered=True), 0, model, build)
        self.d, self.compression = rank.model, rank.compression
        self.optimizer, self.others = optimizer(self.d.parameters()), SGD(self.g.parameters())

    def backward(self, average=True):
        self.d(self.g(torch.randn(4, 8))).square().mean().backward()
        if average:
            average_gradients(self.compression)

    def d_step(self, **zero):
        self.d.zero_grad(**zero)
        self.backward()
        self.optimizer.step()

    def g_step(self, average=True):
        self.g.zero_grad()
        self.backward(average)
        self.others.step()


@ALL
@pytest.mark.parametrize("optimizer", [SGD, torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_generators_step_through_its_discriminator(build, optimizer, set_to_none):
    """As PyTorch's DCGAN: the discriminator's gradients of the generator's step are zeroed before its next step."""
    pair = Adversaries(build, optimizer)
    pair.d_step(set_to_none=set_to_none)
    pair.g_step()
    with pytest.raises(RuntimeError, match=rf"{ZEROED}.*no_sync\(\) of this model"):
        pair.d_step(set_to_none=set_to_none)


@ALL
def test_several_steps_of_the_discriminator_or_of_the_generator(build):
    pair = Adversaries(build)
    for _ in range(3):
        pair.d_step()
    for _ in range(2):
        pair.d.zero_grad()
        pair.g_step()
    pair.d.zero_grad()
    with pytest.raises(RuntimeError, match=ZEROED):
        pair.d_step()


@pytest.fixture
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@ALL
@pytest.mark.usefixtures("without_warnings")
def test_gradients_that_are_not_averaged_leave_nothing(build):
    """The cure."""
    pair = Adversaries(build)
    for _ in range(4):
        pair.d_step()
        pair.g_step(average=False)


@ALL
@pytest.mark.usefixtures("without_warnings")
def test_an_average_that_is_applied_after_the_other_optimizers_step(build):
    """One loss, two optimizers in either order."""
    pair = Adversaries(build)
    for step in range(4):
        pair.d.zero_grad()
        pair.g.zero_grad()
        pair.backward()
        for optimizer in [pair.others, pair.optimizer][:: -1 if step % 2 else 1]:
            optimizer.step()


@pytest.mark.parametrize("build", [NoCompression, partial(TopK, density=1.0)], ids=["none", "everything"])
@pytest.mark.usefixtures("without_warnings")
def test_methods_that_send_everything_keep_nothing(build):
    pair = Adversaries(build)
    for _ in range(4):
        pair.d_step()
        pair.g_step()


@ALL
@pytest.mark.usefixtures("without_warnings")
def test_steps_that_are_taken_back(build):
    pair = Adversaries(build)
    for _ in range(3):
        pair.d_step()
        pair.d.zero_grad()
        pair.backward()
        pair.others.step()
        pair.compression.discard_step()


@ALL
@pytest.mark.usefixtures("without_warnings")
def test_averages_that_are_not_finite(build):
    """They have sent nothing, and a loop skips them, while the other optimizer steps."""
    pair = Adversaries(build)
    pair.d_step()
    pair.d.zero_grad()
    for p in pair.d.parameters():
        p.grad = torch.full_like(p, torch.inf)
    average_gradients(pair.compression)
    pair.others.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.d_step()


@ALL
@pytest.mark.parametrize("data", [False, True], ids=["in place", "data"])
@pytest.mark.usefixtures("without_warnings")
def test_updates_of_ones_own(build, data):
    """Averages that no optimizer applies count as applied, also if there was one before."""
    pair = Adversaries(build)
    for _ in range(4):
        pair.d.zero_grad()
        pair.backward()
        pair.others.step()
        with torch.no_grad():
            for p in pair.d.parameters():
                (p.data if data else p).sub_(0.1 * p.grad)
    if not data:
        pair.optimizer.step()
        pair.d_step()


@ALL
def test_without_another_optimizers_step_it_is_a_warning(build):
    """A step that is left out, or passes for gradients of the inputs."""
    pair = Adversaries(build)
    for _ in range(3):
        pair.d_step()
    pair.d.zero_grad()
    pair.backward()
    with pytest.warns(UserWarning, match=ZEROED):
        pair.d_step()
    pair.d_step()
