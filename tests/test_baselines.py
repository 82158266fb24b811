"""The baselines against their papers, written down once more without any of the package's parts."""

from functools import partial

import pytest
import torch
from harness import gradients, mixed_model, random_steps, replicas, residuals, together

from hvd_compress import DGC, FFT, IWP, MIPD, MP2, QSGD, SlimDP, TernGrad, TopK
from hvd_compress.engine.bucket import make_buckets
from hvd_compress.selection.per_rank import SampledPerRank
from hvd_compress.selection.base import StepSeed


def wide(model):
    """The parameter most tests look at, and its number."""
    return next((i, n, p) for i, (n, p) in enumerate(model.named_parameters()) if n == "wide.weight")


class Oracle:
    """Top-k of one parameter with error feedback, and DGC: plain dense tensors."""

    def __init__(self, like, k, momentum=None):
        self.velocity, self.residual, self.k, self.momentum = (
            torch.zeros_like(like),
            torch.zeros_like(like),
            k,
            momentum,
        )

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
        (partial(DGC, density=1 / 50, sample=1.0), 0.9),
        (partial(DGC, density=1 / 50, sample=0.05, momentum=0.5), 0.5),
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


def test_dgc_sorts_exactly_when_its_guess_lets_too_few_through():
    """All that is large lies where no sample looks."""
    (bucket,) = make_buckets([("w", torch.nn.Parameter(torch.zeros(64, 128)))], 2**20)
    selection = SampledPerRank(bucket, [100], sample=0.01)
    selection.begin(StepSeed.draw(0, 0, 0, 1, 0), True)
    stride = 8192 // 82
    score = torch.rand(8192)
    score[selection.turn.phase % stride :: stride] += 5.0
    assert set(selection.largest(0, score, 100).tolist()) == set(score.topk(100).indices.tolist())


def test_dgc_clips_each_rank_before_the_velocity():
    world, ranks = replicas(4, partial(DGC, density=1.0, momentum=0.0, clip_norm=2.0, values="fp32-gather"))
    grads = [gradients(r.model, seed=r.rank, scale=10.0) for r in ranks]
    number, _, _ = wide(ranks[0].model)
    want = torch.stack([g[number] / g[number].norm() * (2.0 / 4**0.5) for g in grads]).mean(0)
    torch.testing.assert_close(together(world, ranks, grads)[0][number], want, rtol=1e-5, atol=1e-7)
    small = [[g * 1e-4 for g in gradients(r.model, seed=r.rank)] for r in ranks]
    want = torch.stack([g[number] for g in small]).mean(0)
    torch.testing.assert_close(together(world, ranks, small)[0][number], want, rtol=1e-5, atol=1e-9)


def mean_of_many(build, grads, times=300):
    """What a method makes of the same gradients, on average over its randomness, and one of the results."""
    world, ranks = replicas(len(grads), build)
    number, _, _ = wide(ranks[0].model)
    total = torch.zeros_like(grads[0][number])
    for _ in range(times):
        applied = together(world, ranks, [[g.clone() for g in grad] for grad in grads])[0][number]
        total += applied
    assert all(float(residual.abs().max()) == 0.0 for rank in ranks for residual in residuals(rank).values())
    return total / times, applied


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_qsgd_is_unbiased_and_sends_levels_of_its_norm(norm):
    grads = [gradients(mixed_model(), seed=1)]
    number, _, _ = wide(mixed_model())
    mean, applied = mean_of_many(partial(QSGD, bits=4, run=512, norm=norm), grads)
    runs = grads[0][number].flatten().split(512)
    for got, average, run in zip(applied.flatten().split(512), mean.flatten().split(512), runs, strict=True):
        length = run.norm() if norm == "l2" else run.abs().max()
        level = got / (length / 7)
        assert (level - level.round()).abs().max() < 1e-4
        # Rounding one value has a standard deviation of half a level at most.
        assert (average - run).abs().max() < 6 * 0.5 * float(length / 7) / 300**0.5


def test_terngrad_is_unbiased_and_sends_three_levels_of_a_shared_scale():
    grads = [gradients(mixed_model(), seed=i, scale=1.0 + i) for i in range(2)]
    number, _, _ = wide(mixed_model())
    mean, applied = mean_of_many(partial(TernGrad, clip=None), grads)
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
    # Its padding counts among the entries: 14147 of 14336.
    sigma = float(grads[0][number].square().sum() / 14336) ** 0.5
    assert float(applied.max()) == pytest.approx(2.5 * sigma, rel=1e-5)


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
def test_bytes_are_what_the_formulas_say(build, ranks, each):
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 512, bias=False)
    world, group = replicas(ranks, build, model=model)
    together(world, group, [gradients(model, seed=i) for i in range(ranks)])
    sent = group[0].compression.stats()["last"]["wire_bytes"]
    assert sent == pytest.approx(each * model.weight.numel(), rel=0.02)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (partial(TopK, values="lanes4"), "have to be gathered"),
        (partial(DGC, sample=0.0), "sample must lie in"),
        (partial(DGC, clip_norm=0.0), "clip_norm must be above 0"),
        (partial(QSGD, bits=1), "bits must lie in 2 to 8"),
        (partial(QSGD, norm="l1"), "norm must be l2 or max"),
        (partial(QSGD, run=0), "run must be at least 1"),
        (partial(TernGrad, clip=-1.0), "clip must be above 0"),
    ],
)
def test_wrong_arguments_are_refused(build, says):
    with pytest.raises(ValueError, match=says):
        replicas(1, build)


@pytest.mark.parametrize("kind", [TopK, DGC, SlimDP, IWP, FFT, MIPD])
def test_no_parameter_starves(kind):
    """Fewer slots than parameters: every one has a slot all the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 33, bias=False) for _ in range(10)))
    world, ranks = replicas(2, partial(kind, density=1 / 4096), model=model)
    assert len(ranks[0].compression.buckets) == 1
    random_steps(world, ranks, range(4))
    assert all(slots >= 1 for slots in ranks[0].compression._plans[0].selection.slots)


def test_dgc_may_have_nothing_to_send_of_a_parameter():
    (bucket,) = make_buckets([("w", torch.nn.Parameter(torch.zeros(64, 128)))], 2**20)
    selection = SampledPerRank(bucket, [1], sample=0.01)
    selection.begin(StepSeed.draw(0, 0, 0, 1, 0), True)
    assert selection.largest(0, torch.rand(8192), 0).numel() == 0


@pytest.mark.parametrize("build", [QSGD, TernGrad])
def test_a_step_that_failed_does_not_count_twice(build):
    world, ranks = replicas(1, build)
    ones = [torch.ones_like(p) for p in ranks[0].model.parameters()]
    number, _, parameter = wide(ranks[0].model)
    parameter.grad = ones[number].clone()
    ranks[0].compression.compress(parameter.grad)
    ranks[0].compression.reset()
    applied = together(world, ranks, [ones])[0][number]
    assert float(applied.mean()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    "build", [partial(MIPD, density=1.0), partial(SlimDP, density=1.0), partial(MP2, density=1 / 4, prediction=True)]
)
def test_a_step_taken_again_leaves_no_infinity_behind(build):
    world, ranks = replicas(2, partial(build, values="fp32"))
    random_steps(world, ranks, [0])
    for rank in ranks:
        # As after a failure in the same step: its number is used again.
        rank.compression._step -= 1
    random_steps(world, ranks, range(1, 4))
    for bucket in ranks[0].compression.buckets:
        assert all(bool(flat.isfinite().all()) for flat in bucket.state.values())


def test_a_state_knows_whether_it_remembers():
    _, (remembering,) = replicas(1, partial(QSGD, error_feedback=True))
    _, (forgetting,) = replicas(1, QSGD)
    with pytest.raises(ValueError, match="error feedback"):
        forgetting.compression.load_state_dict(remembering.compression.state_dict())


def test_terngrad_clips_every_rank_at_its_own():
    """A quiet rank's outlier must not pass by a loud rank's limit."""
    world, ranks = replicas(2, TernGrad)
    number, _, _ = wide(mixed_model())
    quiet, loud = gradients(mixed_model(), 1, scale=0.01), gradients(mixed_model(), 2, scale=0.0)
    quiet[number].view(-1)[7], loud[number].view(-1)[8] = 5.0, 1000.0
    limit, scale = (2.5 * float(g[number].square().sum() / 14336) ** 0.5 for g in (quiet, loud))
    times = sum(
        bool(together(world, ranks, [[g.clone() for g in grad] for grad in (quiet, loud)])[0][number].view(-1)[7])
        for _ in range(300)
    )
    # At random by its clipped magnitude: 300 * 0.12 / 21, not 300 * 5 / 21.
    assert 300 * limit / scale < 3 and times < 15
