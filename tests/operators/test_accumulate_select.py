"""accumulate_select against its reference, bitwise."""

from functools import partial

import pytest
import torch
from checks import agrees, agrees_within, bad_selection, bounded, clone, on, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, PAIR, Layout, draws, gradients, kinds, layout_of, layouts, seeds, values

from hvd_compress import ops
from hvd_compress.ops import Draw
from hvd_compress.reference import BLOCK

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DRAW = Draw(phase=5, run=1, ranks=2, position=0, key=7, explore=2**31)


def flags(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def arguments_of(
    layout: Layout, grads: list, weights: list, draw: Draw, *, velocity: bool = False, means: bool = False,
    transform: bool = False, kind: str = "normal", scale: float = 1.0, momentum: float = 0.9, decay: float = 1.0
) -> list:  # fmt: skip
    residual, smoothed = values(layout.blocks * BLOCK, kind, 11), values(layout.blocks * BLOCK, "normal", 12)
    if not transform:
        residual, smoothed = layout.unpadded(residual), layout.unpadded(smoothed)
    indices = torch.full((layout.room(draw) + 5,), 170, dtype=torch.uint8)  # the rest must not be written
    count = len(grads)
    state = [residual, weights, smoothed if velocity else None, layout.tensor(), torch.linspace(0.1, 1, count), indices]
    block_means = torch.full((layout.blocks,), 3.0) if means else None
    return [grads, *state, flags(1), flags(count), block_means, scale, momentum, decay, transform, *draw]


@st.composite
def arguments(draw: st.DrawFn) -> list:
    layout, seed, transform = draw(layouts()), draw(seeds), draw(st.integers(0, 2)) == 0
    grads = draw(gradients(layout, st.sampled_from([*KINDS, "signed zeros"]), seed))
    weighted, means = (not transform and draw(st.booleans()) for _ in range(2))
    weights = [values(grad.numel(), draw(kinds), seed + 9).to(grad).view_as(grad) for grad in grads]
    args = arguments_of(
        layout,
        grads,
        [torch.empty_like(grad).copy_(weight) for grad, weight in zip(grads, weights, strict=True)] if weighted else [],
        draw(draws()),
        velocity=draw(st.booleans()),
        means=means,
        transform=transform,
        kind=draw(st.sampled_from(["normal", "equal", "zero", "tiny", "huge"])),
        scale=draw(st.sampled_from([1.0, 0.3, 1 / 65536, 1e30])),
        momentum=draw(st.sampled_from([0.9, 0.0, 1.0])),
        decay=draw(st.sampled_from([1.0, 0.999, 0.5])),
    )
    args[5] *= draw(st.sampled_from([0.0, 1e-3, 1e-30, 2.0]))
    args[7] += draw(st.integers(0, 1))
    args[8] += draw(st.integers(0, 1))
    return args


def sample(device: str = "cpu") -> list:
    """Valid arguments: 12 slots, of which this rank leads 6."""
    grads, weights = ([torch.randn(entries) for entries in PAIR.entries] for _ in range(2))
    args = arguments_of(PAIR, grads, weights, DRAW, velocity=True, means=True)
    args[6] = args[6][:6].clone()
    return on(device, args)


@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    agrees("accumulate_select", args, device)


@pytest.mark.parametrize("way", [{}, {"means": True}, {"velocity": True}, {"transform": True}])
def test_within_other_memory(device: str, way: dict) -> None:
    """Unaligned tensors. No entry beyond the end counts, in the block's mean for example, or is written."""
    sizes = [1, 3, 255, 259, 510, 512]
    layout = layout_of([(n, 4 * -(-n // BLOCK)) for n in sizes for _ in DTYPES])
    grads = [values(n, "normal", n).to(dtype) for n in sizes for dtype in DTYPES]
    weights = [] if way.get("transform") else [grad.flip(0) for grad in grads]
    agrees_within("accumulate_select", arguments_of(layout, grads, weights, Draw(0, 1, 1, 0, 7, 2**31), **way), device)


@pytest.mark.parametrize("kind", ["normal", "equal", "zero"])
@pytest.mark.parametrize("weighted", [True, False])
def test_counts(device: str, kind: str, weighted: bool) -> None:
    """So many slots a block, of which half are explored."""
    n, counts = 19 * BLOCK + 3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 256]
    layout = layout_of([(n, 20 * count) for count in counts])
    grads = [values(n, kind, count) for count in counts]
    weights = [values(n, "normal", 1) for _ in counts] if weighted else []
    agrees("accumulate_select", arguments_of(layout, grads, weights, Draw(3, 1, 1, 0, 11, 2**31), kind="zero"), device)


def test_many_blocks(device: str) -> None:
    layout = layout_of([(1201 * BLOCK, 5000), (300, 0), (797 * BLOCK, 3600)])
    for phase in (0, -77, 2500):
        grads, weights = ([values(n, kind, n) for n in layout.entries] for kind in ("normal", "equal"))
        with threads(3):
            agrees("accumulate_select", arguments_of(layout, grads, weights, Draw(phase, 7, 3, 1, 11, 2**31)), device)


def test_many_pieces(device: str) -> None:
    layout = layout_of([(1 + 7 * i % 700, i % 3) for i in range(400)])
    grads = [
        values(n, "normal", n).to(DTYPES[i % 3]) if i % 5 else torch.empty(0) for i, n in enumerate(layout.entries)
    ]
    with threads(3):
        args = agrees("accumulate_select", arguments_of(layout, grads, clone(grads), DRAW, velocity=True), device)
    assert args[8].bool().tolist() == [bool(i % 5) for i in range(400)], "touched"


def test_an_empty_gradient_skips_its_piece(device: str) -> None:
    args = sample(device)
    args[0][0] = torch.empty(0, device=device)
    before = clone(args)
    ops.accumulate_select(*args)
    for number in (1, 3):
        assert torch.equal(args[number][:512], before[number][:512]) and args[number][512:712].any()
    assert args[8].tolist() == [0, 1] and args[9][:2].eq(3).all()
    assert args[6][:4].eq(170).all() and args[6][4:].ne(170).all()


def test_block_means_are_subtracted(device: str) -> None:
    """The mean is of the entries without padding; nothing is subtracted in a block with an infinity."""
    layout = layout_of([(600, 0)])
    grad = torch.randn(600) + 1.0
    grad[300] = float("inf")
    args = on(device, arguments_of(layout, [grad.clone()], [], DRAW, means=True))
    args[1].zero_()
    args[9].zero_()
    ops.accumulate_select(*args)
    residual, block_means, blocks = args[1].cpu(), args[9].cpu(), grad.split(BLOCK)
    for i in (0, 2):
        torch.testing.assert_close(block_means[i], blocks[i].mean())
        inside = residual[i * BLOCK :][: len(blocks[i])]
        torch.testing.assert_close(inside, blocks[i] - blocks[i].mean())
    assert block_means[1] == 0 and torch.equal(residual[BLOCK : BLOCK + 44], blocks[1][:44]) and residual[300] == 0
    assert not residual[600:].any() and args[7].item() == 1


def test_transform_is_orthonormal(device: str) -> None:
    """The residual takes the coefficients of the padded gradient: Parseval, and the largest are selected."""
    grad = torch.zeros(600)
    grad[260:264] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    grad[599] = 16.0
    draw = Draw(0, 1, 1, 0, 7, 0)
    args = on(device, arguments_of(layout_of([(600, 6)]), [grad.clone()], [], draw, transform=True, decay=0.5))
    args[1].fill_(1.0)
    ops.accumulate_select(*args)
    residual = args[1].cpu() - 0.5
    assert torch.equal(residual[:BLOCK], torch.zeros(BLOCK))
    assert residual[BLOCK : 2 * BLOCK].square().sum() == 4 and residual[2 * BLOCK :].square().sum() == 256
    assert (residual[2 * BLOCK :].abs() == 1).all()
    assert torch.equal(args[0][0].cpu(), grad), "scatter writes all of it"
    # An alternating pattern: its coefficients are 0 where the lowest bit of the index is.
    assert (args[6][2:4] % 2 == 1).all() and not residual[BLOCK : 2 * BLOCK : 2].any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 2.0**60, -3e38])
def test_what_cannot_be_transformed_does_not_spread(device: str, bad: float) -> None:
    grad = torch.zeros(600)
    grad[3], grad[4] = bad, 8.0
    args = on(device, arguments_of(layout_of([(600, 0)]), [grad], [], DRAW, transform=True))
    args[1].zero_()
    ops.accumulate_select(*args)
    assert args[7].item() == 1
    assert (args[1][:BLOCK].abs() == 0.5).all() and not args[1][BLOCK:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [{}, {"means": True}, {"transform": True}])
def test_touched(device: str, dtype: torch.dtype, way: dict) -> None:
    """Set by one entry other than zero, wherever it is, and never unset. A thread's part has 128 blocks or more."""
    n = 299 * BLOCK + 3
    layout = layout_of([(5, 1), (n, 300), (5, 0)])

    def touched(grad: torch.Tensor, before: int = 0, scale: float = 1.0) -> int:
        grads = [torch.zeros(5, dtype=dtype), grad.to(dtype), torch.zeros(5, dtype=dtype)]
        args = on(device, arguments_of(layout, grads, [], DRAW, scale=scale, **way))
        args[8][1] += before
        with threads(3):
            ops.accumulate_select(*args)
        assert args[8][0] == args[8][2] == 0
        return int(args[8][1])

    zeros = values(n, "signed zeros", 1)
    assert touched(zeros) == 0 and touched(zeros, before=1) == 1 and touched(torch.ones(n), before=1) == 1
    for where in (0, 5 * BLOCK + 200, n // 2, n - 1):
        for entry in (1.0, -1.0, float("nan"), float("-inf"), torch.finfo(dtype).smallest_normal):
            grad = zeros.clone()
            grad[where] = entry
            assert touched(grad) == 1, (where, entry)
    assert touched(torch.full((n,), torch.finfo(dtype).smallest_normal), scale=1e-30) == 1, "before the scale"


def changed(**arguments: object) -> list:
    return [arguments.get(f"at{place}", arg) for place, arg in enumerate(sample())]


TRANSFORMED = partial(changed, at2=[], at9=None, at13=True)
WITHOUT = partial(changed, at2=[], at3=None, at9=None)
test_opcheck = opchecks(*(("accumulate_select", make) for make in (sample, TRANSFORMED, WITHOUT)))


BAD = {
    "grads number": (0, lambda x: x[:1], "grads must have 2 tensors, one per piece, got 1"),
    "grads dtype": (0, lambda x: [x[0].double(), x[1]], "grads must be Float, Half or BFloat16, got Double"),
    "grads expanded": (0, lambda x: [x[0][:1].expand(400), x[1]], "dense in memory"),
    "grads strided": (0, lambda x: [torch.randn(800)[::2], x[1]], "dense in memory"),
    "grads too long": (0, lambda x: [torch.randn(900), x[1]], "grads|weights|piece 0 has 2 blocks"),
    "weights number": (2, lambda x: x[:1], "weights must have 2 tensors, one per piece, got 1"),
    "weights dtype": (2, lambda x: [x[0].half(), x[1]], "weights must be Float, got Half"),
    "weights numel": (2, lambda x: [x[0][:399], x[1]], "weights must have 400 entries, got 399"),
    "residual dtype": (1, lambda x: x.half(), "residual must be Float"),
    "residual size": (1, lambda x: x[:700].clone(), "multiple of 256"),
    "residual short": (1, lambda x: x[:512].clone(), "velocity must have 512"),
    "velocity size": (3, lambda x: x[:512].clone(), "velocity must have 768 entries, got 512"),
    "floors": (5, lambda x: x[:1].clone(), "floors must have 2 entries, got 1"),
    "invalid dtype": (7, lambda x: x.long(), "invalid must be Int, got Long"),
    "touched dtype": (8, lambda x: x.long(), "touched must be Int, got Long"),
    "touched numel": (8, lambda x: x[:1].clone(), "touched must have 2 entries, got 1"),
    "block_means dtype": (9, lambda x: x.double(), "block_means must be Float, got Double"),
    "block_means size": (9, lambda x: x[:2].clone(), "block_means must have 3 entries, got 2"),
    "transform": (13, lambda x: True, "transform goes without weights and block_means"),
    **bad_selection(pieces=4, indices=6, draw=14),
}


test_refuses = refusals("accumulate_select", sample, BAD)
