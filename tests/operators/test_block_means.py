"""block_means_send and block_means_keep against hvd_compress/reference/block_means.py, bitwise."""

from functools import partial

import pytest
import torch
from checks import agrees, agrees_within, bounded, on, opchecks, overlaps, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import kinds, seeds, values

from hvd_compress import ops

counts = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 257]), st.integers(1, 5000))
MANY = 100_003


def to_send(blocks: int, kind: str, seed: int, velocity: bool) -> list:
    fresh, unsent, memory = (values(blocks, kind, seed + i) for i in range(3))
    out, invalid = torch.full((blocks,), 7.0), torch.zeros(1, dtype=torch.int32)
    return [fresh, unsent, memory if velocity else None, out, invalid, 0.9]


def to_keep(blocks: int, kind: str, seed: int) -> list:
    return [values(blocks, kind, seed + i) for i in range(3)]


@bounded(100)
@given(blocks=counts, kind=kinds, seed=seeds, velocity=st.booleans())
def test_send_equals_reference(device: str, blocks: int, kind: str, seed: int, velocity: bool) -> None:
    agrees("block_means_send", to_send(blocks, kind, seed, velocity), device)


@bounded(100)
@given(blocks=counts, kind=kinds, seed=seeds)
def test_keep_equals_reference(device: str, blocks: int, kind: str, seed: int) -> None:
    agrees("block_means_keep", to_keep(blocks, kind, seed), device)


@pytest.mark.parametrize("kind", ["normal", "wild"])
def test_many_blocks(device: str, kind: str) -> None:
    with threads(3):
        agrees("block_means_send", to_send(MANY, kind, 5, True), device)
        agrees("block_means_keep", to_keep(MANY, kind, 5), device)


def test_within_other_memory(device: str) -> None:
    agrees_within("block_means_send", to_send(999, "normal", 5, True), device)
    agrees_within("block_means_keep", to_keep(999, "normal", 5), device)


def test_not_finite(device: str) -> None:
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


sample_send, sample_keep = partial(to_send, 9, "normal", 3, True), partial(to_keep, 9, "normal", 3)
test_overlap_of_send = overlaps("block_means_send", sample_send, [(0, 1), (2, 1), (3, 1)])
test_overlap_of_keep = overlaps("block_means_keep", sample_keep, [(0, 2), (1, 2)])
test_send_refuses = refusals("block_means_send", sample_send, BAD_SEND)
test_keep_refuses = refusals("block_means_keep", sample_keep, BAD_KEEP)
test_opcheck = opchecks(("block_means_send", sample_send), ("block_means_keep", sample_keep))
