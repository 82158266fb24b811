"""take against hvd_compress/reference.py, to the last bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICES,
    bounded,
    check_device,
    clone,
    kinds,
    layouts,
    needs_compiled,
    offsets_of,
    on,
    payload_dtypes,
    phases,
    same,
    seeds,
    values,
)

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

pytestmark = needs_compiled
NAMES = ["residual", "velocity", "offsets", "segments", "invalid", "payload"]


@st.composite
def arguments(draw: st.DrawFn) -> list:
    layout, seed = draw(layouts()), draw(seeds)
    n = layout.blocks * BLOCK
    return [
        values(n, draw(kinds), seed),
        values(n, "normal", seed + 1) if draw(st.booleans()) else None,
        offsets_of(layout, seed + 2, draw(st.sampled_from([256, 20, 1]))),
        layout.tensor("cpu"),
        torch.tensor([draw(st.sampled_from([0, 0, 0, 1]))], dtype=torch.int32),
        torch.full((layout.slots,), 7.0, dtype=draw(payload_dtypes)),
        draw(phases),
        draw(st.sampled_from([float("inf"), 65504.0, 1.0, 1e-3])),
    ]


def sample(device: str = "cpu") -> list:
    segments = torch.tensor([[0, 2, 0, 8], [2, 1, 8, 5]])
    tensors = [torch.randn(3 * BLOCK), torch.randn(3 * BLOCK), torch.randint(0, 256, (13,)).to(torch.uint8), segments]
    tensors += [torch.zeros(1, dtype=torch.int32), torch.zeros(13, dtype=torch.float16)]
    return on(device, [*tensors, 3, 1.0])


@pytest.mark.parametrize("device", DEVICES)
@bounded(250)
@given(args=arguments())
def test_equals_reference(device: str, args: list) -> None:
    check_device(device)
    got, want = on(device, clone(args)), clone(args)
    ops.take(*got)
    reference.take(*want)
    for name, mine, theirs in zip(NAMES, got, want, strict=False):
        assert same(mine, theirs), name


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_lost(device: str) -> None:
    """Residual before = payload + residual after, for every entry, although fp16 rounds."""
    check_device(device)
    args = sample(device)
    args[2] = torch.arange(13, device=device).to(torch.uint8)
    before = args[0].clone()
    ops.take(*args)
    where = reference._positions(args[2], args[3], args[6])
    after = args[0].double()
    after[where] += args[5].double()
    assert torch.equal(after, before.double())
    assert not torch.equal(args[0], before)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    check_device(device)
    torch.library.opcheck(torch.ops.hvd_compress.take.default, tuple(sample(device)))
    without = sample(device)
    without[1] = None
    torch.library.opcheck(torch.ops.hvd_compress.take.default, tuple(without))


BAD = {
    "residual": (0, lambda x: x.double(), "residual has to be Float, got Double"),
    "velocity": (1, lambda x: x[:512].clone(), "velocity has to have 768 entries, got 512"),
    "offsets": (2, lambda x: x.long(), "offsets has to be Byte, got Long"),
    "segments dtype": (3, lambda x: x.int(), "segments has to be Long, got Int"),
    "segments shape": (3, lambda x: x[:, :3].contiguous(), "shape .parameters, 4."),
    "segments order": (3, lambda x: x.flip(0).contiguous(), "segments have to follow"),
    "segments block": (3, lambda x: x + torch.tensor([1, 0, 0, 0]), "within 3 blocks and 13 slots.*in row 1"),
    "segments slots": (3, lambda x: x + torch.tensor([0, 0, 1, 0]), "within 3 blocks and 13 slots.*in row 0"),
    "segments full": (3, lambda x: torch.tensor([[0, 3, 0, 769]]), "segments have to follow"),
    "segments empty": (3, lambda x: torch.tensor([[0, 0, 0, 0]]), "segments have to follow"),
    "invalid": (4, lambda x: x.expand(2).clone(), "invalid has to have 1 entries, got 2"),
    "payload dtype": (5, lambda x: x.bfloat16(), "payload has to be Float or Half, got BFloat16"),
    "payload numel": (5, lambda x: x[:12].clone(), "payload has to have 13 entries, got 12"),
    "limit": (7, lambda x: 0.0, "limit has to be > 0, got 0"),
    "limit NaN": (7, lambda x: float("nan"), "limit has to be > 0, got nan"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case: str) -> None:
    index, change, message = BAD[case]
    args = sample()
    args[index] = change(args[index])
    before = clone(args)
    with pytest.raises(RuntimeError, match=message):
        ops.take(*args)
    for name, mine, theirs in zip(NAMES, args, before, strict=False):
        assert torch.equal(mine, theirs), f"{name} was changed"
