"""Local steps whose averages have the length of the ranks' own differences."""

import math
from functools import partial

import pytest
import torch
from harness import set_collectives
from local_workers import DELAYED, IN_TURN, Worker, mean, on_both_hosts, resumes_bit_exactly, workers
from methods import EACH, METHODS, SMALL
from models import equal, gradients, mixed_model

from hvd_compress import DeMo, NoCompression, Quantized, TopK, recipes
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.local.lengths import sum_of_squares

#: Methods that send all entries.
COMPLETE = [name for name in METHODS if name.startswith(("quantized", "qsgd", "terngrad", "powersgd", "none"))]
PLAIN = partial(torch.optim.SGD, lr=1.0)
RESTORED = dict(build=NoCompression, period=1, optimizer=PLAIN, restore_length=True)
#: Tests of equal differences.
alike = pytest.mark.filterwarnings("ignore:.*all ranks have the same gradients")


def differences(seed, scale=1.0):
    return [grad * scale for grad in gradients(mixed_model(), seed)]


def exchange(worker, moved):
    """A local step that moves the weights by these tensors, and its exchange. Returns how far the common weights have
    come."""
    before = [w.double() for w in (worker.common() if worker.local._rounds._taken else worker.weights())]
    for p, difference in zip(worker.model.parameters(), moved, strict=True):
        p.grad = -difference
    worker.optimizers[0].step()
    worker.local.step()
    return [common.double() - b for common, b in zip(worker.common(), before, strict=True)]


def moves(by_rank, **options):
    """How far the common weights come in one exchange of the ranks' differences."""
    world, group = workers(len(by_rank), **{**RESTORED, **options})
    results = world.run(lambda i: exchange(group[i], by_rank[i]))
    assert all(equal(results[0], other) for other in results)
    return results[0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_mean_has_the_root_mean_square_length_of_the_differences(size):
    """Which have a third of their squares in common, and are of different lengths."""
    common = differences(100)
    own = [[c + d * (0.5 + i) for c, d in zip(common, differences(i), strict=True)] for i in range(size)]
    for move, average, *each in zip(moves(own), mean(own), *own, strict=True):
        length = torch.stack([d.double().norm() for d in each]).square().mean().sqrt()
        assert length > 1.05 * average.norm()
        torch.testing.assert_close(move, average * length / average.norm(), rtol=2e-4, atol=1e-5)


@alike
def test_equal_differences_are_not_scaled():
    one = differences(0)
    for move, difference in zip(moves([one] * 4), one, strict=True):
        torch.testing.assert_close(move, difference.double(), rtol=1e-5, atol=1e-6)


def test_the_factor_is_at_most_the_square_root_of_the_ranks():
    """Of now: an elastic job grows from two to three. Their differences cancel each other up to a small part."""
    world, group = workers(2, **RESTORED)
    one, two, small = differences(0), differences(1), differences(2, 1e-2)
    moved = world.run(lambda i: exchange(group[i], [[d, s - d][i] for d, s in zip(one, small, strict=True)]))
    for move, part in zip(moved[0], small, strict=True):
        torch.testing.assert_close(move, part.double() / 2 * math.sqrt(2), rtol=1e-3, atol=2e-6)
    anew = ThreadWorld(3)
    for rank in range(2):
        set_collectives(group[rank].compression, anew.collectives(rank))
    group.append(Worker(anew, 2, model=group[0].model, **RESTORED))
    three = [[a, b, s - a - b] for a, b, s in zip(one, two, small, strict=True)]
    moved = anew.run(lambda i: exchange(group[i], [each[i] for each in three]))
    for move, part in zip(moved[0], small, strict=True):
        torch.testing.assert_close(move, part.double() / 3 * math.sqrt(3), rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize("build", [NoCompression, Quantized])
@alike
def test_differences_of_zero_move_nothing(build):
    assert not any(move.any() for move in moves([differences(0, 0.0)] * 3, build=build, unsent="buffer"))


@on_both_hosts
def test_what_is_owed_is_not_scaled(ordered):
    """Residuals are those of plain averages, and an exchange in which no rank has moved sends them as they are."""
    options = {**RESTORED, "build": Quantized, "unsent": "buffer"}
    world, group = workers(2, ordered=ordered, **options)
    also, plain = workers(2, ordered=ordered, **{**options, "restore_length": False})
    none = differences(0, 0.0)
    for scaled, moved in ((True, [differences(0), differences(1)]), (False, [none, none])):
        (ours, _), (theirs, _) = (
            w.run(lambda i, g=g, moved=moved: exchange(g[i], moved[i])) for w, g in ((world, group), (also, plain))
        )
        for name, one, other in zip([n for n, _ in mixed_model().named_parameters()], ours, theirs, strict=True):
            if other.any():
                factor = one.norm() / other.norm()
                assert factor > 1.2 if scaled else factor == pytest.approx(1, abs=1e-4), name
                torch.testing.assert_close(one, other * factor, rtol=1e-3, atol=1e-5)
            if name in ("conv.weight", "wide.weight", "deep.weight"):
                residuals = [rank.compression.residual(name) for rank in (*group, *plain)]
                assert residuals[0].any()
                # The weights of which the differences of zero are have other rounding errors.
                torch.testing.assert_close(residuals[:2], residuals[2:], rtol=0, atol=0 if scaled else 1e-5)


@pytest.mark.alternate("mode")
@pytest.mark.parametrize("mode", [{}, IN_TURN, DELAYED], ids=["at once", "fragments", "delayed"])
@pytest.mark.parametrize("name", [one for one in EACH if one.values[0] in COMPLETE])
def test_ranks_and_hosts_have_the_same_bits(name, mode):
    options = dict(build=partial(METHODS[name], **SMALL), unsent="buffer", **mode)
    if name.startswith("none"):
        options["build"] = METHODS[name]
    results = []
    for ordered in (False, True):
        world, group = workers(3, ordered=ordered, restore_length=True, **options)
        world.run(lambda i, group=group: group[i].train(8))
        assert equal(group[0].common(), group[1].common()) and equal(group[0].common(), group[2].common())
        results.append(group[0].common())
    assert equal(*results)
    world, group = workers(3, **options)
    world.run(lambda i: group[i].train(8))
    assert not equal(results[0], group[0].common())


@pytest.mark.parametrize("delay", [0, 1])
def test_all_ranks_of_nodes_count(delay):
    world, model = ThreadWorld(4, ordered=True), mixed_model()
    options = dict(RESTORED, build=partial(Quantized, bits=8, nodes=2), unsent="buffer", delay=delay)
    group = world.run(lambda i: Worker(world, i, model=model, **options))
    own = [differences(i) for i in range(4)]
    moved = world.run(lambda i: exchange(group[i], own[i]))
    if delay:  # a step of nothing, in which the averages arrive
        moved = world.run(lambda i: exchange(group[i], differences(0, 0.0)))
    for move, average in zip(moved[0], mean(own), strict=True):
        assert float((move * average).sum()) == pytest.approx(2 * float(average.square().sum()), rel=0.15)
    assert all(equal(group[0].common(), other.common()) for other in group)


@pytest.mark.parametrize("mode", [{"period": 3}, DELAYED], ids=["at once", "delayed"])
def test_training_resumes_bit_exactly(mode):
    resumes_bit_exactly(dict(build=partial(Quantized, **SMALL), unsent="buffer", restore_length=True, **mode))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("build", [NoCompression, Quantized])
def test_a_length_that_is_not_finite_scales_nothing(build, value):
    """The tensor has the factor 1, and others have their own."""
    own = [differences(0), differences(1)]
    own[1][6].view(-1)[30] = value
    results = [moves(own, build=build, unsent="buffer", restore_length=flag) for flag in (True, False)]
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        assert one.isfinite().all()
        if number == 6:
            assert torch.equal(one, other)
        elif other.any():
            assert one.norm() > 1.2 * other.norm()


@pytest.mark.parametrize("fragments", [1, 2])
def test_eight_bytes_a_tensor_are_counted(fragments):
    sent = []
    for restore_length in (True, False):
        options = dict(build=partial(Quantized, **SMALL), unsent="buffer", period=2, fragments=fragments)
        world, group = workers(2, restore_length=restore_length, **options)
        world.run(lambda i, group=group: group[i].train(2))
        assert group[0].compression.stats()["steps"] == fragments
        sent.append(group[0].compression.stats()["total"]["dense_bytes"])
        sent.append(group[0].compression.stats()["total"]["wire_bytes"])
    assert sent[0] == sent[2], "the statistics' dense training"
    assert sent[1] - sent[3] == 8 * len([*mixed_model().parameters()]), "2 (N - 1) / N times eight"


def test_squares_are_added_in_one_order():
    """As the operators' specification has it for one group, whatever the memory's order."""
    values = differences(0)[6][:3].t()
    sums = [0.0] * 32
    for i, value in enumerate(values.flatten().tolist()):
        sums[i % 32] += value**2
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    assert 64 < values.numel() <= 8192 and sum_of_squares(values) == sums[0]
    assert sum_of_squares(torch.tensor(2.0**-100)) == 2.0**-200 and sum_of_squares(torch.empty(0)) == 0.0


def test_compressors_of_few_entries_are_refused():
    for build in (TopK, partial(DeMo, sign=False)):
        with pytest.raises(ValueError, match=r"sends few entries, .* restore_length=True goes with compressors"):
            workers(1, build=build, unsent="buffer", restore_length=True)
    with pytest.raises(TypeError, match=r"restore_length must be .* got 'ranks'"):
        workers(1, build=Quantized, restore_length="ranks")


def test_the_recipe_passes_it_on():
    model, collectives = mixed_model(), ThreadWorld(1).collectives(0)
    for given, restored in (({}, True), ({"restore_length": True}, True), ({"restore_length": False}, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = recipes.low_bit(model, optimizer, 3, collectives=collectives, **given)
        assert local._rounds._settings.restore_length is restored
        del local
