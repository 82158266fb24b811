"""put against hvd_compress/reference.py, to the last bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICES,
    bounded,
    check_device,
    clone,
    dtypes,
    kinds,
    layouts,
    needs_compiled,
    offsets_of,
    payload_dtypes,
    phases,
    same,
    seeds,
    shaped,
    values,
)

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

pytestmark = needs_compiled
NAMES = ["grads", "residual", "offsets", "segments", "total", "sent"]


@st.composite
def gradients(draw: st.DrawFn, entries: int, seed: int) -> torch.Tensor:
    dtype = draw(dtypes)
    if draw(st.integers(0, 4)) == 0:
        return torch.empty(0, dtype=dtype)
    shape = (1, entries // 4, 2, 2) if entries % 4 == 0 else (entries,)
    return shaped(values(entries, "normal", seed).to(dtype), shape)


@st.composite
def arguments(draw: st.DrawFn) -> list:
    layout, seed, dtype = draw(layouts()), draw(seeds), draw(payload_dtypes)
    return [
        [draw(gradients(entries, seed + i)) for i, entries in enumerate(layout.entries)],
        values(layout.blocks * BLOCK, draw(kinds), seed + 10),
        offsets_of(layout, seed + 11, draw(st.sampled_from([256, 20, 1]))),
        layout.tensor("cpu"),
        values(layout.slots, draw(kinds), seed + 12).to(dtype),
        values(layout.slots, draw(st.sampled_from(["normal", "normal", "wild"])), seed + 13).to(dtype),
        draw(phases),
        draw(st.sampled_from([1.0, 0.25, 1 / 3])),
    ]


def on(device: str, args: list) -> list:
    moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    moved[0] = [grad.to(device) for grad in args[0]]
    return moved


def sample(device: str = "cpu") -> list:
    segments = torch.tensor([[0, 2, 0, 8], [2, 1, 8, 5]])
    tensors = [torch.randn(3 * BLOCK), torch.arange(13).to(torch.uint8), segments, torch.randn(13), torch.randn(13)]
    return on(device, [[torch.zeros(400), torch.zeros(256).bfloat16()], *tensors, 3, 0.5])


def check(args: list, device: str) -> None:
    got, want = on(device, clone(args)), clone(args)
    ops.put(*got)
    reference.put(*want)
    for i, (mine, theirs) in enumerate(zip(got[0], want[0], strict=True)):
        assert same(mine, theirs), f"gradient {i}"
    for name, mine, theirs in zip(NAMES[1:], got[1:], want[1:], strict=False):
        assert same(mine, theirs), name


@pytest.mark.parametrize("device", DEVICES)
@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    check_device(device)
    check(args, device)


@pytest.mark.parametrize("device", DEVICES)
def test_more_tensors_than_a_launch_takes(device: str) -> None:
    """400 parameters of every dtype: the CUDA kernel gets their addresses in several launches."""
    check_device(device)
    count, kinds_of = 400, [torch.float32, torch.float16, torch.bfloat16]
    rows = [[3 * i, 3, 7 * i, 7] for i in range(count)]
    grads = [torch.full((700,), float(i)).to(kinds_of[i % 3]) if i % 5 else torch.empty(0) for i in range(count)]
    slots = 7 * count
    total = values(slots, "wild", 3)
    offsets = torch.randint(0, 256, (slots,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    residual = values(count * 3 * BLOCK, "normal", 2)
    check([grads, residual, offsets, torch.tensor(rows), total, values(slots, "normal", 4), 1, 0.25], device)


@pytest.mark.parametrize("device", DEVICES)
def test_overflow_goes_back_once(device: str) -> None:
    """Two slots of one entry whose sum overflowed: the gradient shows it, the residual gets it back, once."""
    check_device(device)
    args = sample(device)
    args[1] = torch.zeros(3 * BLOCK, device=device)
    args[2] = torch.full((13,), 9, dtype=torch.uint8, device=device)
    args[4] = torch.full((13,), float("inf"), device=device)
    args[5] = torch.full((13,), 2.0, device=device)
    ops.put(*args)
    assert args[1].view(3, BLOCK)[:, 9].tolist() == [2.0] * 3
    assert args[1].sum() == 6
    assert args[0][0][9] == float("inf")


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    check_device(device)
    torch.library.opcheck(torch.ops.hvd_compress.put.default, tuple(sample(device)))


BAD = {
    "grads number": (0, lambda x: x[:1], "grads has to have 2 tensors, one a segment, got 1"),
    "grads dtype": (0, lambda x: [x[0].double(), x[1]], "has to be Float, Half or BFloat16, got Double"),
    "grads strided": (0, lambda x: [torch.zeros(800)[::2], x[1]], "dense in memory"),
    "residual": (1, lambda x: x[:700].clone(), "multiple of 256"),
    "offsets": (2, lambda x: x[:12].clone(), "total has to have 12 entries, got 13"),
    "segments": (3, lambda x: x.flip(0).contiguous(), "segments have to follow"),
    "total": (4, lambda x: x.double(), "total has to be Float or Half, got Double"),
    "sent dtype": (5, lambda x: x.half(), "sent has to be Float, got Half"),
    "sent numel": (5, lambda x: x[:12].clone(), "sent has to have 13 entries, got 12"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    index, change, message = BAD[case]
    args = sample()
    args[index] = change(args[index])
    before = clone(args)
    with pytest.raises(RuntimeError, match=message):
        ops.put(*args)
    for mine, theirs in zip([*args[0], *args[1:6]], [*before[0], *before[1:6]], strict=True):
        assert torch.equal(mine, theirs)
