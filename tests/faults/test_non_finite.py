"""A gradient that is not finite, or so large that sums and squares overflow, in one step of a training in threads.

The rule: it never enters a state. All ranks see averages that are not finite in that step if a rank's gradient was not,
and finite ones in the next. From 2**64 on, where the square overflows float32, a gradient counts as infinite.
"""

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from harness import HOSTS, Rank, replicas, residuals, together
from methods import METHODS, TRAINED, WHOLE, WITHOUT_RESIDUAL
from models import equal, gradients, mixed_model
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from hvd_compress import IWP
from hvd_compress.reference import OVERFLOW

VALUES = (math.nan, math.inf, -math.inf, 1e38, 3e38, -1e38, 65504.0, 1e-45)
#: Steps before the attack, and after it.
BEFORE, AFTER = 3, 5


@dataclass(frozen=True)
class Attack:
    """``value`` replaces a gradient's entries in one step.

    ``place``: "compressed" or "dense", the tensor. ``everywhere``: on all ranks, or only on the last. ``whole``: all
    entries, or one.
    """

    method: str
    value: float
    place: str = "compressed"
    everywhere: bool = False
    whole: bool = False
    momentum: float = 0.0
    dtype: torch.dtype = torch.float32
    host: str = "horovod"

    def __str__(self) -> str:
        ranks, entries = "all ranks" if self.everywhere else "one rank", "all entries" if self.whole else "one entry"
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.method} {self.value:g} {self.place} {ranks} {entries} m={self.momentum:g} {kind} {self.host}"


@dataclass
class Outcome:
    """What went wrong, and how many steps after the attack averages were still not finite (``late``) or above 100, with
    gradients of size 1 (``draining``)."""

    problems: list[str] = field(default_factory=list)
    late: int = 0
    draining: int = 0


def small_model() -> torch.nn.Module:
    """Two compressed tensors, one with padding, each in a bucket of its own, and a bias."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.wide = torch.nn.Linear(64, 40)
    model.deep = torch.nn.Linear(33, 40, bias=False)
    return model


def has_momentum(method: str) -> bool:
    return hasattr(METHODS[method].func, "take_momentum")


def run(attack: Attack, after: int = AFTER, ranks: int = 2) -> Outcome:
    """A few steps, of which one is attacked, and ``after`` more."""
    outcome = Outcome()
    options = {"momentum": attack.momentum} if has_momentum(attack.method) else {}
    build = partial(METHODS[attack.method], bucket_mb=0.011, **options)
    world, each = replicas(ranks, build, model=small_model().to(attack.dtype), host=attack.host)
    assert len(each[0].compression.buckets) == (0 if attack.method in WHOLE else 2)
    number = 0 if attack.place == "compressed" else 1
    given = [torch.zeros(p.shape, dtype=torch.float64) for p in each[0].model.parameters()]
    taken = [torch.zeros_like(total) for total in given]
    infinite = not abs(attack.value) < OVERFLOW
    for step in range(BEFORE + 1 + after):
        grads = [gradients(r.model, seed=100 * step + r.rank) for r in each]
        if step == BEFORE:
            for grad in grads if attack.everywhere else grads[-1:]:
                flat = grad[number].view(-1)
                flat[:] = attack.value if attack.whole else flat
                flat[7] = attack.value
        for total, *own in zip(given, *grads, strict=True):
            for grad in own:
                total += torch.where(grad.double().abs() < OVERFLOW, grad.double(), 0.0)
        averages = together(world, each, grads, shuffle=step)
        if any(not same(a, b) for other in averages[1:] for a, b in zip(averages[0], other, strict=True)):
            outcome.problems.append("ranks differ")
        valid = [average.isfinite().all() for average in averages[0]]
        for total, average, applied in zip(taken, averages[0], valid, strict=True):
            total += ranks * torch.where(applied, average.double(), 0.0)
        if step == BEFORE and not math.isfinite(attack.value) and valid[number]:
            outcome.problems.append("not seen")
        if step > BEFORE:
            outcome.late = outcome.late if all(valid) else step - BEFORE
            largest = max(float(average.float().abs().nan_to_num(nan=0.0).max()) for average in averages[0])
            outcome.draining = step - BEFORE if largest > 100.0 else outcome.draining
        if step >= BEFORE:
            bad = {path for r in each for path, t in tensors(r.compression.state_dict()) if not t.isfinite().all()}
            if bad and not any(p.startswith("state") for p in outcome.problems):
                outcome.problems.append(f"state {sorted(bad)[0]}")
    if outcome.late:
        outcome.problems.append(f"averages not finite {outcome.late} steps later")
    if infinite and outcome.draining:
        outcome.problems.append(f"averages above 100 {outcome.draining} steps later")
    if attack.momentum == 0.0 and attack.method not in WITHOUT_RESIDUAL:
        outcome.problems.extend(lost(attack, each, given, taken))
    return outcome


def lost(attack: Attack, each: list[Rank], given: list[Tensor], taken: list[Tensor]) -> Iterator[str]:
    """Whether anything finite was neither applied nor is in a residual."""
    for position, (name, parameter) in enumerate(each[0].model.named_parameters()):
        if attack.place == "dense" and position == 1:
            continue  # an uncompressed gradient that is not finite is seen by all ranks and then gone
        if parameter.dtype != torch.float32:
            continue
        held = sum(residuals(r)[name] for r in each)
        difference = (given[position] - taken[position] - held).abs()
        rounds = METHODS[attack.method].keywords.get("values" if parameter.dim() > 1 else "dense_values") == "fp16"
        allowed = (0.2 if rounds else 1e-3) + (2e-3 if rounds else 1e-5) * float(given[position].abs().max())
        if not difference.max() <= allowed:
            yield f"{name}: {float(difference.max()):.3g} lost"


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; NaNs are equal."""
    return torch.equal(one.nan_to_num(nan=12345.0), other.nan_to_num(nan=12345.0))


def tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors of floating dtype, and floats, of a state, with their paths."""
    for path, leaf in tree_leaves_with_path(state):
        if isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            yield keystr(path), torch.as_tensor(leaf)


def attacks(method: str, values: Any, flags: Any, **fixed: Any) -> Iterator[Attack]:
    """All combinations of values, places, and the ``flags`` for ``everywhere`` and ``whole``, with and without
    momentum."""
    for value, place, everywhere, whole in itertools.product(values, ("compressed", "dense"), flags, flags):
        for momentum in (0.0, 0.9) if has_momentum(method) else (0.0,):
            yield Attack(method, value, place, everywhere, whole, momentum, **fixed)


def check(each: Iterator[Attack]) -> None:
    outcomes = {str(attack): run(attack).problems for attack in each}
    assert outcomes and not any(outcomes.values()), {name: found for name, found in outcomes.items() if found}


@pytest.mark.parametrize("method", TRAINED)
def test_an_infinite_and_a_huge_gradient(method):
    check(attacks(method, (math.inf, 1e38), [False]))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_value_everywhere(method):
    check(attacks(method, VALUES, [False, True]))


@pytest.mark.slow
@pytest.mark.parametrize("method", TRAINED)
def test_under_ddp(method):
    check(attacks(method, VALUES, [False, True], host="ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", TRAINED)
def test_16_bit_parameters(method, dtype):
    """No large numbers of float16: residuals and velocities are float32, and what accumulates there may be more than an
    average in float16 can hold, for as long as it is sent."""
    values = (math.nan, math.inf, -math.inf, 1e-45) if dtype == torch.float16 else VALUES
    check(attacks(method, values, [False, True], dtype=dtype))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**66, 3e38])
def test_the_velocity_of_an_uncompressed_gradient_is_that_of_the_other_steps(value, host):
    """As if the user had skipped the step in stock training: of the one entry, and of no other."""
    world, ranks = replicas(2, IWP, density=1 / 64, momentum=0.9, host=host)
    names = [name for name, _ in mixed_model().named_parameters()]
    number, velocity = names.index("wide.bias"), 0.0
    for step in range(4):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        if step == 2:
            grads[1][number][3] = value
        mean = (grads[0][number] + grads[1][number]) / 2
        wanted = velocity * 0.9 + mean
        velocity = torch.where(mean.abs() < OVERFLOW, wanted, velocity)
        seen = torch.where(mean.abs() < OVERFLOW, wanted, mean)
        for applied in together(world, ranks, grads):
            torch.testing.assert_close(applied[number], seen, equal_nan=True)
    assert velocity.isfinite().all()


def test_no_coefficient_of_a_spectrum_overflows():
    """The largest gradient that FFT takes, in a whole chunk: its coefficients add up to 64 times as much."""
    model = torch.nn.Linear(64, 64, bias=False)
    for value, fits in ((2.0**56.9, True), (2.0**57, False)):
        world, ranks = replicas(1, METHODS["fft"], model=model)
        applied = together(world, ranks, [[torch.full((64, 64), value)]])[0][0]
        held = residuals(ranks[0])["weight"]
        assert bool(applied.isfinite().all()) == fits
        assert held.isfinite().all() and bool((held + applied.nan_to_num(nan=0.0)).any()) == fits


@pytest.mark.parametrize("values", ["fp16", "fp16-gather"])
def test_what_float16_cannot_hold_leaves_within_64_steps(values):
    model = torch.nn.Linear(32, 32, bias=False)
    world, ranks = replicas(2, IWP, model=model, density=1.0, values=values, block_means=False)
    grads = [torch.zeros(32, 32), torch.zeros(32, 32)]
    grads[1][3, 4] = 1e15
    largest = []
    for _ in range(70):
        applied = together(world, ranks, [[grad.clone()] for grad in grads])
        assert equal(*applied)
        largest.append(float(applied[0][0].abs().max()))
        grads = [torch.zeros(32, 32), torch.zeros(32, 32)]
    assert all(x > 10000.0 for x in largest[:64]) and largest[65:] == [0.0] * 5


def test_weights_that_are_not_finite_for_a_while_leave_no_trace():
    """Floors of scores are computed from weights, and kept for many steps."""
    for name in ("iwp", "mipd", "slimdp", "mp2"):
        world, ranks = replicas(2, METHODS[name])
        saved = [copy.deepcopy(r.model.state_dict()) for r in ranks]
        with torch.no_grad():
            for rank in ranks:
                rank.model.wide.weight[3, 4], rank.model.deep.weight[:] = math.nan, 3e38
        for step in range(3):
            together(world, ranks, [gradients(r.model, seed=step) for r in ranks])
            for rank, weights in zip(ranks, saved, strict=True):
                rank.model.load_state_dict(weights)
        for rank in ranks:
            assert all(t.isfinite().all() for _, t in tensors(rank.compression.state_dict())), name
