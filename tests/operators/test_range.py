"""range_encode and range_decode against hvd_compress/reference/codes.py, bitwise."""

from functools import partial

import pytest
import torch
from checks import (
    agrees,
    agrees_within,
    bad_tensors,
    bounded,
    errors_add_up,
    on,
    opchecks,
    overlaps,
    refusals,
    same,
    threads,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY_EDGES, bytes_for, bytes_of, group_edges, kinds, seeds, values
from torch import Tensor

from hvd_compress import ops, reference

drawn = st.tuples(group_edges(), kinds, seeds)
LARGEST = 0x7F7FFFFF  # the bits of the largest finite float32


def most_codes(bits: int, positive: int) -> int:
    return max(positive, 2**bits - 1 - positive)


def highest_base(bits: int, mantissa: int, positive: int) -> int:
    return (LARGEST >> (23 - mantissa)) - most_codes(bits, positive) + 1


@st.composite
def formats(draw: st.DrawFn) -> tuple[int, int, int]:
    """bits, mantissa and positive codes for which a valid base exists."""
    bits = draw(st.integers(4, 16))
    half = 2 ** (bits - 1) - 1
    positive = draw(st.one_of(st.just(half), st.just(half), st.integers(1, 2**bits - 2)))
    least = next(mantissa for mantissa in range(1, 23) if highest_base(bits, mantissa, positive) >= 1)
    return bits, draw(st.integers(least, 22)), positive


def bases(value: Tensor, groups: int, seed: int, bits: int, mantissa: int, positive: int) -> Tensor:
    """Windows that end at the values' maximum, or anywhere, including both ends of the valid range."""
    generator = torch.Generator().manual_seed(seed)
    highest = highest_base(bits, mantissa, positive)
    anywhere = torch.randint(1, highest + 1, (groups,), generator=generator)
    finite = value[value.isfinite()].abs()
    top = int(finite.max().view(torch.int32)) >> (23 - mantissa) if len(finite) else 1
    fitting = torch.randint(-3, 4, (groups,), generator=generator) + top - most_codes(bits, positive) + 1
    base = torch.where(torch.rand(groups, generator=generator) < 0.6, fitting, anywhere)
    place = torch.randint(0, 12, (groups,), generator=generator)
    return torch.where(place == 0, 1, torch.where(place == 1, highest, base)).clamp(1, highest)


def near_half(value: Tensor, base: Tensor, edges: Tensor, seed: int, mantissa: int) -> Tensor:
    """Sets some values to half of the least magnitude (the threshold for code 0) or an adjacent float."""
    generator = torch.Generator().manual_seed(seed)
    least = (torch.repeat_interleave(base, edges.diff()) << (23 - mantissa)).to(torch.int32).view(torch.float32)
    word = (least * 0.5).view(torch.int32) + torch.randint(-1, 2, value.shape, generator=generator)
    near = torch.copysign(word.to(torch.int32).view(torch.float32), value)
    return torch.where(torch.rand(len(value), generator=generator) < 0.1, near, value)


def encode_arguments(edges: Tensor, kind: str, seed: int, bits: int, mantissa: int, positive: int) -> list:
    value = values(int(edges[-1]), kind, seed)
    base = bases(value, len(edges) - 1, seed + 1, bits, mantissa, positive)
    value = near_half(value, base, edges, seed + 2, mantissa)
    codes = torch.full((bytes_for(len(value), bits),), 170, dtype=torch.uint8)
    return [value, base, edges, codes, torch.full_like(value, 7.0), bits, mantissa, positive]


def decode_arguments(edges: Tensor, kind: str, seed: int, bits: int, mantissa: int, positive: int, add: bool) -> list:
    value = values(int(edges[-1]), kind, seed)
    base = bases(value, len(edges) - 1, seed + 1, bits, mantissa, positive)
    return [bytes_of(bytes_for(len(value), bits), seed), base, edges, value, bits, mantissa, positive, add]


def encode(value: Tensor, base: Tensor, edges: Tensor, format: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The packed codes, and the quantization error."""
    codes = torch.empty(bytes_for(len(value), format[0]), dtype=torch.uint8, device=value.device)
    error = torch.empty_like(value)
    ops.range_encode(value, base, edges, codes, error, *format)
    return codes, error


def decode(codes: Tensor, base: Tensor, edges: Tensor, format: tuple[int, int, int]) -> Tensor:
    value = torch.empty(int(edges[-1]), device=codes.device)
    ops.range_decode(codes, base, edges, value, *format, False)
    return value


def one_window(n: int, base: int, device: str) -> tuple[Tensor, Tensor]:
    return torch.tensor([base], device=device), torch.tensor([0, n], device=device)


def magnitudes(base: int, format: tuple[int, int, int], count: int) -> Tensor:
    """m(1) to m(count) of the specification."""
    return ((base + torch.arange(count)) << (23 - format[1])).to(torch.int32).view(torch.float32)


@bounded(200)
@given(drawn=drawn, format=formats())
def test_encode_equals_reference(device: str, drawn: tuple, format: tuple) -> None:
    args = encode_arguments(*drawn, *format)
    value, base, edges, codes, error, *format = agrees("range_encode", args, device)
    errors_add_up(value, decode(codes, base, edges, format), error)


@bounded(150)
@given(drawn=drawn, format=formats(), add=st.booleans())
def test_decode_equals_reference(device: str, drawn: tuple, format: tuple, add: bool) -> None:
    agrees("range_decode", decode_arguments(*drawn, *format, add), device)


@pytest.mark.parametrize("bits", range(4, 17))
def test_many_values(device: str, bits: int) -> None:
    format = (bits, max(4, bits - 6), 2 ** (bits - 1) - 1)
    with threads(3):
        agrees("range_encode", encode_arguments(MANY_EDGES, "normal", 5, *format), device)
        agrees("range_decode", decode_arguments(MANY_EDGES, "normal", 5, *format, True), device)


@pytest.mark.parametrize("bits", range(4, 17))
def test_within_other_memory(device: str, bits: int) -> None:
    edges, format = torch.tensor([0, 0, 33, 999]), (bits, max(4, bits - 6), 2 ** (bits - 1) - 1)
    agrees_within("range_encode", encode_arguments(edges, "normal", 5, *format), device)
    agrees_within("range_decode", decode_arguments(edges, "normal", 5, *format, False), device)


# bits, mantissa, positive; denormals, the least and the greatest windows, few codes of one sign.
FORMATS = [(4, 1, 7), (4, 22, 1), (8, 4, 127), (8, 4, 200), (8, 1, 254), (10, 5, 511), (12, 7, 3), (16, 10, 32_767)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("where", ["low", "one", "high"])
def test_decode_is_the_inverse_of_encode(device: str, format: tuple[int, int, int], where: str) -> None:
    bits, mantissa, positive = format
    count, highest = 2**bits, highest_base(*format)
    base = {"low": 1, "one": min((127 << mantissa) - 3, highest), "high": highest}[where]
    codes = reference.pack(torch.arange(count), bits).to(device)
    window = one_window(count, base, device)
    value = decode(codes, *window, format)
    want = torch.cat([magnitudes(base, format, positive), -magnitudes(base, format, count - 1 - positive)])
    assert same(value[1:], want) and same(value[:1], torch.zeros(1))
    assert len(value.unique()) == count and bool(value.isfinite().all())
    again, error = encode(value, *window, format)
    assert torch.equal(again, codes) and not bool(error.any())


@pytest.mark.parametrize("format", FORMATS)
def test_relative_error(device: str, format: tuple[int, int, int]) -> None:
    bits, mantissa, positive = format
    base = min((120 << mantissa) + 1, highest_base(*format))
    for sign, count in ((1, positive), (-1, 2**bits - 1 - positive)):
        ends = magnitudes(base, format, count)[[0, -1]].view(torch.int32)
        generator = torch.Generator().manual_seed(3)
        word = torch.randint(int(ends[0]), int(ends[1]) + 1, (20_000,), generator=generator)
        value = (word.to(torch.int32).view(torch.float32) * sign).to(device)
        window = one_window(len(value), base, device)
        codes, _ = encode(value, *window, format)
        error = ((decode(codes, *window, format) - value).double() / value.double()).abs()
        assert float(error.max()) <= 2.0 ** -(mantissa + 1)
        # The bound is attained.
        assert count < 5 or mantissa > 15 or float(error.max()) > 2.0 ** -(mantissa + 2)


def test_ends_of_the_window(device: str) -> None:
    """From half of the least magnitude on the code is not 0; larger values and infinities have the last code."""
    format, base = (8, 4, 100), 1500
    least, below = float(magnitudes(base, format, 1)), 155
    half = torch.tensor(least / 2)
    under = torch.nextafter(half, torch.zeros(()))
    value = torch.stack([half, -half, under, -under, half * 0, half * -0.0, torch.tensor(torch.nan), -half * torch.nan])
    value = torch.cat([value, torch.tensor([torch.inf, -torch.inf, 3e38, -3e38])]).to(device)
    window = one_window(len(value), base, device)
    codes, error = encode(value, *window, format)
    assert reference.unpack(codes.cpu(), 8, 12).tolist() == [1, 101, 0, 0, 0, 0, 0, 0, 100, 255, 100, 255]
    most, most_negative = magnitudes(base, format, 100)[-1], -magnitudes(base, format, below)[-1]
    got = decode(codes, *window, format).cpu()
    zeros = torch.zeros(6)
    assert same(got, torch.cat([torch.tensor([least, -least]), zeros, torch.stack([most, most_negative] * 2)]))
    assert bool(error[6:8].isnan().all()) and error[8:10].tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("bits", range(4, 17))
def test_padding_is_zero(device: str, bits: int) -> None:
    format = (bits, 10, 2 ** (bits - 1) - 1)
    for n in range(1, 17):
        value = torch.full((n,), -3e38, device=device)
        codes, _ = encode(value, *one_window(n, 7, device), format)
        padded = reference.unpack(codes.cpu(), bits, len(codes) // bits * 8)
        assert padded.tolist() == [2**bits - 1] * n + [0] * (-n % 8)


@pytest.mark.parametrize("bits", [4, 9, 16])
def test_add_adds(device: str, bits: int) -> None:
    format = (bits, 10, 2 ** (bits - 1) - 1)
    args = on(device, decode_arguments(torch.tensor([0, 333, 1001]), "normal", 5, *format, True))
    args[1].fill_(127 << 10)
    before, alone = args[3].clone(), decode(*args[:3], format)
    ops.range_decode(*args)
    assert not torch.equal(args[3], before) and torch.equal(args[3], before + alone)
    ops.range_decode(*args)
    assert torch.equal(args[3], before + alone + alone)
    args[-1] = False
    ops.range_decode(*args)
    assert torch.equal(args[3], alone)


#: 13 values in 3 groups, of 10 bits.
SAMPLE = (torch.tensor([0, 5, 5, 13]), "normal", 3, 10, 5, 511)
sample_encode, sample_decode = partial(encode_arguments, *SAMPLE), partial(decode_arguments, *SAMPLE, True)
test_opcheck = opchecks(("range_encode", sample_encode), ("range_decode", sample_decode))


def bad_format(codes: int, first: int) -> dict[str, tuple]:
    """Errors for ``codes`` and for ``bits``, ``mantissa``, ``positive``, the arguments from ``first`` on."""
    cases: dict[str, tuple] = {
        "codes dtype": (codes, lambda x: x.int(), "codes must be Byte, got Int"),
        "codes numel": (codes, lambda x: x[:19].clone(), "codes must have 20 entries, got 19"),
    }
    for i, (name, low, high) in enumerate((("bits", 4, 16), ("mantissa", 1, 22), ("positive", 1, 1022))):
        for bad in (low - 1, high + 1):
            cases[f"{name} {bad}"] = (first + i, lambda x, bad=bad: bad, f"{name} must be {low} to {high}, got {bad}")
    return cases


BAD_BOTH = {
    "base dtype": (1, lambda x: x.int(), "base must be Long, got Int"),
    "base numel": (1, lambda x: x[:2].clone(), "base must have 3 entries, got 2"),
    "base 0": (1, lambda x: torch.tensor([1, 0, 1]), "every base must be 1 to 7648, got 0"),
    "base too high": (1, lambda x: torch.tensor([1, 1, 7649]), "every base must be 1 to 7648, got 7649"),
}
BAD_ENCODE = BAD_BOTH | bad_tensors(values=0, edges=2, error=4) | bad_format(codes=3, first=5)
BAD_DECODE = BAD_BOTH | bad_tensors(values=3, edges=2) | bad_format(codes=0, first=4)


test_encode_refuses = refusals("range_encode", sample_encode, BAD_ENCODE)
test_decode_refuses = refusals("range_decode", sample_decode, BAD_DECODE)
test_overlap = overlaps("range_encode", sample_encode, [(4, 0)])
