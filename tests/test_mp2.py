"""MP2: lot and rotation, the prediction and its gate, and replicas that went apart."""

from functools import partial
from pathlib import Path

import pytest
import torch
from harness import gradients, mixed_model, random_steps, replicas, residuals, together
from safetensors.torch import load_file

from hvd_compress import MP2
from hvd_compress.methods.predictor import Predictor, shipped

in_turn = partial(MP2, choice="rotation")


class Constant(Predictor):
    """Predicts the same for every entry."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, windows):
        return torch.full_like(windows[:, 0], self.value)


class Last(Predictor):
    """Predicts what arrived last."""

    def forward(self, windows):
        return windows[:, 3].sinh()


def constant_gradients(model, seed):
    """Large and the same in every step."""
    return [g + 3.0 for g in gradients(model, seed)]


def test_everything_has_its_turn_in_a_period():
    world, ranks = replicas(2, partial(in_turn, density=1 / 9, values="fp32"))
    seen = [torch.zeros_like(p) for p in ranks[0].model.parameters()]
    for step in range(9):
        grads = [[torch.ones_like(p) for p in r.model.parameters()] for r in ranks]
        applied = together(world, ranks, grads, shuffle=step)
        for total, (name, p), got in zip(seen, mixed_model().named_parameters(), applied[0], strict=True):
            if p.dim() >= 2 and p.numel() >= 1024:
                assert abs(int((got != 0).sum()) - p.numel() / 9) < 1, name
                assert set(got[got != 0].tolist()) <= {float(step + 1)}, "all that was waiting arrives"
                total += got != 0
    for total, p in zip(seen, mixed_model().parameters(), strict=True):
        if p.dim() >= 2 and p.numel() >= 1024:
            assert bool((total == 1).all())


def test_what_was_large_is_sent_often_and_everything_now_and_then():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    world, ranks = replicas(2, partial(MP2, density=32 / 256, values="fp32"), model=model)
    loud = torch.ones(64, 64)
    loud.view(16, 256)[:, 5:10] = 20.0
    times = torch.zeros(64, 64)
    for step in range(100):
        grads = [[loud * gradients(r.model, 1000 * step + r.rank)[0]] for r in ranks]
        applied = together(world, ranks, grads, shuffle=step)
        assert torch.equal(applied[0][0], applied[1][0])
        times += applied[0][0] != 0
    assert abs(float(times.mean()) - 100 / 8) < 0.1
    often = times.view(16, 256)[:, 5:10]
    assert float(often.mean()) > 3 * float(times.mean()) and float(times.min()) >= 1


def test_the_traffic_is_a_ninth():
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512, bias=False)
    world, ranks = replicas(4, partial(MP2, values="fp32"), model=model)
    random_steps(world, ranks, range(3))
    assert ranks[0].compression.stats()["last"]["wire_ratio"] == pytest.approx(9.0, rel=0.01)


def test_a_good_prediction_opens_the_gate_and_arrives_early():
    """The same gradient in every step: after one period the last value is the next one."""
    world, ranks = replicas(2, partial(in_turn, prediction=True, density=1 / 4, values="fp32", predictor=Last()))
    grads = [constant_gradients(r.model, r.rank) for r in ranks]
    number = [n for n, _ in ranks[0].model.named_parameters()].index("wide.weight")
    mean = torch.stack([g[number] for g in grads]).mean(0)
    for step in range(16):
        applied = together(world, ranks, [[g.clone() for g in grad] for grad in grads], shuffle=step)
    assert all(ranks[0].compression.open_layers().values())
    torch.testing.assert_close(applied[0][number], mean, rtol=1e-3, atol=1e-3)
    # A rank holds back only how it differs from the mean, for a period at most.
    for rank, grad in zip(ranks, grads, strict=True):
        assert residuals(rank)["wide.weight"].abs().max() <= 4 * (grad[number] - mean).abs().max() + 1e-2


def test_a_bad_prediction_closes_the_gate_and_is_paid_back():
    world, ranks = replicas(
        2, partial(in_turn, prediction=True, density=1 / 4, values="fp32", predictor=Constant(-1.0))
    )
    for step in range(40):
        grads = [constant_gradients(r.model, 100 * step + r.rank) for r in ranks]
        applied = together(world, ranks, grads, shuffle=step)
    assert not any(ranks[0].compression.open_layers().values())
    compressed = [g for (_, p), g in zip(mixed_model().named_parameters(), applied[0], strict=True) if p.dim() > 1]
    assert all(float((g == 0).float().mean()) > 0.7 for g in compressed[1:]), "nothing is guessed any more"


@pytest.mark.parametrize("choice", ["significance", "rotation"])
def test_predictions_are_bit_equal_over_1000_steps(choice):
    build = partial(MP2, choice=choice, prediction=True, density=1 / 5, gate=-1.0, momentum=0.9)
    world, ranks = replicas(3, build, model=_toy())
    optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.01) for r in ranks]

    def train(i):
        generator = torch.Generator().manual_seed(i)
        for step in range(1000):
            x = torch.randn(8, 32, generator=generator)
            loss = (ranks[i].model(x) - x[:, :8].sin()).square().mean()
            grads = torch.autograd.grad(loss, list(ranks[i].model.parameters()))
            ranks[i].exchange([g.clone() for g in grads], shuffle=step)
            optimizers[i].step()
        return float(loss.detach())

    assert max(world.run(train)) < 0.1, "training must have worked"
    first, *others = (rank.compression.buckets[0].state for rank in ranks)
    assert float(first["guess"].abs().sum()) > 0.0
    for other in others:
        for name in ("arrived", "smoothed", "last_sent", "guess", "applied"):
            assert torch.equal(first[name], other[name]), name


def _toy():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 8)
    )


@pytest.mark.parametrize("noise", [1e-6, 1e-2, 0.5])
@pytest.mark.parametrize("choice", ["significance", "rotation"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rank_that_went_astray_is_found_and_repaired(momentum, choice, noise):
    """All that was put in is in rank 0's weights, which are everybody's then, or still waits: but for what was sent
    while they differed, with a wrong prediction in it."""
    build = partial(MP2, choice=choice, prediction=True, density=1 / 3, gate=-1.0, check_interval=10, values="fp32")
    world, ranks = replicas(3, build, model=_toy())
    optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.01, momentum=momentum) for r in ranks]
    names = [name for name, p in _toy().named_parameters() if p.dim() > 1 and p.numel() >= 1024]
    given, taken = ({name: 0.0 for name in names} for _ in range(2))

    def add(total, grads):
        for (name, _), g in zip(ranks[0].model.named_parameters(), grads, strict=True):
            if name in total:
                total[name] = total[name] + g.double()

    def train(first, last):
        for step in range(first, last):
            grads = [gradients(r.model, 100 * step + r.rank) for r in ranks]
            for grad in grads:
                add(given, grad)
            add(taken, together(world, ranks, grads, shuffle=step)[0])
            for optimizer in optimizers:
                optimizer.step()

    def equal():
        ours = [[*r.model.parameters()] for r in ranks]
        return all(torch.equal(a, b) for other in ours[1:] for a, b in zip(ours[0], other, strict=True))

    def check_books(but):
        for name in names:
            waits = sum(residuals(r)[name] for r in ranks)
            off = (waits - (given[name] - 3 * taken[name])).abs()
            assert float(off.masked_fill(but[name], 0.0).max()) < 2e-3

    def sent_last():
        bucket, plan = ranks[0].compression.buckets[0], ranks[0].compression._plans[0]
        mask = torch.zeros_like(bucket.residual)
        plan.selection.write(mask, torch.ones_like(plan.selection.values))
        shapes = dict(ranks[0].model.named_parameters())
        return {s.name: s.of(mask)[: s.numel].view(shapes[s.name].shape) > 0 for s in bucket.segments}

    train(0, 18)
    assert equal()
    check_books(but={name: torch.tensor(False) for name in names})
    for rank, sign in ((1, 1.0), (2, -1.0)):
        guess = ranks[rank].compression.buckets[0].state["guess"]
        guess += sign * noise * torch.randn(guess.shape, generator=torch.Generator().manual_seed(rank))
    train(18, 19)
    assert not equal()
    wrong = sent_last()
    with pytest.warns(UserWarning, match="the ranks' predictions differ"):
        train(19, 20)
    assert equal()
    check_books(but=wrong)
    train(20, 45)
    assert equal()
    check_books(but=wrong)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "infinity"])
def test_a_skipped_step_takes_its_predictions_back(bad):
    """With Horovod's GradScaler protocol: averaged, but no optimizer steps."""
    world, ranks = replicas(
        2,
        partial(MP2, prediction=True, density=1 / 3, gate=-1.0, values="fp32", predictor=Constant(0.5)),
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
    applied = [r.compression.buckets[0].state["applied"].clone() for r in ranks]
    given = step(5, taken=False)
    for rank, was, old, grads in zip(ranks, before, applied, given, strict=True):
        rank.compression.state_dict()  # a step that was not taken is undone here
        assert torch.allclose(rank.compression.buckets[0].state["applied"], old, atol=1e-5)
        for (name, p), grad in zip(rank.model.named_parameters(), grads, strict=True):
            if p.dim() >= 2 and p.numel() >= 1024:
                want = was[name] + grad.double()
                torch.testing.assert_close(residuals(rank)[name], want, rtol=0, atol=1e-4)


def test_the_shipped_predictor_knows_something():
    """Of windows of a training that it has not learnt from; an untrained one is worth nothing."""
    windows = load_file(Path(__file__).parent / "data" / "windows.safetensors")
    seen, following = windows["seen"].float(), windows["next"].float().clamp(-8.0, 8.0)

    def error(predictor):
        return float((predictor(seen) - following).detach().square().mean() / following.square().mean())

    torch.manual_seed(0)
    assert error(shipped(torch.device("cpu"))) < 0.99 < error(Predictor())


def test_the_shipped_predictor_is_small_and_says_nothing_of_nothing():
    from importlib import resources

    file = resources.files("hvd_compress").joinpath("weights", "predictor.safetensors")
    assert len(file.read_bytes()) < 100_000
    predictor = shipped(torch.device("cpu"))
    assert not any(p.requires_grad for p in predictor.parameters())
    assert predictor(torch.zeros(1, 6, 256)).abs().max() < 0.3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"density": 0.0}, "density must"),
        ({"density": 0.3, "choice": "rotation"}, "takes a density of 1 / n"),
        ({"choice": "importance"}, "choice must be one of"),
        ({"floor": 0.0}, "floor must be above 0"),
        ({"gate": 2.0}, "gate must lie in"),
        ({"smoothing": 1.0}, "smoothing must lie in"),
        ({"check_interval": -1}, "check_interval must not be negative"),
    ],
)
def test_wrong_arguments_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        replicas(1, partial(MP2, **options))
