"""codebook_encode and codebook_decode against hvd_compress/reference/codes.py, bitwise."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from checks import agrees, agrees_within, bad_tensors, bounded, errors_add_up, on, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY_EDGES, RUNS, bytes_for, bytes_of, group_edges, kinds, scales, seeds, values
from torch import Tensor

from hvd_compress import ops, reference
from hvd_compress.codecs.codebooks import codebook


def levels_of(rows: int, kind: str, seed: int, bits: int) -> Tensor:
    """lloyd: codebooks. Else random levels; equal: many levels are equal, and many values are midpoints."""
    if kind == "lloyd":
        return codebook(bits)[torch.arange(rows) % 2].contiguous()
    return values(rows << bits, kind, seed).view(rows, -1).sort(1).values.contiguous()


def tables(edges: Tensor, kind: str, seed: int, bits: int, rows: int) -> list:
    """The book, and the row of each group."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randint(0, rows, (len(edges) - 1,), generator=generator)
    return [levels_of(rows, kind, seed + 1, bits), number]


def encode_arguments(edges: Tensor, kind: str, book_kind: str, seed: int, bits: int, rows: int) -> list:
    value = values(int(edges[-1]), kind, seed)
    scale = scales(value, len(edges) - 1, seed + 1, 4)
    codes = torch.full((bytes_for(len(value), bits),), 170, dtype=torch.uint8)
    return [value, scale, edges, *tables(edges, book_kind, seed, bits, rows), codes, torch.full_like(value, 7.0), bits]


def decode_arguments(edges: Tensor, kind: str, book_kind: str, seed: int, bits: int, rows: int, add: bool) -> list:
    n = int(edges[-1])
    value = values(n, kind, seed)
    scale = scales(value, len(edges) - 1, seed + 1, 4)
    codes = bytes_of(bytes_for(n, bits), seed + 2)
    return [codes, scale, edges, *tables(edges, book_kind, seed, bits, rows), value, bits, add]


book_kinds = st.sampled_from(["lloyd", "lloyd", "normal", "equal", "zero", "tiny", "huge"])
#: Of edges, kind, book_kind, seed, bits and rows.
drawn = (group_edges(), kinds, book_kinds, seeds, st.integers(1, 8), st.integers(1, 3))


def decode(codes: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, bits: int) -> Tensor:
    value = torch.empty(int(edges[-1]), device=codes.device)
    ops.codebook_decode(codes, scale, edges, book, kind, value, bits, False)
    return value


@bounded(150)
@given(args=st.builds(encode_arguments, *drawn))
def test_encode_equals_reference(device: str, args: list) -> None:
    value, scale, edges, book, kind, codes, error, bits = agrees("codebook_encode", args, device)
    errors_add_up(value, decode(codes, scale, edges, book, kind, bits), error)


@bounded(120)
@given(args=st.builds(decode_arguments, *drawn, st.booleans()))
def test_decode_equals_reference(device: str, args: list) -> None:
    agrees("codebook_decode", args, device)


@pytest.mark.parametrize("bits", range(1, 9))
def test_many_values(device: str, bits: int) -> None:
    with threads(3):
        if bits in (1, 4):  # the reference is slow
            agrees("codebook_encode", encode_arguments(MANY_EDGES, "normal", "normal", 5, bits, 2), device)
        agrees("codebook_decode", decode_arguments(MANY_EDGES, "normal", "normal", 5, bits, 2, True), device)


@pytest.mark.parametrize("sizes", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_runs(device: str, bits: int, sizes: list[int]) -> None:
    edges = torch.tensor([0, *accumulate(sizes)])
    agrees("codebook_encode", encode_arguments(edges, "normal", "normal", 5, bits, 2), device)
    agrees("codebook_decode", decode_arguments(edges, "normal", "normal", 5, bits, 2, True), device)


@pytest.mark.parametrize("bits", range(1, 9))
def test_within_other_memory(device: str, bits: int) -> None:
    edges = torch.tensor([0, 0, 33, 999])
    agrees_within("codebook_encode", encode_arguments(edges, "normal", "normal", 5, bits, 2), device)
    agrees_within("codebook_decode", decode_arguments(edges, "normal", "normal", 5, bits, 2, False), device)


@pytest.mark.parametrize("bits", range(1, 9))
def test_nearest_level(device: str, bits: int) -> None:
    edges = torch.tensor([0, 1500, 1500, 4003])
    args = on(device, encode_arguments(edges, "normal", "normal", 5, bits, 3))
    value, scale, _, book, kind, codes, error, _ = args
    scale.copy_(torch.tensor([0.5, 1.0, 1.7]))
    ops.codebook_encode(*args)
    value, scale, book, kind, error, codes = on("cpu", [value, scale, book, kind, error, codes])
    number = torch.repeat_interleave(torch.arange(3), edges.diff())
    distance = (value.double()[:, None] - book.double()[kind[number]] * scale.double()[number][:, None]).abs()
    torch.testing.assert_close(error.abs().double(), distance.min(1).values, rtol=0.0, atol=1e-6)
    assert torch.equal(reference.unpack(codes, bits, len(value)).unique(), torch.arange(1 << bits))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks(device: str, bits: int) -> None:
    """Values on every midpoint of the codebooks, next to it and between; infinities and a NaN."""
    book = codebook(bits)
    middles = ((book[:, :-1] + book[:, 1:]) * 0.5).view(-1)
    far = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    next_to = [torch.nextafter(middles, far[side]) for side in (0, 1)]
    value = torch.cat([far, middles, *next_to, book.view(-1), values(5000, "normal", 3)])
    n = len(value)
    codes, error = torch.zeros(bytes_for(2 * n, bits), dtype=torch.uint8), torch.zeros(2 * n)
    tensors = [value.repeat(2), torch.ones(2), torch.tensor([0, n, 2 * n]), book, torch.arange(2), codes, error]
    codes = agrees("codebook_encode", [*tensors, bits], device)[5].cpu()
    assert len(reference.unpack(codes, bits, 2 * n).unique()) == 1 << bits


def test_one_bit(device: str) -> None:
    value, book = values(4096, "normal", 3), torch.tensor([[-0.75, 0.75]])
    codes, error = torch.empty(4096 // 8, dtype=torch.uint8), torch.empty(4096)
    assert codes.nbytes * 32 == value.nbytes
    tensors = [value, torch.ones(1), torch.tensor([0, 4096]), book, torch.zeros(1, dtype=torch.int64), codes, error]
    args = [*on(device, tensors), 1]
    ops.codebook_encode(*args)
    # Lowest bit first; a set bit is a positive value.
    bit = (args[5].cpu()[:, None] >> torch.arange(8)) & 1
    assert torch.equal(bit.view(-1).bool(), value > 0)
    got = decode(args[5], *args[1:5], 1).cpu()
    assert torch.equal(got, torch.where(value > 0, 0.75, -0.75))


@pytest.mark.parametrize("bits", range(1, 9))
def test_padding_is_zero(device: str, bits: int) -> None:
    for n in range(1, 17):
        codes, error = torch.full((bytes_for(n, bits),), 255, dtype=torch.uint8), torch.empty(n)
        tensors = [torch.ones(n), torch.ones(1), torch.tensor([0, n])]
        tensors += [torch.arange(1 << bits).float().view(1, -1) / 128, torch.zeros(1, dtype=torch.int64), codes, error]
        args = [*on(device, tensors), bits]
        ops.codebook_encode(*args)
        padded = reference.unpack(args[5].cpu(), bits, len(codes) // bits * 8)
        assert padded.tolist() == [min(128, (1 << bits) - 1)] * n + [0] * (-n % 8)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_add_adds(device: str, bits: int) -> None:
    edges = torch.tensor([0, 333, 1001])
    args = on(device, decode_arguments(edges, "normal", "normal", 5, bits, 2, True))
    before, alone = args[5].clone(), decode(*args[:5], bits)
    ops.codebook_decode(*args)
    assert not torch.equal(args[5], before) and torch.equal(args[5], before + alone)
    ops.codebook_decode(*args)
    assert torch.equal(args[5], before + alone + alone)
    args[-1] = False
    ops.codebook_decode(*args)
    assert torch.equal(args[5], alone)


def test_ties_nan_and_infinity(device: str) -> None:
    """A value on a midpoint is not above it; a NaN has code 0; infinities have the last levels."""
    value = torch.tensor([-1.0, 0.0, 1.0, torch.nan, torch.inf, -torch.inf, 1.0000001])
    tensors = [value, torch.full((1,), 2.0), torch.tensor([0, 7]), torch.tensor([[-0.5, -0.5, 0.5, 0.5]])]
    tensors += [torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.uint8), torch.zeros(7)]
    args = [*on(device, tensors), 2]
    ops.codebook_encode(*args)
    assert reference.unpack(args[5].cpu(), 2, 7).tolist() == [0, 1, 2, 0, 3, 0, 3]
    error = args[6].tolist()
    assert error[:3] == [0.0, 1.0, 0.0] and error[3] != error[3] and error[4:6] == [torch.inf, -torch.inf]


#: 13 values in 3 groups, of 3 bits; 2 rows.
SAMPLE = (torch.tensor([0, 5, 5, 13]), "normal", "normal", 3, 3, 2)
sample_encode, sample_decode = partial(encode_arguments, *SAMPLE), partial(decode_arguments, *SAMPLE, True)


def sample_in_place() -> list:
    """Errors in place of the values, as torch's ``out=`` may be an input: the schema says that errors are written."""
    args = sample_encode()
    return [*args[:6], args[0], args[7]]


test_opcheck = opchecks(
    ("codebook_encode", sample_encode), ("codebook_encode", sample_in_place), ("codebook_decode", sample_decode)
)


BAD_BOTH = {
    "scale dtype": (1, lambda x: x.double(), "scale must be Float, got Double"),
    "scale numel": (1, lambda x: x[:2].clone(), "scale must have 3 entries, got 2"),
    "book dtype": (3, lambda x: x.double(), "book must be Float, got Double"),
    "book shape": (3, lambda x: x[:, :4].contiguous(), "book must be of shape .kinds, 8."),
    "book flat": (3, lambda x: x.view(-1), "book must be of shape .kinds, 8."),
    "book empty": (3, lambda x: x[:0].clone(), "book must have at least one row"),
    "book descends": (3, lambda x: x.flip(1).contiguous(), "every row of book must ascend, got .* in row 0"),
    "book NaN": (3, lambda x: torch.where(x == x[1, 4], torch.nan, x), "must ascend, got nan after .* in row 1"),
    "kind dtype": (4, lambda x: x.int(), "kind must be Long, got Int"),
    "kind numel": (4, lambda x: x[:2].clone(), "kind must have 3 entries, got 2"),
    "kind > rows": (4, lambda x: torch.tensor([0, 2, 1]), "every kind must be 0 to 1, got 2"),
    "kind < 0": (4, lambda x: torch.tensor([0, 1, -1]), "every kind must be 0 to 1, got -1"),
}
BAD_ENCODE = bad_tensors(values=0, edges=2, error=6) | {
    **BAD_BOTH,
    "codes dtype": (5, lambda x: x.int(), "codes must be Byte, got Int"),
    "codes numel": (5, lambda x: x[:5].clone(), "codes must have 6 entries, got 5"),
    "bits 0": (7, lambda x: 0, "bits must be 1 to 8, got 0"),
    "bits 9": (7, lambda x: 9, "bits must be 1 to 8, got 9"),
}
BAD_DECODE = bad_tensors(values=5, edges=2) | {
    **BAD_BOTH,
    "codes dtype": (0, lambda x: x.int(), "codes must be Byte, got Int"),
    "codes numel": (0, lambda x: x[:5].clone(), "codes must have 6 entries, got 5"),
    "bits 0": (6, lambda x: 0, "bits must be 1 to 8, got 0"),
    "bits 9": (6, lambda x: 9, "bits must be 1 to 8, got 9"),
}


test_encode_refuses = refusals("codebook_encode", sample_encode, BAD_ENCODE)
test_decode_refuses = refusals("codebook_decode", sample_decode, BAD_DECODE)


@pytest.mark.parametrize("bits", range(1, 9))
def test_errors_in_place(device: str, bits: int) -> None:
    """The errors may take the place of the values, or be left out; no other overlap is allowed."""
    want = on(device, encode_arguments(MANY_EDGES[:6], "normal", "lloyd", 5, bits, 2))
    values, codes = want[0].clone(), torch.empty_like(want[5])
    ops.codebook_encode(*want)
    ops.codebook_encode(values, *want[1:5], codes, None, bits)
    assert torch.equal(values, want[0]) and torch.equal(codes, want[5])
    codes.zero_()
    ops.codebook_encode(values, *want[1:5], codes, values, bits)
    assert torch.equal(values, want[6]) and torch.equal(codes, want[5])
    memory = torch.empty(len(values) + 1, device=device)
    with pytest.raises(RuntimeError, match="quantization_error must not overlap values"):
        ops.codebook_encode(memory[1:], *want[1:5], codes, memory[:-1], bits)
