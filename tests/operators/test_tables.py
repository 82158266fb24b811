"""Wrong contents of index tensors, which the CUDA operators cannot check: results may be wrong, but every kernel ends,
and none reaches memory outside the tensors. In builds with the address sanitizer, reads are checked, too."""

import pytest
import torch
from checks import bounded, within_memory
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import ops
from hvd_compress.reference import BLOCK

EXTREMES = [0, 1, -1, 2**31, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63)]


def words(limit: int) -> st.SearchStrategy[int]:
    """An entry of an index tensor: around 0 and ``limit``, extreme, or anything."""
    near = st.one_of(st.sampled_from([limit - 1, limit, limit + 1]), st.integers(-5, limit + 5), st.integers(0, limit))
    return st.one_of(near, near, st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1))


@st.composite
def tables(draw: st.DrawFn, limit: int, size: int, ascending: bool = True) -> torch.Tensor:
    row = [draw(words(limit)) for _ in range(size)]
    return torch.tensor(sorted(row) if ascending and draw(st.booleans()) else row)


def run(name: str, args: list, device: str) -> None:
    for before in (1, 4):
        with within_memory(args, before, device) as given:
            getattr(ops, name)(*given)


def buckets(rows: torch.Tensor, blocks: int, slots: int, phase: int) -> dict[str, list]:
    """The arguments of the operators on buckets."""
    count = len(rows)
    grads = [torch.zeros((0, 1, 255, 256, 700)[i % 5]).to((torch.float32, torch.bfloat16)[i % 2]) for i in range(count)]
    residual, indices = torch.randn(blocks * BLOCK), torch.randint(0, 256, (slots,)).to(torch.uint8)
    mean, error, means = torch.randn(slots), torch.randn(slots), torch.randn(blocks)
    flags, draw = torch.zeros(count, dtype=torch.int32), [phase, 3, 2, 1, 7, 2**31]
    state = [residual.clone(), grads, residual.flip(0), rows, torch.rand(count), indices.clone()]
    state += [flags[:1].clone(), flags]
    runs = torch.tensor([0, *range(300, blocks * BLOCK, 512), blocks * BLOCK])
    moments = torch.zeros(len(runs) - 1, 3).double()
    return {
        "accumulate": [
            grads,
            [grad[:0] for grad in grads],
            residual.clone(),
            rows,
            runs,
            moments,
            None,
            flags[:1],
            1.0,
        ],
        "accumulate_select": [grads, *state, means.clone(), 0.5, 0.9, 1.0, False, *draw],
        "select": [[grad.float() for grad in grads], rows, indices.clone(), *draw],
        "gather": [residual, indices, rows, torch.zeros(slots), phase],
        "scatter": [grads, residual, residual.flip(0), indices, rows, mean, error, phase, 0.5, means],
    }


@bounded(60)
@given(data=st.data())
def test_pieces(unchecked: str, data: st.DataObject) -> None:
    blocks, slots = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 900))
    count = data.draw(st.sampled_from([1, 2, 5, 200]))
    columns = [data.draw(tables(limit, min(count, 5))) for limit in (blocks, blocks, slots, slots)]
    rows = torch.stack([column.repeat(-(-count // 5))[:count] for column in columns], 1)
    phase = data.draw(st.one_of(st.integers(-5, 5), st.sampled_from(EXTREMES)))
    for name, args in buckets(rows, blocks, slots, phase).items():
        run(name, args, unchecked)


@pytest.mark.parametrize("first", [-1, -(2**31), -(2**63)])
def test_negative_first_block(unchecked: str, first: int) -> None:
    for name, args in buckets(torch.tensor([[first, 1, 0, 4], [2, 1, 4, 4]]), 3, 8, 0).items():
        run(name, args, unchecked)


def grouped(edges: torch.Tensor, kind: torch.Tensor, base: torch.Tensor, n: int) -> dict[str, list]:
    """The arguments of the operators on groups."""
    groups = len(edges) - 1
    values, error, steps = torch.randn(n), torch.zeros(n), torch.rand(groups) + 0.1
    shared, header = torch.rand(groups).double(), torch.randint(-(2**60), 2**60, (1 + (groups + 1) // 2,))
    words, book = torch.zeros(-(-n // 7), dtype=torch.int64), torch.randn(2, 8).sort().values
    codes = torch.randint(0, 256, (-(-n // 8) * 4,)).to(torch.uint8)
    few = codes[: -(-n // 8) * 3]
    invalid, grid = torch.zeros(1, dtype=torch.int32), torch.rand(2).double()
    return {
        "moments": [values, edges, torch.zeros(groups, 3).double()],
        "lanes_prepare": [values, edges, shared, kind, grid, invalid, steps.clone(), header, 7],
        "lanes_update": [values, edges, shared, kind, header, shared.clone(), kind.clone(), 7],
        "lanes_encode": [values, steps, edges, words, error, 6, 9, 5],
        "lanes_decode": [words, steps, edges, values, 9, 0.5],
        "codebook_encode": [values, steps, edges, book, kind, few, error, 3],
        "codebook_decode": [few, steps, edges, book, kind, values, 3, True],
        "codebook_mean": [
            few.repeat(3, 1),
            values,
            steps.repeat(3, 1),
            edges,
            book,
            kind.repeat(3, 1),
            error.clone(),
            torch.zeros(groups, 3).double(),
            1,
            0,
            3,
        ],
        "codebook_moments": [few, steps, edges, book, kind, torch.zeros(1, 3).double(), n, 3],
        "codebook_move": [few, steps, edges, book, kind, None, values.clone(), None, error.clone(), None, 1.0, 0.0, 3],
        "range_encode": [values, base, edges, codes, error, 4, 3, 7],
        "range_decode": [codes, base, edges, values, 4, 3, 7, False],
    }


@bounded(60)
@given(data=st.data())
def test_groups(unchecked: str, data: st.DataObject) -> None:
    n, groups = data.draw(st.sampled_from([1, 13, 256, 2049, 9000])), data.draw(st.integers(1, 9))
    edges = data.draw(tables(n, groups + 1))
    kind, base = data.draw(tables(2, groups, ascending=False)), data.draw(tables(2**16, groups, ascending=False))
    for name, args in grouped(edges, kind, base, n).items():
        run(name, args, unchecked)


@pytest.mark.parametrize("edges", [[0, 2**63 - 1, 5, 13], [0, 13, 12, 13], [2**63 - 1, 0, 13, 13]])
def test_falling_edges(unchecked: str, edges: list[int]) -> None:
    ones = torch.ones(3, dtype=torch.int64)
    for name, args in grouped(torch.tensor(edges), ones, ones, 13).items():
        run(name, args, unchecked)
