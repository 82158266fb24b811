"""scatter against its reference, bitwise."""

import itertools
from functools import partial

import pytest
import torch
from checks import EMULATED, agrees, bounded, clone, on, opchecks, refusals, same, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY, gradients, kinds, layouts, phases, random_indices, seeds, values

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK


@st.composite
def arguments(draw: st.DrawFn) -> list:
    layout, seed = draw(layouts()), draw(seeds)
    n = layout.blocks * BLOCK
    transform = draw(st.integers(0, 2)) == 0
    return [
        draw(gradients(layout, st.just("normal"), seed)),
        values(n, draw(kinds), seed + 10),
        values(n, "normal", seed + 11) if draw(st.booleans()) else None,
        random_indices(layout, seed + 12, draw(st.sampled_from([256, 20, 1]))),
        layout.tensor(),
        values(layout.slots, draw(st.sampled_from(["normal", "huge", "wild"])), seed + 13),
        values(layout.slots, draw(kinds), seed + 14),
        draw(phases),
        draw(st.sampled_from([1.0, 0.25, 1 / 3])),
        values(layout.blocks, draw(st.sampled_from(["normal", "huge", "wild"])), seed + 15)
        if not transform and draw(st.booleans())
        else None,
        transform,
        transform and draw(st.booleans()),
    ]


def sample(device: str = "cpu") -> list:
    pieces = torch.tensor([[0, 2, 0, 8], [2, 1, 8, 5]])
    tensors = [torch.randn(3 * BLOCK), torch.randn(3 * BLOCK), torch.arange(13).to(torch.uint8), pieces]
    tensors += [torch.randn(13), torch.randn(13)]
    return on(device, [[torch.zeros(400), torch.zeros(256).bfloat16()], *tensors, 3, 0.5, torch.randn(3), False, False])


@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    agrees("scatter", args, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_blocks(device: str, dtype: torch.dtype) -> None:
    """Every phase, and every combination of what is optional."""
    grads = [torch.zeros(entries).to(dtype) for entries in MANY.entries]
    n, slots = MANY.blocks * BLOCK, MANY.slots
    tensors = [values(n, "normal", 1), values(n, "normal", 2), random_indices(MANY, 3, 256), MANY.tensor()]
    means, error = values(MANY.blocks, "normal", 6), values(slots, "normal", 5)
    cases = [[None], [means], [None, True, False], [None, True, True]]
    phases = itertools.cycle((1,) if EMULATED else (0, 1, -77, 2500, 2**40))
    with threads(3):
        for rest, phase in zip(cases, phases, strict=False):
            agrees("scatter", [grads, *tensors, values(slots, "wild", 4), error, phase, 0.25, *rest], device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unaligned_gradients(device: str, dtype: torch.dtype) -> None:
    """Views into larger tensors, above and below the size for non-temporal stores; nothing outside them is written."""
    for blocks, writes in itertools.product((3,) if EMULATED else (3, 5000), ("means", "entries", "transform")):
        memory = torch.zeros(blocks * BLOCK + 2, device=device).to(dtype)
        memory[0] = memory[-1] = 1
        slots = 2 * blocks
        indices = torch.randint(0, 256, (slots,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        tensors = [values(blocks * BLOCK, "normal", 2), None, indices, torch.tensor([[0, blocks, 0, slots]])]
        more = [values(slots, "normal", 3), values(slots, "normal", 4), 1, 0.25]
        more += [values(blocks, "normal", 5) if writes == "means" else None, writes == "transform"]
        want = [[memory[1:-1].cpu().clone()], *clone([*tensors, *more])]
        ops.scatter([memory[1:-1]], *on(device, [[], *tensors, *more])[1:])
        reference.scatter(*want)
        assert same(memory[1:-1], want[0][0])
        assert memory[0] == memory[-1] == 1


def test_many_tensors(device: str) -> None:
    """400 pieces of all dtypes."""
    count, kinds_of = 400, [torch.float32, torch.float16, torch.bfloat16]
    rows = [[3 * i, 3, 7 * i, 7] for i in range(count)]
    grads = [torch.full((700,), float(i)).to(kinds_of[i % 3]) if i % 5 else torch.empty(0) for i in range(count)]
    slots = 7 * count
    indices = torch.randint(0, 256, (slots,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    residual = values(count * 3 * BLOCK, "normal", 2)
    tensors = [residual, residual.flip(0), indices, torch.tensor(rows)]
    more = [values(slots, "wild", 3), values(slots, "normal", 4), 1, 0.25]
    agrees("scatter", [grads, *tensors, *more], device)
    agrees("scatter", [grads, *tensors, *more, values(count * 3, "normal", 5)], device)
    agrees("scatter", [grads, *tensors, *more, None, True, True], device)


@pytest.mark.parametrize("slots", [7, 40, 200])
def test_last_slot_of_an_entry_counts(device: str, slots: int) -> None:
    """All slots have the same entry. The last mean is not finite: only the gradient is assigned."""
    mean, error = torch.arange(slots).float(), torch.arange(slots).float() + 0.5
    mean[-1] = float("inf")
    indices, pieces = torch.full((slots,), 9, dtype=torch.uint8), torch.tensor([[0, 1, 0, slots]])
    tensors = [torch.full((BLOCK,), -1.0), torch.full((BLOCK,), -2.0), indices, pieces, mean, error]
    args = on(device, [[torch.zeros(100)], *tensors, 0, 0.5])
    ops.scatter(*args)
    (grad,), residual, velocity = args[:3]
    assert (grad[9].item(), residual[9].item(), velocity[9].item()) == (float("inf"), slots - 1.5, 0.0)
    assert (int((grad != 0).sum()), int((residual != -1).sum()), int((velocity != -2).sum())) == (1, 1, 1)


def test_scatter_at_does_not_synchronise() -> None:
    """On meta tensors, operations that would synchronise the GPU fail. The pieces are on the host."""
    grads, residual, velocity, indices, _, mean, error, phase, scale, means, *_ = on("meta", sample())
    pieces = sample()[4]
    where = reference.flat_positions(indices, pieces, phase)
    assert where.shape == mean.shape
    reference.scatter_at(grads, residual, velocity, where, pieces, mean, error, scale, means)


def test_skipped_gradient(device: str) -> None:
    """An empty gradient is skipped, but the residual is updated."""
    args = sample(device)
    args[0] = [torch.empty(0, device=device)] * 2
    where = reference.flat_positions(args[3], args[4], args[7])
    ops.scatter(*args)
    assert torch.equal(args[1][where], args[6])
    assert args[2][where].eq(0).all()


def without(optional: int) -> list:
    return [None if place == optional else arg for place, arg in enumerate(sample())]


test_opcheck = opchecks(("scatter", sample), *(("scatter", partial(without, optional)) for optional in (2, 9)))


BAD = {
    "grads number": (0, lambda x: x[:1], "grads must have 2 tensors, one per piece, got 1"),
    "grads dtype": (0, lambda x: [x[0].double(), x[1]], "must be Float, Half or BFloat16, got Double"),
    "grads strided": (0, lambda x: [torch.zeros(800)[::2], x[1]], "dense in memory"),
    "residual": (1, lambda x: x[:700].clone(), "residual must have a multiple of 256 entries, got 700"),
    "velocity": (2, lambda x: x[:512].clone(), "velocity must have 768 entries, got 512"),
    "velocity dtype": (2, lambda x: x.half(), "velocity must be Float, got Half"),
    "indices": (3, lambda x: x[:12].clone(), "mean must have 12 entries, got 13"),
    "pieces": (4, lambda x: x.flip(0).contiguous(), "pieces must follow"),
    "mean": (5, lambda x: x.double(), "mean must be Float, got Double"),
    "quantization_error dtype": (6, lambda x: x.half(), "quantization_error must be Float, got Half"),
    "block_means dtype": (9, lambda x: x.double(), "block_means must be Float, got Double"),
    "block_means numel": (9, lambda x: x[:2].clone(), "block_means must have 3 entries, got 2"),
    "transform": (10, lambda x: True, "transform goes without block_means"),
    "sign": (11, lambda x: True, "sign goes with transform"),
    "quantization_error numel": (6, lambda x: x[:12].clone(), "quantization_error must have 13 entries, got 12"),
}


test_refuses = refusals("scatter", sample, BAD)
