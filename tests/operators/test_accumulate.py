"""accumulate against its reference, bitwise."""

from itertools import accumulate

import pytest
import torch
from checks import agrees, agrees_within, bounded, on, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    KINDS,
    PAIR,
    RUNS,
    Layout,
    bytes_for,
    bytes_of,
    gradients,
    kinds,
    layout_of,
    layouts,
    seeds,
    values,
)
from test_codebook import levels_of

from hvd_compress import ops
from hvd_compress.reference import BLOCK


def runs_of(layout: Layout, run: int) -> torch.Tensor:
    return torch.tensor([*range(0, layout.blocks * BLOCK, run), layout.blocks * BLOCK])


def arguments_of(
    layout: Layout, grads: list, edges: torch.Tensor, *, started: bool = True, bits: int = 2, squares: bool = True,
    kind: str = "normal", scale: float = 1.0, rows: int = 2
) -> list:  # fmt: skip
    """``bits``: of the codes; 0: without."""
    n, groups = layout.blocks * BLOCK, len(edges) - 1
    starts = [values(grad.numel(), kind, 21 + i).view(grad.shape) for i, grad in enumerate(grads)]
    starts = [
        torch.empty_like(grad).copy_(start) if started and grad.dtype == torch.float32 else torch.empty(0)
        for grad, start in zip(grads, starts, strict=True)
    ]
    out, invalid = torch.full((groups, 3), 7.0, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
    written = torch.full((layout.blocks,), 3.0, dtype=torch.float64) if squares else None
    sent: list = [None, None, None, None, 0]
    if bits:
        steps, number = torch.rand(groups) + 0.1, torch.arange(groups) % rows
        sent = [bytes_of(bytes_for(n, bits), 5), steps, levels_of(rows, "lloyd", 1, bits), number, bits]
    return [grads, starts, values(n, kind, 11), layout.tensor(), edges, out, written, invalid, scale, *sent]


@st.composite
def arguments(draw: st.DrawFn) -> list:
    layout = draw(layouts())
    grads = draw(gradients(layout, st.sampled_from([*KINDS, "signed zeros"]), draw(seeds)))
    cuts = draw(st.lists(st.integers(0, layout.blocks * BLOCK), max_size=9))
    run = draw(st.sampled_from([0, 13, 256, 512, 1000, 9000]))
    edges = runs_of(layout, run) if run else torch.tensor(sorted([0, *cuts, layout.blocks * BLOCK]))
    return arguments_of(
        layout,
        grads,
        edges,
        started=draw(st.booleans()),
        bits=draw(st.integers(0, 8)),
        squares=draw(st.booleans()),
        kind=draw(kinds),
        scale=draw(st.sampled_from([1.0, 0.3, 1e30])),
    )


@bounded(150)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    agrees("accumulate", args, device)


@pytest.mark.parametrize("bits", [0, 3])
def test_within_other_memory(device: str, bits: int) -> None:
    sizes, dtypes = [1, 3, 255, 259, 510, 512], [torch.float32, torch.float16, torch.bfloat16]
    layout = layout_of([(n, 0) for n in sizes for _ in dtypes])
    grads = [values(n, "normal", n).to(dtype) for n in sizes for dtype in dtypes]
    agrees_within("accumulate", arguments_of(layout, grads, runs_of(layout, 300), bits=bits), device)


@pytest.mark.parametrize("sizes", RUNS.values(), ids=RUNS)
def test_runs(device: str, sizes: list[int]) -> None:
    n = sum(sizes)
    layout = layout_of([(n // 2, 0), (n - n // 2 - 300, 0)])
    edges = torch.tensor([*accumulate(sizes, initial=0)]).clamp(max=layout.blocks * BLOCK)
    edges[-1] = layout.blocks * BLOCK
    agrees("accumulate", arguments_of(layout, [values(m, "normal", m) for m in layout.entries], edges), device)


def test_several_threads(device: str) -> None:
    """Runs that two threads write."""
    layout = layout_of([(700_003, 0), (50_000, 0)])
    grads = [values(n, "normal", n) for n in layout.entries]
    with threads(3):
        for run in (512, 1000, 20_000):
            agrees("accumulate", arguments_of(layout, grads, runs_of(layout, run)), device)


def test_what_was_sent_and_gradients_cancel(device: str) -> None:
    """A residual of codes, less what these decode to, is 0; with the way of the weights from their starts added."""
    n, bits = 1024, 4
    edges, book, kind = torch.tensor([0, 512, 1024]), levels_of(1, "lloyd", 1, bits), torch.zeros(2, dtype=torch.int64)
    codes, scale = bytes_of(bytes_for(n, bits), 3), torch.tensor([0.5, 2.0])
    tensors = on(device, [codes, scale, edges, book, kind])
    residual = torch.empty(n, device=device)
    ops.codebook_decode(*tensors, residual, bits, False)
    weights, start = on(device, [values(n, "normal", 1), values(n, "normal", 2)])
    pieces, out, squares, invalid = on(device, [
        torch.tensor([[0, 4, 0, 0]]), torch.empty(2, 3).double(), torch.empty(4).double(), torch.zeros(1).int()
    ])  # fmt: skip
    before = weights.clone()
    given = [weights], [start], residual, pieces, tensors[2], out, squares, invalid, 1.0
    ops.accumulate(*given, *tensors[:2], *tensors[3:], bits)
    assert torch.equal(residual, weights - start) and torch.equal(weights, before) and not int(invalid)
    torch.testing.assert_close(squares.sum(), out[:, 0].sum())


def sample(device: str = "cpu") -> list:
    grads = [torch.randn(entries) for entries in PAIR.entries]
    return on(device, arguments_of(PAIR, grads, torch.tensor([0, 300, 768]), bits=3))


test_opcheck = opchecks(("accumulate", sample))
test_refuses = refusals("accumulate", sample, {
    "starts number": (1, lambda x: x[:1], "starts must have 2 tensors, one per piece, got 1"),
    "starts dtype": (1, lambda x: [x[0].half(), x[1]], "starts must be Float, got Half"),
    "starts numel": (1, lambda x: [x[0][:7].clone(), x[1]], "starts must have 400 entries, got 7"),
    "grads dtype": (0, lambda x: [x[0].half(), x[1]], "grads with starts must be Float, got Half"),
    "residual numel": (2, lambda x: x[:700].clone(), "residual must have a multiple of 256 entries, got 700"),
    "pieces order": (3, lambda x: x.flip(0).contiguous(), "pieces must follow one another"),
    "edges short": (4, lambda x: torch.tensor([0, 300, 700]), "edges must end at 768, got 700"),
    "out shape": (5, lambda x: x[:, :2].contiguous(), "out must be of shape .groups, 3."),
    "squares numel": (6, lambda x: x[:2].clone(), "squares must have 3 entries, got 2"),
    "squares dtype": (6, lambda x: x.float(), "squares must be Double, got Float"),
    "invalid dtype": (7, lambda x: x.long(), "invalid must be Int, got Long"),
    "codes numel": (9, lambda x: x[:5].clone(), "codes must have 288 entries, got 5"),
    "scale missing": (10, lambda x: None, "codes go with sent_scale, book and kind"),
    "bits 9": (13, lambda x: 9, "bits must be 1 to 8, got 9"),
})  # fmt: skip
