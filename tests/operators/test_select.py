"""select against its reference, bitwise."""

import pytest
import torch
from checks import agrees, agrees_within, bad_selection, bounded, on, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import PAIR, Layout, draws, kinds, layout_of, layouts, seeds, values

from hvd_compress import ops
from hvd_compress.ops import Draw
from hvd_compress.reference import BLOCK


def arguments_of(layout: Layout, scores: list, draw: Draw) -> list:
    indices = torch.full((layout.room(draw) + 5,), 170, dtype=torch.uint8)  # the rest must not be written
    return [scores, layout.tensor(), indices, *draw]


@st.composite
def arguments(draw: st.DrawFn) -> list:
    layout, seed = draw(layouts()), draw(seeds)
    scores = [values(n * draw(st.sampled_from([0, 1, 1, 1])), draw(kinds), seed).abs() for n in layout.entries]
    return arguments_of(layout, scores, draw(draws()))


def sample(device: str = "cpu") -> list:
    """Valid arguments: 12 slots, of which this rank leads 6."""
    scores, draw = [torch.rand(entries) for entries in PAIR.entries], Draw(5, 1, 2, 0, 7, 2**31)
    return on(device, [scores, PAIR.tensor(), torch.zeros(6, dtype=torch.uint8), *draw])


@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    agrees("select", args, device)


@pytest.mark.parametrize("kind", ["equal", "wild"])
def test_counts(device: str, kind: str) -> None:
    """So many slots a block, of which half are explored."""
    n, counts = 19 * BLOCK + 3, [1, 2, 3, 5, 6, 7, 8, 9, 16, 17, 31, 33, 64, 100, 255, 256]
    layout = layout_of([(n, 20 * count) for count in counts])
    scores = [values(n, kind, count).abs() for count in counts]
    agrees("select", arguments_of(layout, scores, Draw(3, 1, 1, 0, 11, 2**31)), device)


def test_many_blocks(device: str) -> None:
    layout = layout_of([(1201 * BLOCK, 5000), (300, 0), (797 * BLOCK, 3600)])
    scores = [values(n, "normal", n).abs() for n in layout.entries]
    for phase in (0, -77, 2500):
        with threads(3):
            agrees("select", arguments_of(layout, scores, Draw(phase, 7, 3, 1, 11, 2**31)), device)


def test_is_the_second_half_of_accumulate_select(device: str) -> None:
    grads, residual = [torch.randn(entries, device=device) for entries in PAIR.entries], torch.zeros(3 * BLOCK)
    scores, pieces, indices, *draw = sample(device)
    residual, wanted = residual.to(device), indices.clone()
    flags = torch.zeros(3, dtype=torch.int32, device=device)
    none = torch.empty(0, device=device)
    more = [pieces, none, wanted, flags[:1], flags[1:], None, 1.0, 0.0, 1.0, False]
    ops.accumulate_select(grads, residual, [], None, *more, *draw)
    scores = [residual[:400].abs(), residual[512:712].abs()]
    ops.select(scores, pieces, indices, *draw)
    assert torch.equal(indices, wanted)


def test_unaligned_scores(device: str) -> None:
    agrees_within("select", sample(), device)


@pytest.mark.parametrize("count", [2, 4, 20])
@pytest.mark.parametrize("score", [-0.0, -1.0, -float("inf"), -float("nan")])
def test_negative_scores_count_as_zero(device: str, count: int, score: float) -> None:
    """Only -0.0 is allowed, but no score may lead to an invalid index or to an entry selected twice."""
    indices = torch.zeros(count, dtype=torch.uint8, device=device)
    scores, pieces = [torch.full((BLOCK,), score, device=device)], torch.tensor([[0, 1, 0, count]], device=device)
    ops.select(scores, pieces, indices, 0, 1, 1, 0, 7, 0)
    assert indices.tolist() == list(range(count))


test_opcheck = opchecks(("select", sample))


BAD = {
    "scores dtype": (0, lambda x: [x[0].half(), x[1]], "scores must be Float, got Half"),
    "scores strided": (0, lambda x: [torch.rand(800)[::2], x[1]], "scores must be contiguous"),
    "scores number": (0, lambda x: x[:1], "scores must have 2 tensors, one per piece, got 1"),
    **bad_selection(pieces=1, indices=2, draw=3),
}


test_refuses = refusals("select", sample, BAD)
