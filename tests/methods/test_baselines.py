"""TopK, DGC, QSGD and TernGrad against independent implementations of their papers."""

from functools import partial

import pytest
import torch
from harness import replicas, residuals, together
from models import gradients, mixed_model

from hvd_compress import DGC, QSGD, TernGrad, TopK


def wide(model):
    """The number, name and parameter that most of these tests use."""
    return next((i, n, p) for i, (n, p) in enumerate(model.named_parameters()) if n == "wide.weight")


class Oracle:
    """Top-k of one parameter with error feedback, and DGC, with dense tensors."""

    def __init__(self, like, k, momentum=None):
        self.velocity, self.residual = torch.zeros_like(like), torch.zeros_like(like)
        self.k, self.momentum = k, momentum

    def sends(self, grad):
        if self.momentum is not None:
            self.velocity = self.momentum * self.velocity + grad
            grad = self.velocity
        self.residual = self.residual + grad
        mask = torch.zeros(self.residual.numel(), dtype=torch.bool)
        mask[self.residual.abs().flatten().topk(self.k).indices] = True
        mask = mask.view_as(self.residual)
        sent = torch.where(mask, self.residual, 0.0)
        self.residual = torch.where(mask, 0.0, self.residual)
        self.velocity = torch.where(mask, 0.0, self.velocity)
        return sent


@pytest.mark.parametrize(
    ("build", "momentum"),
    [
        (partial(TopK, density=1 / 50), None),
        (partial(DGC, density=1 / 50), 0.9),
        (partial(DGC, density=1 / 50, momentum=0.5), 0.5),
    ],
)
def test_topk_and_dgc_follow_their_papers(build, momentum):
    # One bucket for each parameter: k is then a share of that parameter alone.
    world, ranks = replicas(3, partial(build, bucket_mb=1e-6))
    number, name, parameter = wide(ranks[0].model)
    k = round(parameter.numel() / 50)
    oracles = [Oracle(parameter.detach(), k, momentum) for _ in ranks]
    for step in range(6):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        want = torch.stack([o.sends(g[number]) for o, g in zip(oracles, grads, strict=True)]).mean(0)
        applied = together(world, ranks, grads, shuffle=step)
        torch.testing.assert_close(applied[0][number], want, rtol=1e-6, atol=1e-6)
        for rank, oracle in zip(ranks, oracles, strict=True):
            torch.testing.assert_close(residuals(rank)[name].float(), oracle.residual, rtol=1e-6, atol=1e-6)


def mean_of_many(build, grads, times=300):
    """The average of a method's results for the same gradients over many draws, and one of the results."""
    world, ranks = replicas(len(grads), build)
    number, _, _ = wide(ranks[0].model)
    total = torch.zeros_like(grads[0][number])
    for _ in range(times):
        applied = together(world, ranks, [[g.clone() for g in grad] for grad in grads])[0][number]
        total += applied
    assert all(float(residual.abs().max()) == 0.0 for rank in ranks for residual in residuals(rank).values())
    return total / times, applied


def test_qsgd_is_unbiased_and_sends_levels_of_its_norm():
    grads = [gradients(mixed_model(), seed=1)]
    number, _, _ = wide(mixed_model())
    mean, applied = mean_of_many(partial(QSGD, bits=4, run=512), grads)
    runs = grads[0][number].flatten().split(512)
    for got, average, run in zip(applied.flatten().split(512), mean.flatten().split(512), runs, strict=True):
        length = run.norm()
        level = got / (length / 7)
        assert (level - level.round()).abs().max() < 1e-4
        # Rounding one value has a standard deviation of half a level at most.
        assert (average - run).abs().max() < 6 * 0.5 * float(length / 7) / 300**0.5


def test_terngrad_is_unbiased_and_sends_three_levels_of_a_shared_scale():
    grads = [gradients(mixed_model(), seed=i, scale=1.0 + i) for i in range(2)]
    number, _, _ = wide(mixed_model())
    mean, applied = mean_of_many(partial(TernGrad, clip=1e6), grads)
    scale = max(float(g[number].abs().max()) for g in grads)
    level = applied / (scale / 2)
    assert set(level.round().unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert (level - level.round()).abs().max() < 1e-4
    want = torch.stack([g[number] for g in grads]).mean(0)
    assert (mean - want).abs().max() < 6 * 0.5 * scale / 300**0.5


def test_terngrad_clips_at_a_number_of_standard_deviations():
    grads = [gradients(mixed_model(), seed=3)]
    number, _, _ = wide(mixed_model())
    _, applied = mean_of_many(TernGrad, grads, times=1)
    # The standard deviation includes the padding: 14147 of 14336 entries.
    sigma = float(grads[0][number].square().sum() / 14336) ** 0.5
    assert float(applied.max()) == pytest.approx(2.5 * sigma, rel=1e-5)


def test_terngrad_clips_every_rank_at_its_own_standard_deviation():
    """Not at that of a rank with larger gradients."""
    world, ranks = replicas(2, TernGrad)
    number, _, _ = wide(mixed_model())
    small, large = gradients(mixed_model(), 1, scale=0.01), gradients(mixed_model(), 2, scale=0.0)
    small[number].view(-1)[7], large[number].view(-1)[8] = 5.0, 1000.0
    limit, scale = (2.5 * float(g[number].square().sum() / 14336) ** 0.5 for g in (small, large))
    times = sum(
        bool(together(world, ranks, [[g.clone() for g in grad] for grad in (small, large)])[0][number].view(-1)[7])
        for _ in range(300)
    )
    # Its chance is its clipped magnitude over the scale: 300 * 0.12 / 21, not 300 * 5 / 21.
    assert 300 * limit / scale < 3 and times < 15


@pytest.mark.parametrize(
    ("build", "ranks", "each"),
    [
        # Bytes an entry: (N - 1) density (4 + 4); (N - 1) bits / 8 and the norms; 2 (N - 1) / N of a lane.
        (partial(TopK, density=1 / 64), 3, 2 * 8 / 64),
        (partial(TopK, density=1 / 64, values="fp16-gather"), 3, 2 * 6 / 64),
        (partial(QSGD, bits=4), 3, 2 * (0.5 + 4 / 512)),
        (partial(QSGD, bits=2), 2, 1 * (0.25 + 4 / 512)),
        (TernGrad, 4, 2 * 0.75 * 0.5),
        (TernGrad, 2, 2 * 0.5 * 3 / 8),
    ],
)
def test_bytes_sent_follow_the_formulas(build, ranks, each):
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512, bias=False)
    world, group = replicas(ranks, build, model=model)
    together(world, group, [gradients(model, seed=i) for i in range(ranks)])
    sent = group[0].compression.stats()["last"]["wire_bytes"]
    assert sent == pytest.approx(each * model.weight.numel(), rel=0.02)
