"""lanes_prepare and lanes_update against hvd_compress/reference/scales.py, bitwise."""

from functools import partial

import pytest
import torch
from checks import agrees, agrees_within, bad_tensors, bounded, on, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY_EDGES, group_edges, seeds, values
from torch import Tensor

from hvd_compress import ops
from hvd_compress.reference.scales import LARGEST, RATIO_STEPS, SMALLEST

#: Only finite values.
kinds = st.sampled_from(["normal", "equal", "zero", "tiny", "huge"])
rank_counts = st.sampled_from([1, 2, 3, 4, 64, 1000, 2**30])


def state(groups: int, seed: int) -> tuple[Tensor, Tensor]:
    """``shared_scale``, including the least and the largest one, and ``kind``."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(groups, generator=generator, dtype=torch.float64).abs() + 1e-3
    where = torch.randint(0, 8, (groups,), generator=generator)
    shared = torch.where(where == 0, SMALLEST, torch.where(where == 1, LARGEST, shared))
    return shared, torch.randint(0, 2, (groups,), generator=generator)


def to_prepare(edges: Tensor, kind: str, seed: int, ranks: int, invalid: int = 0) -> list:
    groups = len(edges) - 1
    grid = torch.tensor([0.4, 0.7], dtype=torch.float64)
    flag, step = torch.tensor([invalid], dtype=torch.int32), torch.full((groups,), 7.0)
    header = torch.full((1 + -(-groups // 2),), -7)
    return [values(int(edges[-1]), kind, seed), edges, *state(groups, seed), grid, flag, step, header, ranks]


def to_update(edges: Tensor, kind: str, seed: int, ranks: int, invalid: int = 0) -> list:
    """With a random ``header``."""
    groups = len(edges) - 1
    generator = torch.Generator().manual_seed(seed)
    sums = torch.randint(0, 2**31, (2 * -(-groups // 2),), generator=generator)
    words = sums.view(-1, 2)
    header = torch.cat([torch.tensor([invalid]), words[:, 0] + (words[:, 1] << 32)])
    shared, which = state(groups, seed)
    return [values(int(edges[-1]), kind, seed), edges, shared, which, header, shared * 0 + 7, which * 0 + 7, ranks]


MAKERS = {"lanes_prepare": to_prepare, "lanes_update": to_update}
#: 13 values in 3 groups, on 4 ranks.
SAMPLES = {name: partial(make, torch.tensor([0, 5, 5, 13]), "normal", 3, 4) for name, make in MAKERS.items()}


def edges_of_some() -> st.SearchStrategy[Tensor]:
    return group_edges().filter(lambda edges: len(edges) > 1)


@bounded(150)
@given(edges=edges_of_some(), kind=kinds, seed=seeds, ranks=rank_counts, invalid=st.integers(0, 1))
def test_prepare_equals_reference(device: str, edges: Tensor, kind: str, seed: int, ranks: int, invalid: int) -> None:
    agrees("lanes_prepare", to_prepare(edges, kind, seed, ranks, invalid), device)


@bounded(150)
@given(edges=edges_of_some(), kind=kinds, seed=seeds, ranks=rank_counts, invalid=st.integers(0, 3))
def test_update_equals_reference(device: str, edges: Tensor, kind: str, seed: int, ranks: int, invalid: int) -> None:
    agrees("lanes_update", to_update(edges, kind, seed, ranks, invalid), device)


@pytest.mark.parametrize("name", MAKERS)
def test_many_values(device: str, name: str) -> None:
    with threads(3):
        agrees(name, MAKERS[name](MANY_EDGES, "normal", 5, 4, 1), device)


@pytest.mark.parametrize("name", MAKERS)
def test_within_other_memory(device: str, name: str) -> None:
    agrees_within(name, MAKERS[name](torch.tensor([0, 0, 33, 999]), "normal", 5, 4, 1), device)


def test_moving_average(device: str) -> None:
    """The values of four ranks are three times as large as the shared scale 1, which becomes 0.75 + 0.25 * 3."""
    args = on(device, to_prepare(torch.tensor([0, 5, 5, 9]), "equal", 3, 4))
    value, edges, shared, kind, _, _, step, header, ranks = args
    value.copy_(torch.tensor([3.0, -3.0] * 4 + [3.0]))
    shared.fill_(1.0)
    ops.lanes_prepare(*args)
    assert step.tolist() == [pytest.approx(0.4 if k == 0 else 0.7) for k in kind.tolist()]
    following, kinds_then = torch.empty_like(shared), torch.empty_like(kind)
    ops.lanes_update(value, edges, shared, kind, header * ranks, following, kinds_then, ranks)
    assert following.tolist() == [1.5, 1.0, 1.5], "an empty group keeps its scale"
    assert kinds_then.tolist() == [0, int(kind[1]), 0]


def test_largest_ratios_do_not_overflow(device: str) -> None:
    for ranks in (1, 3, 4, 1000):
        args = on(device, to_prepare(torch.tensor([0, 4, 8]), "equal", 3, ranks))
        args[0].fill_(3e38)
        args[2].fill_(SMALLEST)
        ops.lanes_prepare(*args)
        low, high = int(args[7][1]) & 0xFFFFFFFF, int(args[7][1]) >> 32
        assert low == high == 2**31 // ranks - 1
        assert ranks * low < 2**31


def test_invalid_rank(device: str) -> None:
    good, bad = (on(device, to_update(torch.tensor([0, 40, 141]), "normal", 3, 4, invalid)) for invalid in (0, 1))
    ops.lanes_update(*good)
    ops.lanes_update(*bad)
    assert bool(good[0].isfinite().all()) and bool(bad[0].isnan().all())
    assert torch.equal(good[5], bad[5]) and torch.equal(good[6], bad[6])


BAD = bad_tensors(edges=1) | {
    "shared_scale dtype": (2, lambda x: x.float(), "shared_scale must be Double, got Float"),
    "shared_scale numel": (2, lambda x: x[:2].clone(), "shared_scale must have 3 entries, got 2"),
    "kind dtype": (3, lambda x: x.int(), "kind must be Long, got Int"),
    "kind numel": (3, lambda x: x[:2].clone(), "kind must have 3 entries, got 2"),
}
BAD_PREPARE = {
    **BAD,
    "values dtype": (0, lambda x: x.half(), "values must be Float, got Half"),
    "kind beyond": (3, lambda x: x * 0 + 2, "kind must be 0 to 1, got 2"),
    "kind < 0": (3, lambda x: x * 0 - 1, "kind must be 0 to 1, got -1"),
    "grid dtype": (4, lambda x: x.float(), "grid must be Double, got Float"),
    "grid none": (4, lambda x: x[:0].clone(), "grid must have an entry for each kind, got none"),
    "invalid dtype": (5, lambda x: x.long(), "invalid must be Int, got Long"),
    "invalid numel": (5, lambda x: torch.zeros(2, dtype=torch.int32), "invalid must have 1 entries, got 2"),
    "step dtype": (6, lambda x: x.double(), "step must be Float, got Double"),
    "step numel": (6, lambda x: x[:2].clone(), "step must have 3 entries, got 2"),
    "header dtype": (7, lambda x: x.int(), "header must be Long, got Int"),
    "header numel": (7, lambda x: x[:2].clone(), "header must have 3 entries, got 2"),
    "ranks 0": (8, lambda x: 0, "ranks must be 1 to 1073741824, got 0"),
    "ranks many": (8, lambda x: 2**30 + 1, "ranks must be 1 to 1073741824, got 1073741825"),
}
BAD_UPDATE = {
    **BAD,
    "mean dtype": (0, lambda x: x.half(), "values must be Float, got Half"),
    "header numel": (4, lambda x: x[:2].clone(), "header must have 3 entries, got 2"),
    "next_scale dtype": (5, lambda x: x.float(), "next_scale must be Double, got Float"),
    "next_scale numel": (5, lambda x: x[:2].clone(), "next_scale must have 3 entries, got 2"),
    "next_kind dtype": (6, lambda x: x.int(), "next_kind must be Long, got Int"),
    "next_kind numel": (6, lambda x: x[:2].clone(), "next_kind must have 3 entries, got 2"),
    "ranks 0": (7, lambda x: 0, "ranks must be 1 to 1073741824, got 0"),
}


test_opcheck = opchecks(*SAMPLES.items())
test_prepare_refuses = refusals("lanes_prepare", SAMPLES["lanes_prepare"], BAD_PREPARE)
test_update_refuses = refusals("lanes_update", SAMPLES["lanes_update"], BAD_UPDATE)


def test_no_group() -> None:
    args = to_prepare(torch.tensor([0, 5]), "normal", 3, 4)
    nothing = [args[0][:0], args[1][:1].clone(), args[2][:0], args[3][:0]]
    with pytest.raises(RuntimeError, match="edges must have at least two entries, got 1"):
        ops.lanes_prepare(*nothing, args[4], args[5], args[6][:0], args[7][:1].clone(), 4)


def test_ratios_are_rounded_to_even(device: str) -> None:
    args = on(device, to_prepare(torch.tensor([0, 1, 2]), "equal", 3, 1))
    args[0].copy_(torch.tensor([2.5, 3.5]) / RATIO_STEPS)
    args[2].fill_(1.0)
    ops.lanes_prepare(*args)
    assert int(args[7][1]) == 2 + (4 << 32)
