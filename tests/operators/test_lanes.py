"""lanes_encode and lanes_decode against hvd_compress/reference/codes.py, bitwise; and that no carry crosses lanes."""

from functools import partial

import pytest
import torch
from checks import (
    FEW,
    agrees,
    agrees_within,
    bad_tensors,
    bounded,
    errors_add_up,
    on,
    opchecks,
    overlaps,
    refusals,
    threads,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY_EDGES, group_edges, kinds, scales, seeds, values
from torch import Tensor

from hvd_compress import ops

keys = st.one_of(st.just(-1), st.integers(0, 2**32 - 1), st.sampled_from([0, 2**32 - 1]))
factors = st.sampled_from([1.0, 0.5, 1 / 3, 1 / 7, 1 / 64, 1e-30])
MOST_BITS = 24


def words_of(n: int, width: int) -> int:
    return -(-n // (64 // width))


def encode_arguments(edges: Tensor, kind: str, seed: int, bits: int, width: int, key: int) -> list:
    value = values(int(edges[-1]), kind, seed)
    words = torch.full((words_of(len(value), width),), -7)
    scale = scales(value, len(edges) - 1, seed + 1, bits)
    return [value, scale, edges, words, torch.full_like(value, 7.0), bits, width, key]


def decode_arguments(edges: Tensor, seed: int, width: int, factor: float) -> list:
    n = int(edges[-1])
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, (words_of(n, width),), generator=generator)
    scale = scales(torch.ones(1), len(edges) - 1, seed + 1, 20)
    return [words, scale, edges, torch.full((n,), 7.0), width, factor]


@st.composite
def to_encode(draw: st.DrawFn) -> list:
    width = draw(st.integers(2, 32))
    most = min(width, MOST_BITS)
    bits = draw(st.one_of(st.just(most), st.integers(2, most)))
    return encode_arguments(draw(group_edges()), draw(kinds), draw(seeds), bits, width, draw(keys))


def encode(
    value: Tensor, scale: Tensor, edges: Tensor, bits: int, width: int, key: int, device: str
) -> tuple[Tensor, Tensor]:
    """The words, and the quantization error."""
    args = on(device, [value, scale, edges, torch.empty(words_of(len(value), width), dtype=torch.int64)])
    error = torch.empty_like(args[0])
    ops.lanes_encode(*args, error, bits, width, key)
    return args[3], error


def decode(words: Tensor, scale: Tensor, edges: Tensor, width: int, factor: float, device: str) -> Tensor:
    value = torch.empty(int(edges[-1]), device=device)
    ops.lanes_decode(*on(device, [words, scale, edges]), value, width, factor)
    return value


def whole(value: Tensor, bits: int, width: int, key: int, device: str) -> tuple[Tensor, Tensor]:
    """The words, and the integers in them, int64, for a grid of step 1."""
    words, error = encode(value, torch.ones(1), torch.tensor([0, len(value)]), bits, width, key, device)
    top = 2 ** (bits - 1) - 1
    inside = value.abs() <= top  # value - error is exact
    q = torch.where(inside, value - error.cpu(), 0.0).long()
    return words, torch.where(inside, q, torch.where(value > 0, top, -top))


@bounded(200)
@given(args=to_encode())
def test_encode_equals_reference(device: str, args: list) -> None:
    value, scale, edges, words, error, _, width, _ = agrees("lanes_encode", args, device)
    errors_add_up(value, decode(words, scale, edges, width, 1.0, device), error)


@bounded(150)
@given(args=st.builds(decode_arguments, group_edges(), seeds, st.integers(2, 32), factors))
def test_decode_equals_reference(device: str, args: list) -> None:
    agrees("lanes_decode", args, device)


@pytest.mark.parametrize("width", range(2, 33))
def test_every_width(device: str, width: int) -> None:
    edges = torch.tensor([0, 700, 700, 1003])
    for bits in {2, (width + 2) // 2, min(width, MOST_BITS)}:
        for key in (-1, 77):
            agrees("lanes_encode", encode_arguments(edges, "normal", 5, bits, width, key), device)
    agrees("lanes_decode", decode_arguments(edges, 5, width, 0.2), device)


@pytest.mark.parametrize("width", [6, 13, 20])
def test_many_values(device: str, width: int) -> None:
    with threads(3):
        agrees("lanes_encode", encode_arguments(MANY_EDGES, "normal", 5, 4, width, 9), device)
        agrees("lanes_decode", decode_arguments(MANY_EDGES, 5, width, 0.2), device)


@pytest.mark.parametrize("width", [6, 13, 20])
def test_within_other_memory(device: str, width: int) -> None:
    edges = torch.tensor([0, 0, 33, 999])
    agrees_within("lanes_encode", encode_arguments(edges, "normal", 5, 4, width, 9), device)
    agrees_within("lanes_decode", decode_arguments(edges, 5, width, 0.2), device)


def ranks_values(ranks: int, bits: int, seed: int) -> dict[str, Tensor]:
    """Values of the ranks, (ranks, n): extreme and random ones."""
    top, n = 2 ** (bits - 1) - 1, 97
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(n)
    alternating = torch.where(place % 2 == 0, 1.0, -1.0)
    sign = torch.randint(0, 2, (ranks, n), generator=generator) * 2.0 - 1.0
    return {
        "top": torch.full((ranks, n), 1.01 * top),
        "bottom": torch.full((ranks, n), -1.01 * top),
        "beyond": torch.full((ranks, n), 3e38) * alternating,
        "infinite": torch.full((ranks, n), -torch.inf),
        "alternating": alternating.expand(ranks, n) * top,
        "by rank": (sign[:, :1] * top).expand(ranks, n).contiguous(),
        "random signs": sign * top,
        "random": (torch.rand(ranks, n, generator=generator) * 2 - 1) * (1.2 * top),
        "small": torch.randint(-1, 2, (ranks, n), generator=generator).float(),
    }


def check_sums(ranks: int, bits: int, device: str) -> None:
    """Sums of the ranks' words, in any order, decode to the sums of the ranks' integers."""
    width, top = bits + (ranks - 1).bit_length(), 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(bits)
    for what, sent in ranks_values(ranks, bits, ranks).items():
        pairs = [whole(sent[i].contiguous(), bits, width, i - 1, device) for i in range(ranks)]
        total, sums = torch.zeros_like(pairs[0][0]), torch.zeros_like(pairs[0][1])
        for rank in torch.randperm(ranks, generator=generator).tolist():
            total, sums = total + pairs[rank][0], sums + pairs[rank][1]
            got = decode(total, torch.ones(1), torch.tensor([0, len(sums)]), width, 1.0, device)
            assert torch.equal(got.cpu(), sums.float()), what
        if what in ("top", "bottom"):
            assert int(sums.abs().min()) == ranks * top


def few_ranks(bits: int) -> list[int]:
    return [ranks for ranks in ((3, 16) if FEW else (2, 3, 4, 7, 16, 33, 64)) if bits + (ranks - 1).bit_length() <= 32]


@pytest.mark.parametrize("bits", range(2, MOST_BITS + 1))
def test_no_carry_crosses(device: str, bits: int) -> None:
    for ranks in few_ranks(bits):
        check_sums(ranks, bits, device)


@pytest.mark.parametrize("bits", range(2, MOST_BITS))
def test_integers_are_exact(device: str, bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    value = torch.linspace(-top, top, 301).round()
    for width in {bits, min(bits + 3, 32), 32}:
        words, q = whole(value, bits, width, -1, device)
        assert torch.equal(q.float(), value)
        got = decode(words, torch.tensor([0.25]), torch.tensor([0, 301]), width, 0.5, device)
        assert torch.equal(got.cpu(), value * 0.125)


@pytest.mark.parametrize("bits", [3, 8])
def test_stochastic_rounding_is_unbiased(device: str, bits: int) -> None:
    top, count, trials = 2 ** (bits - 1) - 1, 101, 1000 if FEW else 4000
    value = torch.cat([torch.linspace(-top, top, count), torch.arange(-3.0, 4.0), torch.tensor([0.01, -0.01, 0.99])])
    edges, scale = torch.tensor([0, len(value)], device=device), torch.ones(1, device=device)
    mine, total = value.to(device), torch.zeros(len(value), dtype=torch.float64, device=device)
    words, error = torch.empty(words_of(len(value), bits), dtype=torch.int64, device=device), torch.empty_like(mine)
    for key in range(trials):
        ops.lanes_encode(mine, scale, edges, words, error, bits, bits, key * 2_654_435 % 2**32)
        total += mine - error
        assert key > 0 or bool((error.abs() < 1).all())
    part = (value - value.floor()).double()
    bound = 5 * (part * (1 - part) / trials).sqrt() + 1e-6
    assert bool(((total.cpu() / trials - value.double()).abs() <= bound).all())


def test_draws_are_independent(device: str) -> None:
    """For one key, rounding is unbiased, and adjacent values are rounded up together as often as independent ones."""
    n = 100_000
    for key in (0, 1, 2**32 - 1):
        for part in (0.1, 0.5, 0.7):
            up = whole(torch.full((n,), part), 4, 4, key, device)[1]
            assert sorted(set(up.tolist())) == [0, 1]
            both = (up[1:] * up[:-1]).double().mean()
            assert abs(float(up.double().mean()) - part) < 5 * (part * (1 - part) / n) ** 0.5
            # Adjacent products are correlated: 3 times the variance of one is an upper bound.
            assert abs(float(both) - part**2) < 5 * (3 * part**2 * (1 - part**2) / n) ** 0.5


def test_to_nearest(device: str) -> None:
    value = torch.linspace(-7.4, 7.4, 10_001)
    for key, most in ((-1, 0.5), (3, 1.0)):
        error = encode(value, torch.ones(1), torch.tensor([0, 10_001]), 4, 5, key, device)[1].abs()
        assert most - 0.02 < float(error.max()) <= most + 1e-6
    halves = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5])
    assert whole(halves, 4, 4, -1, device)[1].tolist() == [-1, 0, 1, 2, 3]


#: 13 values in 3 groups, 3 words of 5 lanes.
SAMPLE = torch.tensor([0, 5, 5, 13])
sample_encode = partial(encode_arguments, SAMPLE, "normal", 3, 4, 12, 9)
sample_decode = partial(decode_arguments, SAMPLE, 3, 12, 0.5)
BAD_ENCODE = bad_tensors(values=0, edges=2, error=4) | {
    "scale dtype": (1, lambda x: x.double(), "scale must be Float, got Double"),
    "scale numel": (1, lambda x: x[:2].clone(), "scale must have 3 entries, got 2"),
    "words dtype": (3, lambda x: x.int(), "words must be Long, got Int"),
    "words numel": (3, lambda x: torch.zeros(4, dtype=torch.int64), "words must have 3 entries, got 4"),
    "bits 1": (5, lambda x: 1, "bits must be 2 to 12, got 1"),
    "bits > width": (5, lambda x: 13, "bits must be 2 to 12, got 13"),
    "width 1": (6, lambda x: 1, "width must be 2 to 32, got 1"),
    "width 33": (6, lambda x: 33, "width must be 2 to 32, got 33"),
    "key -2": (7, lambda x: -2, "key must be -1 to 4294967295, got -2"),
    "key 2**32": (7, lambda x: 2**32, "key must be -1 to 4294967295, got 4294967296"),
}
BAD_DECODE = bad_tensors(values=3, edges=2) | {
    "words dtype": (0, lambda x: x.int(), "words must be Long, got Int"),
    "words numel": (0, lambda x: x[:2].clone(), "words must have 3 entries, got 2"),
    "scale dtype": (1, lambda x: x.double(), "scale must be Float, got Double"),
    "scale numel": (1, lambda x: x[:2].clone(), "scale must have 3 entries, got 2"),
    "width 1": (4, lambda x: 1, "width must be 2 to 32, got 1"),
    "width 33": (4, lambda x: 33, "width must be 2 to 32, got 33"),
}


test_encode_refuses = refusals("lanes_encode", sample_encode, BAD_ENCODE)
test_decode_refuses = refusals("lanes_decode", sample_decode, BAD_DECODE)


def test_at_most_24_bits() -> None:
    args = encode_arguments(torch.tensor([0, 13]), "normal", 3, 25, 32, 9)
    with pytest.raises(RuntimeError, match="bits must be 2 to 24, got 25"):
        ops.lanes_encode(*args)


test_opcheck = opchecks(("lanes_encode", sample_encode), ("lanes_decode", sample_decode))
test_overlap = overlaps("lanes_encode", sample_encode, [(4, 0)])
