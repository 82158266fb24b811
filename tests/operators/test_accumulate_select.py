"""accumulate_select against its reference, bitwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICES,
    KINDS,
    bad_selection,
    bounded,
    check_device,
    clone,
    dtypes,
    kinds,
    needs_compiled,
    on,
    phases,
    same,
    seeds,
    shaped,
    shapes,
    slot_counts,
    threads,
    values,
    within_memory,
)

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

pytestmark = needs_compiled
NO_DEFERRED = [None, None, None, 0, 0, 0]
NAMES = ["grad", "residual", "weight", "velocity", "floor", "indices", "invalid", "touched", "block_means"]


def deferred(slots: int, first: int, phase: int, seed: int) -> list:
    """The deferred update of ``slots`` slots from ``first`` on."""
    total = first + slots + 3
    indices = torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return [indices, values(total, "wild", seed + 1), values(total, "normal", seed + 2), slots, first, phase]


@st.composite
def arguments(draw: st.DrawFn) -> list:
    shape, dtype, seed = draw(shapes()), draw(dtypes), draw(seeds)
    n = torch.Size(shape).numel()
    blocks = -(-n // BLOCK) + draw(st.sampled_from([0, 0, 0, 1]))
    slots = draw(slot_counts(blocks))
    first_slot, phase = draw(st.integers(0, 2000)), draw(phases)
    run, ranks = draw(st.one_of(st.integers(1, 4), st.integers(1, 3000))), draw(st.integers(1, 8))
    position = draw(st.integers(0, ranks - 1))
    residual = torch.zeros(blocks * BLOCK)
    transform = draw(st.integers(0, 2)) == 0
    used = blocks * BLOCK if transform else n
    residual[:used] = values(used, draw(st.sampled_from(["normal", "equal", "zero", "tiny", "huge"])), seed + 1)
    velocity = values(blocks * BLOCK, "normal", seed + 2) if draw(st.booleans()) else None
    last = int(reference.slots_before(torch.tensor(first_slot + slots), run, ranks, position))
    return [
        shaped(values(n, draw(st.sampled_from([*KINDS, "signed zeros"])), seed).to(dtype), shape),
        residual,
        shaped(values(n, draw(kinds), seed + 3).to(dtype), shape) if not transform and draw(st.booleans()) else None,
        velocity,
        torch.tensor([draw(st.sampled_from([0.0, 1e-3, 1e-30, 2.0]))]),
        torch.full((last + draw(st.integers(0, 9)),), 170, dtype=torch.uint8),  # the rest must not be written
        *(torch.tensor([draw(st.integers(0, 1))], dtype=torch.int32) for _ in ("invalid", "touched")),
        torch.full((blocks,), 3.0) if not transform and draw(st.booleans()) else None,
        draw(st.sampled_from([1.0, 0.3, 1 / 65536, 1e30])),
        draw(st.sampled_from([0.9, 0.0, 1.0])),
        slots,
        first_slot,
        phase,
        run,
        ranks,
        position,
        draw(st.integers(0, 2**32 - 1)),
        draw(st.sampled_from([0, 2**30, 2**32 - 1, 2**32])),
        *(
            deferred(draw(slot_counts(blocks)), draw(st.integers(0, 99)), draw(phases), seed + 4)
            if draw(st.booleans())
            else NO_DEFERRED
        ),
        draw(st.sampled_from([1.0, 0.999, 0.5])),
        transform,
    ]


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def sample(device: str = "cpu") -> list:
    """Valid arguments: 600 entries in 3 blocks, 12 slots, of which this rank leads 6."""
    tensors = [torch.randn(600), torch.zeros(3 * BLOCK), torch.randn(600), torch.zeros(3 * BLOCK), torch.tensor([1e-3])]
    tensors += [torch.zeros(6, dtype=torch.uint8), flag(), flag(), torch.zeros(3)]
    return on(device, [*tensors, 1.0, 0.9, 12, 0, 5, 1, 2, 0, 7, 2**31, *deferred(10, 2, 3, 1), 0.9, False])


@pytest.mark.parametrize("device", DEVICES)
@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    check_device(device)
    got, want = on(device, clone(args)), clone(args)
    ops.accumulate_select(*got)
    reference.accumulate_select(*want)
    for name, mine, theirs in zip(NAMES, got, want, strict=False):
        assert same(mine, theirs), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("before", [1, 8])  # 8 entries keep the alignment
@pytest.mark.parametrize("n", [1, 3, 255, 259, 510])
def test_within_other_memory(device: str, n: int, before: int) -> None:
    """No entry beyond the end counts, in the block's mean for example, or is written."""
    check_device(device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        blocks = -(-n // BLOCK)
        want = [values(n, "normal", 1).to(dtype), torch.zeros(blocks * BLOCK), values(n, "normal", 2).to(dtype), None]
        want += [torch.ones(1), torch.zeros(4 * blocks, dtype=torch.uint8), flag(), flag()]
        want += [torch.zeros(blocks), 0.5, 0.0, 4 * blocks, 0, 0, 1, 1, 0, 7, 2**31]
        with within_memory(want, before, device) as got:
            ops.accumulate_select(*got)
        reference.accumulate_select(*want)
        for name, mine, theirs in zip(NAMES, got, want, strict=False):
            assert same(mine, theirs), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8, 9, 31, 33, 64, 100, 255, 256])
@pytest.mark.parametrize("kind", ["normal", "equal", "zero"])
@pytest.mark.parametrize("weighted", [True, False])
def test_counts(device: str, count: int, kind: str, weighted: bool) -> None:
    check_device(device)
    n, blocks = 19 * BLOCK + 3, 20
    residual = torch.zeros(blocks * BLOCK)
    weight, floor = values(n, "normal", 1) if weighted else None, torch.tensor([0.1])
    indices = torch.zeros(blocks * count, dtype=torch.uint8)
    args = [values(n, kind, 2), residual, weight, None, floor, indices, flag(), flag()]
    args += [None, 1.0, 0.0, blocks * count, 0, 3, 1, 1, 0, 11, 2**31]
    got, want = on(device, clone(args)), clone(args)
    ops.accumulate_select(*got)
    reference.accumulate_select(*want)
    assert same(got[5], want[5])


@pytest.mark.parametrize("device", DEVICES)
def test_many_blocks(device: str) -> None:
    check_device(device)
    n = 2000 * BLOCK
    for phase in (0, -77, 2500):
        tensors = [values(n, "normal", 1), values(n, "normal", 2), values(n, "equal", 3), None, torch.tensor([0.1])]
        tensors += [torch.zeros(4000, dtype=torch.uint8), flag(), flag(), torch.zeros(2000)]
        args = [*tensors, 1.0, 0.0, 8600, 123, phase, 7, 3, 1, 11, 2**31, *deferred(9700, 5, phase + 1, 12)]
        got, want = on(device, clone(args)), clone(args)
        with threads(3):
            ops.accumulate_select(*got)
        reference.accumulate_select(*want)
        for name, mine, theirs in zip(NAMES, got, want, strict=False):
            assert same(mine, theirs), name


@pytest.mark.parametrize("device", DEVICES)
def test_unaligned_gradient(device: str) -> None:
    """A view into another tensor, not aligned to 16 bytes."""
    check_device(device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        args = sample(device)
        memory = torch.randn(601, device=device).to(dtype)
        args[0], args[2] = memory[1:], torch.randn(603, device=device).to(dtype)[3:]
        want = on("cpu", clone(args))
        first = memory[0].clone()
        ops.accumulate_select(*args)
        reference.accumulate_select(*want)
        assert memory[0] == first
        for name, mine, theirs in zip(NAMES, args, want, strict=False):
            assert same(mine, theirs), name


@pytest.mark.parametrize("device", DEVICES)
def test_block_means_are_subtracted(device: str) -> None:
    """The mean is of the entries without padding; nothing is subtracted in a block with an infinity."""
    check_device(device)
    args = sample(device)[:19]
    grad = args[0].clone() + 1.0
    grad[300] = float("inf")
    args[0], args[3] = grad.clone(), None
    ops.accumulate_select(*args)
    residual, block_means = args[1].cpu(), args[8].cpu()
    blocks = grad.cpu().split(BLOCK)
    for i in (0, 2):
        torch.testing.assert_close(block_means[i], blocks[i].mean())
        inside = residual[i * BLOCK :][: len(blocks[i])]
        torch.testing.assert_close(inside, blocks[i] - blocks[i].mean())
    assert block_means[1] == 0 and torch.equal(residual[BLOCK : BLOCK + 44], blocks[1][:44]) and residual[300] == 0
    assert not residual[600:].any() and args[6].item() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_deferred_update_is_done_first(device: str) -> None:
    """As in scatter: the later of two slots counts, a non-finite mean is skipped; padding is written."""
    check_device(device)
    args = sample(device)
    args[0].fill_(1.0)
    args[1].fill_(10.0)
    args[3].fill_(10.0)
    args[8] = None
    indices = torch.tensor([5, 5, 7, 9, 255], dtype=torch.uint8)
    mean, error = torch.tensor([1.0, 1.0, float("nan"), 1.0, 1.0]), torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0])
    args[19:] = on(device, [indices, mean, error, 5, 0, 2])
    counts = reference.slot_start(torch.arange(4), 5, 3, 2).diff().tolist()
    assert counts == [2, 2, 1]
    ops.accumulate_select(*args)
    residual, velocity = args[1].cpu(), args[3].cpu()
    assert (residual[5].item(), velocity[5].item()) == (4.0, 1.0), "the error 3, plus the gradient"
    assert (residual[BLOCK + 7].item(), velocity[BLOCK + 7].item()) == (20.0, 10.0), "no deferred update"
    assert (residual[BLOCK + 9].item(), velocity[BLOCK + 9].item()) == (6.0, 1.0)
    assert (residual[2 * BLOCK + 255].item(), velocity[2 * BLOCK + 255].item()) == (6.0, 0.0)
    assert int((residual[:600] == 20.0).sum()) == 598


@pytest.mark.parametrize("device", DEVICES)
def test_transform_is_orthonormal(device: str) -> None:
    """The residual takes the coefficients of the padded gradient: Parseval, and the largest are selected."""
    check_device(device)
    grad = torch.zeros(600)
    grad[260:264] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    grad[599] = 16.0
    args = on(device, [grad.clone(), torch.ones(3 * BLOCK), None, None, torch.zeros(1)])
    args += on(device, [torch.zeros(6, dtype=torch.uint8), flag(), flag(), None])
    ops.accumulate_select(*args, 1.0, 0.0, 6, 0, 0, 1, 1, 0, 7, 0, *NO_DEFERRED, 0.5, True)
    residual = args[1].cpu() - 0.5
    assert torch.equal(residual[:BLOCK], torch.zeros(BLOCK))
    assert residual[BLOCK : 2 * BLOCK].square().sum() == 4 and residual[2 * BLOCK :].square().sum() == 256
    assert (residual[2 * BLOCK :].abs() == 1).all()
    assert torch.equal(args[0].cpu(), grad), "scatter writes all of it"
    # An alternating pattern: its coefficients are 0 where the lowest bit of the index is.
    assert (args[5][2:4] % 2 == 1).all() and not residual[BLOCK : 2 * BLOCK : 2].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 2.0**60, -3e38])
def test_what_cannot_be_transformed_does_not_spread(device: str, bad: float) -> None:
    check_device(device)
    grad = torch.zeros(600)
    grad[3], grad[4] = bad, 8.0
    args = on(device, [grad, torch.zeros(3 * BLOCK), None, None, torch.zeros(1), torch.zeros(0, dtype=torch.uint8)])
    args += on(device, [flag(), flag(), None])
    ops.accumulate_select(*args, 1.0, 0.0, 0, 0, 0, 1, 1, 0, 7, 0, *NO_DEFERRED, 1.0, True)
    assert args[6].item() == 1
    assert (args[1][:BLOCK].abs() == 0.5).all() and not args[1][BLOCK:].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["weight", "means", "transform"])
def test_touched(device: str, dtype: torch.dtype, way: str) -> None:
    """Set by one entry other than zero, wherever it is, and never unset. A thread's part has 128 blocks or more."""
    check_device(device)
    blocks = 300
    n = (blocks - 1) * BLOCK + 3

    def touched(grad: torch.Tensor, before: int = 0, scale: float = 1.0) -> int:
        weight = torch.ones(n, dtype=dtype) if way == "weight" else None
        means = torch.zeros(blocks) if way == "means" else None
        args = [grad.to(dtype), torch.randn(blocks * BLOCK), weight, None, torch.ones(1)]
        args += [torch.zeros(blocks, dtype=torch.uint8), flag(), flag() + before, means, scale, 0.0, blocks, 0, 0, 1, 1]
        args = on(device, [*args, 0, 7, 0, *NO_DEFERRED, 1.0, way == "transform"])
        with threads(3):
            ops.accumulate_select(*args)
        return args[7].item()

    zeros = values(n, "signed zeros", 1)
    assert touched(zeros) == 0 and touched(zeros, before=1) == 1 and touched(torch.ones(n), before=1) == 1
    for where in (0, 5 * BLOCK + 200, n // 2, n - 1):
        for entry in (1.0, -1.0, float("nan"), float("-inf"), torch.finfo(dtype).smallest_normal):
            grad = zeros.clone()
            grad[where] = entry
            assert touched(grad) == 1, (where, entry)
    assert touched(torch.full((n,), torch.finfo(dtype).smallest_normal), scale=1e-30) == 1, "before the scale"


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    check_device(device)
    torch.library.opcheck(torch.ops.hvd_compress.accumulate_select.default, tuple(sample(device)))
    for optional in (2, 3, 8):
        without = sample(device)
        without[optional] = None
        torch.library.opcheck(torch.ops.hvd_compress.accumulate_select.default, tuple(without))
    transformed = [*sample(device)[:19], *NO_DEFERRED, 0.9, True]
    transformed[2] = transformed[8] = None
    for args in (sample(device)[:19], transformed):
        torch.library.opcheck(torch.ops.hvd_compress.accumulate_select.default, tuple(args))


BAD = {
    "grad dtype": (0, lambda x: x.double(), "grad must be Float, Half or BFloat16, got Double"),
    "grad expanded": (0, lambda x: x[:1].expand(600), "dense in memory"),
    "grad strided": (0, lambda x: torch.randn(1200)[::2], "dense in memory"),
    "grad too long": (0, lambda x: torch.randn(900), "grad|weight"),
    "weight dtype": (2, lambda x: x.half(), "weight must be Float, got Half"),
    "weight numel": (2, lambda x: x[:599], "weight must have 600 entries, got 599"),
    "residual dtype": (1, lambda x: x.half(), "residual must be Float"),
    "residual size": (1, lambda x: x[:700].clone(), "multiple of 256"),
    "residual short": (1, lambda x: x[:512].clone(), "velocity|at most 512"),
    "velocity size": (3, lambda x: x[:512].clone(), "velocity must have 768 entries, got 512"),
    "floor": (4, lambda x: x.expand(2).clone(), "floor must have 1 entries, got 2"),
    "invalid dtype": (6, lambda x: x.long(), "invalid must be Int, got Long"),
    "touched dtype": (7, lambda x: x.long(), "touched must be Int, got Long"),
    "touched numel": (7, lambda x: x.expand(2).clone(), "touched must have 1 entries, got 2"),
    "block_means dtype": (8, lambda x: x.double(), "block_means must be Float, got Double"),
    "block_means size": (8, lambda x: x[:2].clone(), "block_means must have 3 entries, got 2"),
    **bad_selection(indices=5, slots=11),
    "deferred_indices dtype": (19, lambda x: x.int(), "deferred_indices must be Byte, got Int"),
    "deferred_indices missing": (19, lambda x: None, "must be given together"),
    "deferred_mean missing": (20, lambda x: None, "must be given together"),
    "deferred_mean numel": (20, lambda x: x[:14].clone(), "deferred_mean must have 15 entries, got 14"),
    "deferred_mean dtype": (20, lambda x: x.double(), "deferred_mean must be Float, got Double"),
    "deferred_error numel": (21, lambda x: x[:14].clone(), "deferred_error must have 15 entries, got 14"),
    "deferred_error dtype": (21, lambda x: x.double(), "deferred_error must be Float, got Double"),
    "deferred_slots": (22, lambda x: 14, "within 3 blocks and 15 slots, got 14 and 2"),
    "deferred_slots < 0": (22, lambda x: -1, "within 3 blocks and 15 slots, got -1 and 2"),
    "transform": (26, lambda x: True, "transform goes without weight and block_means"),
    "deferred_first_slot": (23, lambda x: -1, "within 3 blocks and 15 slots, got 10 and -1"),
}


@pytest.mark.parametrize("shift", [-15, -14, 0, 5, 6])
def test_overlap(shift: int) -> None:
    """6 and 15 bytes: they may be adjacent."""
    args = sample()
    memory = torch.zeros(60, dtype=torch.uint8)
    args[5], args[19] = memory[30:36], memory[30 + shift : 45 + shift]
    if shift in (-15, 6):
        ops.accumulate_select(*args)
        return
    with pytest.raises(RuntimeError, match="deferred_indices must not overlap indices"):
        ops.accumulate_select(*args)


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    index, change, message = BAD[case]
    args = sample()
    args[index] = change(args[index])
    before = clone(args)
    with pytest.raises(RuntimeError, match=message):
        ops.accumulate_select(*args)
    for name, mine, theirs in zip(NAMES, args, before, strict=False):
        assert mine is None or torch.equal(mine, theirs), f"{name} was changed"
