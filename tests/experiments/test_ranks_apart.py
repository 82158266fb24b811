"""The simulation of many ranks: its model is that of the experiments, its rounding that of low_bit, and the
documentation shows its stored runs."""

from pathlib import Path

import pytest
import ranks_apart
import torch
import torch.nn.functional as F
from experiment import models
from torch.func import functional_call

from hvd_compress.reference.low_bit import encode, lloyd_max

PAGE = Path(__file__).resolve().parents[2] / "docs" / "local_steps.md"


def test_each_rank_has_the_gradient_of_the_model():
    torch.manual_seed(1)
    model, ranks = models.build("gpt", 256, 16), 3
    weights = {
        name: torch.stack([p + 0.1 * torch.randn_like(p) for _ in range(ranks)]).detach()
        for name, p in model.named_parameters()
    }
    inputs, targets = torch.randint(256, (2, ranks, 2, 16))
    found = ranks_apart.gradients(weights, inputs, targets)
    for rank in range(ranks):
        leaves = {name: w[rank].clone().requires_grad_() for name, w in weights.items()}
        logits = functional_call(model, leaves, (inputs[rank],))
        wanted = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), targets[rank].flatten()), [*leaves.values()])
        for name, gradient in zip(leaves, wanted, strict=True):
            torch.testing.assert_close(found[name][rank], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 60), (32, 48), (33, 35)])
def test_what_was_rounded_off_is_sent_later(shape):
    torch.manual_seed(2)
    rounds = [torch.randn(4, *shape) for _ in range(5)]
    feedback, sent = ranks_apart.Feedback(rounds[0], 2), torch.zeros(shape)
    for tensors in rounds:
        sent += feedback.mean(tensors)
    left = feedback._residuals.mean(0) + feedback._owners
    torch.testing.assert_close(sent + left, sum(rounds).mean(0), rtol=0, atol=1e-5)
    assert left.norm() > 0.1


def test_values_are_rounded_as_low_bit_rounds_them():
    torch.manual_seed(3)
    x = torch.randn(2, 512)
    wanted = encode(x.flatten(), torch.tensor([512, 512]), lloyd_max(2), 2)[1]
    assert torch.equal(ranks_apart.Feedback(x[None], 2)._rounded(x).flatten(), wanted)


def test_bytes_are_those_of_the_bits_that_each_part_has_in_a_step():
    assert ranks_apart.fewer_bytes(ranks_apart.Setting()) == pytest.approx(32 / (2 / 3))
    assert ranks_apart.fewer_bytes(ranks_apart.Setting(period=1, bits=0, others=0)) == 1
    # An eighth of the parameters are the others: 31,200 of 252,384.
    mixed = 32 * 252_384 / (221_184 * 2 / 3 + 31_200 * 8)
    assert ranks_apart.fewer_bytes(ranks_apart.Setting(others=8)) == pytest.approx(mixed)


def test_the_documentation_shows_the_stored_runs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ranks_apart.py"])
    ranks_apart.main()
    printed = capsys.readouterr().out
    assert printed.count("\n") == 2 + len(ranks_apart.SETTINGS) and printed in PAGE.read_text()
