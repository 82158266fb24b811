"""codebook_mean, codebook_moments and codebook_move against hvd_compress/reference/averages.py, bitwise."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from checks import agrees, agrees_within, bounded, on, opchecks, overlaps, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY_EDGES, RUNS, bytes_for, bytes_of, group_edges, kinds, scales, seeds, values
from test_codebook import tables
from torch import Tensor

from hvd_compress import ops


def coded(edges: Tensor, kind: str, seed: int, bits: int, rows: int) -> list:
    """Codes, scales, edges, book and kinds."""
    n = int(edges[-1])
    scale = scales(values(n, kind, seed), len(edges) - 1, seed + 1, 4)
    return [bytes_of(bytes_for(n, bits), seed), scale, edges, *tables(edges, "lloyd", seed, bits, rows)]


def mean_arguments(edges: Tensor, kind: str, seed: int, bits: int, rows: int, ranks: int, rank: int, skip: int) -> list:
    n = int(edges[-1])
    each = [coded(edges, kind, seed + sender, bits, rows) for sender in range(ranks)]
    messages = torch.stack([torch.cat([bytes_of(skip, 1), row[0], bytes_of(3, 2)]) for row in each])
    scale, number = torch.stack([row[1] for row in each]), torch.stack([row[4] for row in each])
    written = torch.full((n,), 7.0), torch.full((len(edges) - 1, 3), 7.0, dtype=torch.float64)
    return [messages, values(n, kind, seed + 9), scale, edges, each[0][3], number, *written, rank, skip, bits]


def moments_arguments(edges: Tensor, kind: str, seed: int, bits: int, rows: int) -> list:
    return [*coded(edges, kind, seed, bits, rows), torch.zeros(1, 3, dtype=torch.float64), int(edges[-1]), bits]


def move_arguments(
    edges: Tensor, kind: str, seed: int, bits: int, rows: int, factor: bool, velocity: bool, before: bool, lr: float
) -> list:
    given, n = coded(edges, kind, seed, bits, rows), int(edges[-1])
    if kind == "wild":
        given[1][: len(edges) // 3] = torch.nan
    common, speed, own, then = (values(n, "normal", seed + i) for i in range(4))
    given += [torch.tensor(1.7) if factor else None, common, speed if velocity else None, own]
    return [*given, then if before else None, lr, 0.9, bits]


#: Of edges, kind, seed, bits and rows.
drawn = (group_edges(), kinds, seeds, st.integers(1, 8), st.integers(1, 3))


@st.composite
def means(draw: st.DrawFn) -> list:
    ranks = draw(st.integers(1, 5))
    return mean_arguments(*map(draw, drawn), ranks, draw(st.integers(0, ranks - 1)), draw(st.integers(0, 9)))


@bounded(120)
@given(args=means())
def test_mean_equals_reference(device: str, args: list) -> None:
    agrees("codebook_mean", args, device)


@bounded(80)
@given(args=st.builds(moments_arguments, *drawn))
def test_moments_equal_reference(device: str, args: list) -> None:
    agrees("codebook_moments", args, device)


@bounded(120)
@given(args=st.builds(move_arguments, *drawn, *[st.booleans()] * 3, st.sampled_from([1.0, 0.7])))
def test_move_equals_reference(device: str, args: list) -> None:
    agrees("codebook_move", args, device)


@pytest.mark.parametrize("sizes", [*RUNS.values(), MANY_EDGES.diff().tolist()], ids=[*RUNS, "many"])
@pytest.mark.parametrize("bits", [1, 2, 4, 5, 8])
def test_runs(device: str, bits: int, sizes: list[int]) -> None:
    edges = torch.tensor([0, *accumulate(sizes)])
    with threads(3):
        agrees("codebook_mean", mean_arguments(edges, "normal", 5, bits, 2, 3, 1, 4), device)
        agrees("codebook_moments", moments_arguments(edges, "normal", 5, bits, 2), device)
        agrees("codebook_move", move_arguments(edges, "normal", 5, bits, 2, True, True, True, 0.7), device)


@pytest.mark.parametrize("bits", range(1, 9))
def test_within_other_memory(device: str, bits: int) -> None:
    edges = torch.tensor([0, 0, 33, 999])
    agrees_within("codebook_mean", mean_arguments(edges, "normal", 5, bits, 2, 3, 0, 2), device)
    agrees_within("codebook_moments", moments_arguments(edges, "normal", 5, bits, 2), device)
    agrees_within("codebook_move", move_arguments(edges, "normal", 5, bits, 2, True, True, True, 0.7), device)


def test_an_average_that_is_not_finite_moves_nothing(device: str) -> None:
    args = on(device, move_arguments(torch.tensor([0, 512]), "normal", 5, 2, 1, False, False, False, 1.0))
    args[1][:], common = torch.nan, args[6].clone()
    ops.codebook_move(*args)
    assert torch.equal(args[6], common) and bool(args[8].isnan().all())


def test_a_rank_alone_has_its_values(device: str) -> None:
    args = on(device, mean_arguments(torch.tensor([0, 512, 700]), "normal", 5, 2, 1, 1, 0, 4))
    ops.codebook_mean(*args)
    assert torch.equal(args[6], args[1])


#: 13 values in 3 groups, of 3 bits; 2 rows.
SAMPLE = (torch.tensor([0, 5, 5, 13]), "normal", 3, 3, 2)
sample_mean, sample_moments = partial(mean_arguments, *SAMPLE, 3, 1, 4), partial(moments_arguments, *SAMPLE)
sample_move = partial(move_arguments, *SAMPLE, True, True, True, 0.7)
test_opcheck = opchecks(
    ("codebook_mean", sample_mean), ("codebook_moments", sample_moments), ("codebook_move", sample_move)
)
test_overlap = overlaps("codebook_mean", sample_mean, [(6, 1)])

BAD_MEAN = {
    "rows dtype": (0, lambda x: x.int(), "rows must be Byte, got Int"),
    "rows short": (0, lambda x: x[:, :9].contiguous(), "rows must have 6 bytes of codes, got 5"),
    "rows flat": (0, lambda x: x.view(-1), "rows must be of shape .ranks, bytes."),
    "values dtype": (1, lambda x: x.half(), "values must be Float, got Half"),
    "scale numel": (2, lambda x: x[:2].contiguous(), "scale must have 9 entries, got 6"),
    "edges short": (3, lambda x: torch.tensor([0, 5, 5, 12]), "edges must end at 13, got 12"),
    "kind > rows": (5, lambda x: x + 2, "every kind must be 0 to 1, got"),
    "mean numel": (6, lambda x: x[:12].clone(), "mean must have 13 entries, got 12"),
    "out dtype": (7, lambda x: x.float(), "out must be Double, got Float"),
    "rank": (8, lambda x: 3, "rank must be 0 to 2, got 3"),
    "skip": (9, lambda x: 14, "skip must be 0 to 13, got 14"),
    "bits": (10, lambda x: 9, "bits must be 1 to 8, got 9"),
}
BAD_MOMENTS = {
    "codes numel": (0, lambda x: x[:5].clone(), "codes must have 6 entries, got 5"),
    "out numel": (5, lambda x: torch.zeros(1, 2).double(), "out must have 3 entries, got 2"),
    "count": (6, lambda x: -1, "count must be 0 to .*, got -1"),
    "edges short": (2, lambda x: torch.tensor([0, 5, 5, 12]), "edges must end at 13, got 12"),
}
BAD_MOVE = {
    "codes numel": (0, lambda x: x[:5].clone(), "codes must have 6 entries, got 5"),
    "factor numel": (5, lambda x: torch.ones(2), "factor must have 1 entries, got 2"),
    "common dtype": (6, lambda x: x.half(), "common must be Float, got Half"),
    "velocity numel": (7, lambda x: x[:12].clone(), "velocity must have 13 entries, got 12"),
    "own dtype": (8, lambda x: x.bfloat16(), "own must be Float, got BFloat16"),
    "before numel": (9, lambda x: x[:12].clone(), "before must have 13 entries, got 12"),
}
test_mean_refuses = refusals("codebook_mean", sample_mean, BAD_MEAN)
test_moments_refuses = refusals("codebook_moments", sample_moments, BAD_MOMENTS)
test_move_refuses = refusals("codebook_move", sample_move, BAD_MOVE)
