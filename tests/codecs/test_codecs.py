"""Channels: quantization errors, equal means on all ranks, and bytes sent."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.codecs import Channel, Lanes, RangeFloat, codec
from hvd_compress.codecs.codebooks import DISTRIBUTIONS, codebook
from hvd_compress.codecs.coded_ring import CodedRing
from hvd_compress.codecs.floats import Plain
from hvd_compress.codecs.lanes import grid_step
from hvd_compress.engine import state

NAMES = ["fp32", "fp16", "lanes2", "lanes4", "lanes16", "lloyd1", "lloyd4", "lloyd8", "range4", "range10", "range16"]
NAMES += ["fp16-gather", "fp32-gather", "lloyd4-gather", "range10-gather"]
# Groups of very different sizes and scales; one is empty.
SLOTS = [0, 501, 37, 1200, 1]
SCALES = torch.cat([torch.full((n,), scale) for n, scale in zip(SLOTS, (1.0, 1e-3, 5.0, 0.1, 1e4), strict=True)])
COUNT = sum(SLOTS)


def drive(channel: Channel, world: ThreadWorld, rank: int, values: Tensor, step: int, bad: bool = False):
    """One exchange on one rank: (mean, quantization error, bytes sent)."""
    exchange = channel.average(values, torch.tensor([int(bad)], dtype=torch.int32), 1000 * step + rank)
    result, sent = None, 0.0
    for stage in itertools.count():
        try:
            request = exchange.send(result) if stage else next(exchange)
        except StopIteration as end:
            return *(tensor.clone() for tensor in end.value), sent
        sent += request.wire_bytes(world.size)
        result = world.collectives(rank).start(request, f"{step}.{stage}").result()


def averaged(name: str, ranks: int, steps: int, bad: int | None = None) -> list[dict[str, list]]:
    """Runs a channel on every rank. Per rank: the values, means, quantization errors and bytes sent of each step."""
    world = ThreadWorld(ranks)

    def body(rank: int) -> dict[str, list]:
        channel = codec(name).channel(len(SLOTS), ranks, rank, torch.device("cpu"))
        channel.set_group_sizes(SLOTS)
        generator = torch.Generator().manual_seed(rank)
        seen: dict[str, list] = {"values": [], "mean": [], "error": [], "bytes": []}
        for step in range(steps):
            values = torch.randn(COUNT, generator=generator) * SCALES
            mean, error, sent = drive(channel, world, rank, values, step, bad=step == bad and rank == 0)
            for key, value in (("values", values), ("mean", mean), ("error", error), ("bytes", sent)):
                seen[key].append(value)
        return seen

    return world.run(body)


def scaled_norm(tensor: Tensor) -> float:
    return float((tensor / SCALES).norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_errors_add_up(name, ranks):
    """Ranks * mean + the sum of errors = the sum of values. The mean has the same bits on every rank."""
    seen = averaged(name, ranks, steps=4)
    for step in range(4):
        means = [rank["mean"][step] for rank in seen]
        assert all(torch.equal(means[0], mean) for mean in means)
        sent = sum(rank["values"][step].double() for rank in seen)
        kept = ranks * means[0].double() + sum(rank["error"][step].double() for rank in seen)
        tolerance = 2e-2 if name == "fp16" else 1e-5  # the allreduce rounds to 16-bit floats
        torch.testing.assert_close(kept / SCALES, sent / SCALES, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["lloyd1", "lloyd4", "range10"])
def test_a_rank_does_not_round_its_own_values_of_the_part_that_it_averages(name):
    world, code = ThreadWorld(3), codec(name).code
    exact = CodedRing(code, 512, Plain(32))

    def body(rank: int) -> None:
        channel = exact.channel(len(SLOTS), 3, rank, torch.device("cpu"))
        channel.set_group_sizes(SLOTS)
        values = torch.randn(COUNT, generator=torch.Generator().manual_seed(rank)) * SCALES
        _, error, _ = drive(channel, world, rank, values, 0)
        own = torch.zeros(COUNT, dtype=torch.bool)
        own[channel.begin : channel.end] = True
        relative = error / SCALES
        assert relative[own].abs().max() < 1e-5 and relative[~own].norm() > 0.01

    world.run(body)


ERRORS = {"fp16": 1e-3, "lanes4": 0.25, "lanes16": 3e-3, "lloyd1": 1.0, "lloyd4": 0.2, "lloyd8": 0.03}
ERRORS |= {"range10": 0.05, "range16": 1e-2, "lloyd4-gather": 0.15, "range10-gather": 0.02, "fp16-gather": 1e-3}


@pytest.mark.parametrize(("name", "most"), ERRORS.items())
def test_the_mean_is_close(name, most):
    """The relative error of the average, with each group in units of its scale, once the scales are known."""
    seen = averaged(name, 4, steps=6)
    want = sum(rank["values"][-1] for rank in seen) / 4
    error = scaled_norm(seen[0]["mean"][-1] - want) / scaled_norm(want)
    assert most / 100 < error <= most, error


COSTS = {"fp32": 6.0, "fp16": 3.0, "lanes4": 1.5 * 64 / 10 / 8, "lanes2": 1.5 * 64 / 16 / 8, "lloyd1": 1.5 / 8}
COSTS |= {"lloyd4": 1.5 * 4 / 8, "range10": 1.5 * 10 / 8, "range10-gather": 3 * 10 / 8, "fp16-gather": 6.0}


@pytest.mark.parametrize(("name", "each"), COSTS.items())
def test_bytes_sent(name, each):
    """Bytes per value on 4 ranks, as in the table of codecs, and at most 24 bytes per group for scales."""
    sent = averaged(name, 4, steps=2)[0]["bytes"][1]
    assert 0 <= sent - each * COUNT <= 24 * len(SLOTS) + 60


@pytest.mark.parametrize("name", NAMES)
def test_invalid_rank(name):
    seen = averaged(name, 3, steps=3, bad=1)
    for rank in seen:
        assert rank["mean"][1].isnan().all()
        assert rank["mean"][2].isfinite().all(), "the next step is valid"


def test_stochastic_rounding_is_unbiased():
    errors = {}
    for stochastic in (True, False):
        channel = Lanes(3, stochastic).channel(1, 1, 0, torch.device("cpu"))
        channel.set_group_sizes([1000])
        world, values = ThreadWorld(1), torch.linspace(-1, 1, 1000)
        means = []
        for step in range(200):
            means.append(drive(channel, world, 0, values, step)[0])
        errors[stochastic] = (torch.stack(means).mean(0) - values).abs().max(), (means[-1] - values).norm()
    assert errors[True][0] < errors[False][0], "the average over draws is more accurate"
    assert errors[False][1] < errors[True][1]


def test_scales_follow_values_that_grow_and_shrink():
    """If values grow a thousandfold, they are clipped at first; the errors still add up."""
    for name in ("lanes4", "lloyd4", "range10"):
        channel = codec(name).channel(1, 1, 0, torch.device("cpu"))
        channel.set_group_sizes([5000])
        world, generator = ThreadWorld(1), torch.Generator().manual_seed(0)
        for step in range(105):
            scale = 1e-3 if step < 35 or step >= 70 else 1.0
            values = torch.randn(5000, generator=generator) * scale
            mean, error, _ = drive(channel, world, 0, values, step)
            torch.testing.assert_close(mean + error, values, rtol=1e-5, atol=1e-6)
            if step in (34, 69, 104):
                assert (mean - values).norm() < 0.3 * values.norm(), (name, step)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks_are_fixed_points(bits):
    """Every level is the mean of the values nearest to it, by numerical integration."""
    x = (torch.arange(-400_000, 400_000, dtype=torch.float64) + 0.5) / 20_000
    densities = {"gauss": torch.exp(-x * x / 2), "laplace": torch.exp(-x.abs() * math.sqrt(2))}
    for levels, distribution in zip(codebook(bits).double(), DISTRIBUTIONS, strict=True):
        assert torch.equal(levels, -levels.flip(0)) and bool((levels.diff() > 0).all())
        nearest = torch.searchsorted((levels[1:] + levels[:-1]) / 2, x)
        weight = densities[distribution]
        mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, nearest, weight)
        centre = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, nearest, weight * x) / mass
        torch.testing.assert_close(centre, levels, rtol=0, atol=2e-2 if bits > 6 else 2e-3)


def test_known_codebooks_and_grids():
    """Max's table of 1960, and values for the Laplacian."""
    torch.testing.assert_close(codebook(1)[:, 1], torch.tensor([0.7979, 0.7071]), rtol=0, atol=1e-4)
    torch.testing.assert_close(codebook(2)[0, 2:], torch.tensor([0.4528, 1.5104]), rtol=0, atol=1e-4)
    torch.testing.assert_close(codebook(2)[1, 2:], torch.tensor([0.4196, 1.8338]), rtol=0, atol=4e-4)
    # A uniform quantizer of 15 levels for a Gaussian has a step near 0.35.
    assert 0.3 < float(grid_step(7, False)[0]) < 0.4
    assert bool((grid_step(7, False) > grid_step(7, True)).all()), "stochastic rounding needs a finer grid"


def best_range_float(values, bits):
    """The format with the least squared error on ``values``."""

    def squared_error(mantissa):
        code = RangeFloat(bits, mantissa)
        codes, error = torch.empty(code.size(len(values)), dtype=torch.uint8), torch.empty_like(values)
        edges = torch.tensor([0, len(values)])
        code.encode(values, values.abs().max().view(1), edges[:1], edges, codes, error)
        return float(error.double().square().sum())

    return RangeFloat(bits, min(range(RangeFloat.least_mantissa(bits), bits), key=squared_error))


def test_default_format_of_range_floats():
    torch.manual_seed(0)
    values = torch.distributions.StudentT(3.0).sample((20_000,))
    for bits in (8, 10):
        best = best_range_float(values, bits)
        assert abs(best.mantissa - RangeFloat(bits).mantissa) <= 1
        spread = best_range_float(values.sign() * values.abs() ** 4, bits)
        assert spread.mantissa <= best.mantissa, "wider values need more exponents"


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_stays_bounded(name):
    """With error feedback over 200 steps, neither errors nor scales diverge."""
    ranks, world = 3, ThreadWorld(3)

    def body(rank: int) -> list[float]:
        channel = codec(name).channel(1, ranks, rank, torch.device("cpu"))
        channel.set_group_sizes([400])
        generator, kept, norms = torch.Generator().manual_seed(rank), torch.zeros(400), []
        for step in range(200):
            values = torch.randn(400, generator=generator) + kept
            _, kept, _ = drive(channel, world, rank, values, step)
            norms.append(float(kept.norm() / 20))
        return norms

    for norms in world.run(body):
        # 0.05 for values that are clipped because they are larger than all before.
        assert max(norms[100:]) < 2 * max(norms[20:60]) + 0.05, (norms[20:60:10], norms[100::20])
        assert norms[-1] < 12


@pytest.mark.parametrize(("what", "value"), [("sent", -1.0), ("sent", math.nan), ("sent", math.inf), ("kind", 2)])
def test_a_damaged_state_is_refused(what, value):
    channel = codec("lanes4").channel(3, 2, 0, torch.device("cpu"))
    before = state.save(channel.state())
    state.load(channel.state(), before)
    bad = {**before, "known": True, what: before[what].clone()}
    bad[what][1] = value
    with pytest.raises(ValueError, match=rf"scales.{what}: must (be finite|lie in)"):
        state.check(channel.state(), bad, "scales")
    with pytest.raises(ValueError, match=rf"scales.{what}: must be a .* tensor of shape \(3,\)"):
        state.check(channel.state(), {**before, what: before[what][:2]}, "scales")
    assert state.same(state.save(channel.state()), before)
