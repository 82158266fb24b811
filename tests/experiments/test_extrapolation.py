"""Extrapolation of the weights by a line or a network."""

import pytest
import torch
from experiment.extrapolation import WNN, Line, trained


def test_a_line_is_continued():
    past = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 5.0, 5.0, 5.0, 5.0], [1.0, -1.0, 1.0, -1.0, 1.0]])
    torch.testing.assert_close(Line([]).extrapolate(past), torch.tensor([9.0, 5.0, 0.2]))


@pytest.mark.parametrize("kind", [Line, WNN])
def test_every_fifth_epoch_changes_the_weights(kind):
    model = torch.nn.Linear(7, 5)
    model.bias.requires_grad_(False)
    bias, ahead = model.bias.clone(), kind(model.parameters())
    start = model.weight.detach().clone()
    changed = []
    for _ in range(10):
        with torch.no_grad():
            model.weight += 0.01
        before = model.weight.detach().clone()
        changed.append(ahead.epoch_end())
        assert torch.equal(model.weight, before) != changed[-1]
        if kind is Line and changed[-1]:
            torch.testing.assert_close(model.weight, before + 0.05)
    assert changed == [False] * 4 + [True] + [False] * 4 + [True]
    assert torch.equal(model.bias, bias) and not torch.equal(model.weight, start)


@pytest.mark.parametrize("kind", [Line, WNN])
def test_weights_that_would_not_be_finite_stay_as_they_are(kind):
    """Weights of past epochs that are not finite, and extrapolated ones beyond float16."""
    model = torch.nn.Linear(4, 1, bias=False).half()
    ahead = kind(model.parameters())
    for epoch in range(5):
        first = float("nan") if epoch == 1 else 1.0
        weights = torch.tensor([[first, 15000.0 * epoch, 1.0, float("inf")]])
        with torch.no_grad():
            model.weight.copy_(torch.where(torch.tensor(epoch == 4), weights.nan_to_num(posinf=2.0), weights))
        ahead.epoch_end()
    assert model.weight.isfinite().all() and model.weight[0, 0] == 1.0 and model.weight[0, 3] == 2.0


def test_the_network_is_equivariant_to_shift_and_scale():
    """Shifted and scaled weights give shifted and scaled results."""
    past = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    network = trained()
    with torch.no_grad():
        torch.testing.assert_close(network(past * 8 + 3), network(past) * 8 + 3, rtol=1e-3, atol=1e-3)
    assert network(torch.zeros(1, 5)).abs().item() < 1e-4, "a constant weight stays constant"


def test_the_shipped_network_is_better_than_predicting_no_change():
    """On weights that converge as 1 - exp(-t)."""
    time = torch.arange(30, dtype=torch.float32)
    curves = torch.stack([a * (1 - torch.exp(-time / tau)) for a in (0.1, 1.0) for tau in (5.0, 10.0, 20.0)])
    past, following = curves.unfold(1, 10, 3)[..., :5].reshape(-1, 5), curves.unfold(1, 10, 3)[..., -1].reshape(-1)
    with torch.no_grad():
        predicted = trained()(past)
    assert (predicted - following).abs().sum() < 0.7 * (past[:, -1] - following).abs().sum()
