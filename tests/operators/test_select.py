"""select against its reference, bitwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICES,
    bad_selection,
    bounded,
    check_device,
    clone,
    kinds,
    needs_compiled,
    on,
    phases,
    same,
    seeds,
    slot_counts,
    threads,
    values,
)

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

pytestmark = needs_compiled
EVERY = 2**32


@st.composite
def arguments(draw: st.DrawFn) -> list:
    blocks = draw(st.one_of(st.integers(1, 12), st.integers(1, 400)))
    slots, first_slot, phase = draw(slot_counts(blocks)), draw(st.integers(0, 2000)), draw(phases)
    run, ranks = draw(st.one_of(st.integers(1, 4), st.integers(1, 3000))), draw(st.integers(1, 8))
    position = draw(st.integers(0, ranks - 1))
    last = int(reference.slots_before(torch.tensor(first_slot + slots), run, ranks, position))
    return [
        values(blocks * BLOCK, draw(kinds), draw(seeds)).abs(),
        torch.full((last + draw(st.integers(0, 9)),), 170, dtype=torch.uint8),  # the rest must not be written
        slots,
        first_slot,
        phase,
        run,
        ranks,
        position,
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from([0, 2**30, EVERY - 1, EVERY])),
    ]


def sample(device: str = "cpu") -> list:
    """Valid arguments: 3 blocks, 12 slots, of which this rank leads 6."""
    return on(device, [torch.rand(3 * BLOCK), torch.zeros(6, dtype=torch.uint8), 12, 0, 5, 1, 2, 0, 7, 2**31])


def check(args: list, device: str) -> None:
    check_device(device)
    got, want = on(device, clone(args)), clone(args)
    ops.select(*got)
    reference.select(*want)
    assert same(got[0], args[0]), "score"
    assert same(got[1], want[1]), "indices"


@pytest.mark.parametrize("device", DEVICES)
@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    check(args, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8, 9, 31, 33, 64, 100, 255, 256])
@pytest.mark.parametrize("kind", ["normal", "equal", "wild"])
def test_counts(device: str, count: int, kind: str) -> None:
    score = values(20 * BLOCK, kind, 2).abs()
    check([score, torch.zeros(20 * count, dtype=torch.uint8), 20 * count, 0, 3, 1, 1, 0, 11, 2**31], device)


@pytest.mark.parametrize("device", DEVICES)
def test_many_blocks(device: str) -> None:
    score, indices = values(2000 * BLOCK, "normal", 2).abs(), torch.zeros(4000, dtype=torch.uint8)
    for phase in (0, -77, 2500):
        with threads(3):
            check([score, indices, 8600, 123, phase, 7, 3, 1, 11, 2**31], device)


@pytest.mark.parametrize("device", DEVICES)
def test_is_the_second_half_of_accumulate_select(device: str) -> None:
    check_device(device)
    grad, residual = torch.randn(3 * BLOCK, device=device), torch.randn(3 * BLOCK, device=device)
    args = sample(device)
    indices, floor = args[1].clone(), torch.zeros(1, device=device)
    flags = torch.zeros(2, 1, dtype=torch.int32, device=device)
    ops.accumulate_select(grad, residual, None, None, floor, indices, *flags, None, 1.0, 0.0, *args[2:])
    args[0] = residual.abs()
    ops.select(*args)
    assert torch.equal(args[1], indices)


@pytest.mark.parametrize("device", DEVICES)
def test_unaligned_score(device: str) -> None:
    """A view into another tensor, not aligned to 16 bytes."""
    check_device(device)
    args = sample(device)
    args[0] = torch.rand(3 * BLOCK + 1, device=device)[1:]
    want = on("cpu", clone(args))
    ops.select(*args)
    reference.select(*want)
    assert same(args[1], want[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [4, 20])
@pytest.mark.parametrize("score", [-0.0, -1.0, -float("inf"), -float("nan")])
def test_negative_scores_count_as_zero(device: str, count: int, score: float) -> None:
    """Only -0.0 is allowed, but no score may lead to an invalid index or to an entry selected twice."""
    check_device(device)
    indices = torch.zeros(count, dtype=torch.uint8, device=device)
    ops.select(torch.full((BLOCK,), score, device=device), indices, count, 0, 0, 1, 1, 0, 7, 0)
    assert indices.tolist() == list(range(count))


def test_no_blocks() -> None:
    ops.select(torch.empty(0), torch.empty(0, dtype=torch.uint8), 0, 0, 5, 1, 2, 0, 7, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    check_device(device)
    torch.library.opcheck(torch.ops.hvd_compress.select.default, tuple(sample(device)))


BAD = {
    "score dtype": (0, lambda x: x.half(), "score must be Float, got Half"),
    "score size": (0, lambda x: x[:700].clone(), "score must have a multiple of 256 entries, got 700"),
    "score strided": (0, lambda x: torch.rand(6 * BLOCK)[::2], "score must be contiguous"),
    **bad_selection(indices=1, slots=2),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    index, change, message = BAD[case]
    args = sample()
    args[index] = change(args[index])
    before = args[1].clone()
    with pytest.raises(RuntimeError, match=message):
        ops.select(*args)
    assert torch.equal(args[1], before)
