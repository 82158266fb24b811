"""MP2: which entries are sent, the prediction and its gate."""

from functools import partial
from pathlib import Path

import pytest
import torch
from harness import random_steps, replicas, residuals, together, toy_model, train
from methods import Guessing
from models import gradients, mixed_model
from safetensors.torch import load_file

from hvd_compress import MP2
from hvd_compress.engine.state import same, save
from hvd_compress.papers import mp2
from hvd_compress.papers.predictor import Predictor, shipped

judged = partial(Guessing, gate=True, density=1 / 4, values="fp32")


def gates(rank):
    """Whether predictions are applied, by piece."""
    return [opened for work in rank.compression.works for opened in work.prediction.opened()]


def constant_gradients(model, seed):
    """Large and the same in every step."""
    return [g + 3.0 for g in gradients(model, seed)]


def test_large_entries_are_sent_often_and_every_entry_sometimes():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    world, ranks = replicas(2, partial(MP2, density=32 / 256, values="fp32"), model=model)
    size = torch.ones(64, 64)
    size.view(16, 256)[:, 5:10] = 20.0
    times = torch.zeros(64, 64)
    for step in range(100):
        grads = [[size * gradients(r.model, 1000 * step + r.rank)[0]] for r in ranks]
        applied = together(world, ranks, grads, shuffle=step)
        assert torch.equal(applied[0][0], applied[1][0])
        times += applied[0][0] != 0
    assert abs(float(times.mean()) - 100 / 8) < 0.1
    often = times.view(16, 256)[:, 5:10]
    assert float(often.mean()) > 3 * float(times.mean()) and float(times.min()) >= 1


def test_the_wire_ratio_is_nine():
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512, bias=False)
    world, ranks = replicas(4, partial(MP2, values="fp32"), model=model)
    random_steps(world, ranks, range(3))
    assert ranks[0].compression.stats()["last"]["wire_ratio"] == pytest.approx(9.0, rel=0.01)


def test_a_good_prediction_opens_the_gate():
    """With the same gradient in every step, the last value predicts the next one."""
    world, ranks = replicas(2, judged, guess=lambda seen: seen[:, 3].sinh())
    grads = [constant_gradients(r.model, r.rank) for r in ranks]
    number = [n for n, _ in ranks[0].model.named_parameters()].index("wide.weight")
    mean = torch.stack([g[number] for g in grads]).mean(0)
    for step in range(100):  # every entry has been sent
        applied = together(world, ranks, [[g.clone() for g in grad] for grad in grads], shuffle=step)
    assert all(gates(ranks[0]))
    torch.testing.assert_close(applied[0][number], mean, rtol=1e-2, atol=1e-2)


def test_a_bad_prediction_closes_the_gate():
    world, ranks = replicas(2, judged, guess=lambda seen: torch.full_like(seen[:, 0], -1.0))
    for step in range(40):
        grads = [constant_gradients(r.model, 100 * step + r.rank) for r in ranks]
        applied = together(world, ranks, grads, shuffle=step)
    assert not any(gates(ranks[0]))
    compressed = [g for (_, p), g in zip(mixed_model().named_parameters(), applied[0], strict=True) if p.dim() > 1]
    assert all(float((g == 0).float().mean()) > 0.7 for g in compressed[1:]), "no entry is predicted"


@pytest.mark.parametrize("steps", [60, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (150, 1000))])
def test_predictions_stay_bit_equal(steps):
    build = partial(Guessing, density=1 / 5, momentum=0.9)
    world, ranks = replicas(3, build, model=toy_model())
    assert max(train(world, ranks, steps)) < (0.1 if steps == 1000 else 0.5), "training must have worked"
    first, *others = (rank.compression.works[0].prediction for rank in ranks)
    assert float(first.guess.abs().sum()) > 0.0
    assert all(same(save(first.state()), save(other.state())) for other in others)


@pytest.mark.parametrize("cause", ["prediction", "weight"])
def test_replicas_that_differ_raise_an_error_on_every_rank(monkeypatch, cause):
    """At the next checksum, for a difference in the last bit."""
    monkeypatch.setattr(mp2, "_CHECK_INTERVAL", 5)
    build = partial(Guessing, density=1 / 3, values="fp32")
    world, ranks = replicas(3, build, model=toy_model())
    random_steps(world, ranks, range(9))
    with torch.no_grad():
        if cause == "prediction":
            ranks[1].compression.works[0].prediction.guess.view(torch.int32).add_(1)
        else:
            ranks[1].model[0].weight.view(-1)[5].nextafter_(torch.tensor(9.0))
    grads = [gradients(r.model, r.rank) for r in ranks]

    def body(i):
        with pytest.raises(RuntimeError, match="predictions or weights differ"):
            ranks[i].exchange(grads[i])

    world.run(body)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "infinity"])
def test_a_skipped_step_undoes_its_predictions(bad):
    world, ranks = replicas(
        2, partial(Guessing, density=1 / 3, values="fp32", guess=lambda seen: torch.full_like(seen[:, 0], 0.5))
    )
    optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.0) for r in ranks]

    def step(number, taken=True):
        grads = [gradients(r.model, 100 * number + r.rank) for r in ranks]
        if bad and not taken:
            for grad in grads[1]:
                grad.as_strided((grad.numel(),), (1,))[5] = float("inf")
        given = [[g.clone().nan_to_num_(posinf=0.0) for g in grad] for grad in grads]
        together(world, ranks, grads, shuffle=number)
        if taken:
            for optimizer in optimizers:
                optimizer.step()
        return given

    for number in range(5):
        step(number)
    before = [residuals(r) for r in ranks]
    applied = [r.compression.works[0].prediction.applied.clone() for r in ranks]
    given = step(5, taken=False)
    for rank, was, old, grads in zip(ranks, before, applied, given, strict=True):
        rank.compression.discard_step()
        assert torch.allclose(rank.compression.works[0].prediction.applied, old, atol=1e-5)
        for (name, p), grad in zip(rank.model.named_parameters(), grads, strict=True):
            if p.dim() >= 2 and p.numel() >= 1024:
                want = was[name] + grad.double()
                torch.testing.assert_close(residuals(rank)[name], want, rtol=0, atol=1e-4)


def test_the_shipped_predictor_is_better_than_an_untrained_one():
    """On windows of a training run that it was not trained on."""
    windows = load_file(Path(__file__).parents[1] / "data" / "windows.safetensors")
    seen, following = windows["seen"].float(), windows["next"].float().clamp(-8.0, 8.0)

    def error(predictor):
        return float((predictor(seen) - following).detach().square().mean() / following.square().mean())

    torch.manual_seed(0)
    assert error(shipped(torch.device("cpu"))) < 0.99 < error(Predictor())


def test_the_shipped_predictor_is_small_and_predicts_almost_zero_from_zeros():
    from importlib import resources

    file = resources.files("hvd_compress").joinpath("weights", "predictor.safetensors")
    assert len(file.read_bytes()) < 100_000
    predictor = shipped(torch.device("cpu"))
    assert not any(p.requires_grad for p in predictor.parameters())
    assert predictor(torch.zeros(1, 6, 256)).abs().max() < 0.3
