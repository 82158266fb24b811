"""block_means_send and block_means_keep against hvd_compress/reference/block_means.py, bitwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DEVICES,
    agrees,
    agrees_within,
    bounded,
    check_device,
    kinds,
    needs_compiled,
    on,
    refuses,
    seeds,
    threads,
    values,
)

from hvd_compress import ops

pytestmark = needs_compiled
counts = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 257]), st.integers(1, 5000))
MANY = 100_003


def to_send(blocks: int, kind: str, seed: int, velocity: bool) -> list:
    fresh, unsent, memory = (values(blocks, kind, seed + i) for i in range(3))
    out, invalid = torch.full((blocks,), 7.0), torch.zeros(1, dtype=torch.int32)
    return [fresh, unsent, memory if velocity else None, out, invalid, 0.9]


def to_keep(blocks: int, kind: str, seed: int) -> list:
    return [values(blocks, kind, seed + i) for i in range(3)]


@pytest.mark.parametrize("device", DEVICES)
@bounded(100)
@given(blocks=counts, kind=kinds, seed=seeds, velocity=st.booleans())
def test_send_equals_reference(device: str, blocks: int, kind: str, seed: int, velocity: bool) -> None:
    agrees("block_means_send", to_send(blocks, kind, seed, velocity), device)


@pytest.mark.parametrize("device", DEVICES)
@bounded(100)
@given(blocks=counts, kind=kinds, seed=seeds)
def test_keep_equals_reference(device: str, blocks: int, kind: str, seed: int) -> None:
    agrees("block_means_keep", to_keep(blocks, kind, seed), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["normal", "wild"])
def test_many_blocks(device: str, kind: str) -> None:
    with threads(3):
        agrees("block_means_send", to_send(MANY, kind, 5, True), device)
        agrees("block_means_keep", to_keep(MANY, kind, 5), device)


@pytest.mark.parametrize("device", DEVICES)
def test_within_other_memory(device: str) -> None:
    agrees_within("block_means_send", to_send(999, "normal", 5, True), device)
    agrees_within("block_means_keep", to_keep(999, "normal", 5), device)


@pytest.mark.parametrize("device", DEVICES)
def test_not_finite(device: str) -> None:
    check_device(device)
    for place in range(40):
        args = on(device, to_send(40, "normal", 5, True))
        fresh, unsent, velocity, out, invalid, momentum = args
        unsent[place] = fresh[place] = 3e38
        before = unsent.clone(), velocity.clone(), fresh.clone()
        ops.block_means_send(*args)
        assert invalid.tolist() == [1] and not bool(fresh.any()) and torch.equal(out, unsent)
        assert unsent[place] == 3e38 and velocity[place] == before[1][place]
        others = torch.arange(40, device=device) != place
        torch.testing.assert_close(velocity[others], (before[1] * momentum + before[2])[others])
        torch.testing.assert_close(unsent[others], (before[0] + velocity)[others])


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    check_device(device)
    operators = torch.ops.hvd_compress
    torch.library.opcheck(operators.block_means_send.default, tuple(on(device, to_send(9, "normal", 3, True))))
    torch.library.opcheck(operators.block_means_keep.default, tuple(on(device, to_keep(9, "normal", 3))))


BAD_SEND = {
    "fresh dtype": (0, lambda x: x.double(), "fresh must be Float, got Double"),
    "fresh numel": (0, lambda x: x[:8].clone(), "fresh must have 9 entries, got 8"),
    "unsent strided": (1, lambda x: torch.rand(18)[::2], "unsent must be contiguous"),
    "velocity numel": (2, lambda x: x[:8].clone(), "velocity must have 9 entries, got 8"),
    "out dtype": (3, lambda x: x.half(), "out must be Float, got Half"),
    "out numel": (3, lambda x: x[:8].clone(), "out must have 9 entries, got 8"),
    "invalid dtype": (4, lambda x: x.long(), "invalid must be Int, got Long"),
    "invalid numel": (4, lambda x: torch.zeros(2, dtype=torch.int32), "invalid must have 1 entries, got 2"),
}
BAD_KEEP = {
    "mean dtype": (0, lambda x: x.half(), "mean must be Float, got Half"),
    "mean numel": (0, lambda x: x[:8].clone(), "mean must have 9 entries, got 8"),
    "quantization_error numel": (1, lambda x: x[:8].clone(), "quantization_error must have 9 entries, got 8"),
    "unsent dtype": (2, lambda x: x.double(), "unsent must be Float, got Double"),
}


def test_overlap() -> None:
    for place, name in ((0, "fresh"), (2, "velocity"), (3, "out")):
        args = to_send(9, "normal", 3, True)
        args[place] = args[1]
        with pytest.raises(RuntimeError, match=f"{name} must not overlap unsent"):
            ops.block_means_send(*args)
    for place, name in ((0, "mean"), (1, "quantization_error")):
        args = to_keep(9, "normal", 3)
        args[place] = args[2]
        with pytest.raises(RuntimeError, match=f"{name} must not overlap unsent"):
            ops.block_means_keep(*args)


@pytest.mark.parametrize("case", BAD_SEND)
def test_send_refuses(case: str) -> None:
    refuses("block_means_send", to_send(9, "normal", 3, True), BAD_SEND[case])


@pytest.mark.parametrize("case", BAD_KEEP)
def test_keep_refuses(case: str) -> None:
    refuses("block_means_keep", to_keep(9, "normal", 3), BAD_KEEP[case])
