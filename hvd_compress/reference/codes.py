"""Quantized values on the wire: integer lanes, codebooks, range-based floats, and the moments for their scales.

group
    a run of values with one scale: the slots of one parameter. Group ``g`` is ``edges[g]`` to ``edges[g + 1]``. The
    edges ascend from 0 to the number of values; a group may be empty.
quantization error
    ``value - decoded``, in float32.
codes
    integers of ``bits`` bits, packed into bytes from the lowest bit on, and padded with zeros to a multiple of eight
    codes: eight codes fill ``bits`` bytes.

All arithmetic is float32, operation by operation as written (no fused multiply-add), so that all back ends agree.
Values are multiplied by a scale as given, and divided by it as a product with ``1 / scale``. Scales and their
reciprocals are > 0 and finite.
"""

import torch
from torch import Tensor

from .blocks import mix

#: The number of running sums in :func:`moments`, and the number of values in a part.
LANES = 32
PART = 8192


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=like.device)


def _each(table: Tensor, edges: Tensor) -> Tensor:
    return torch.repeat_interleave(table, edges.diff(), dim=0)


def pack(codes: Tensor, bits: int) -> Tensor:
    """``codes``: integers below ``2**bits``, (n,). Returns uint8, (ceil(n / 8) * bits,)."""
    padded = torch.nn.functional.pad(codes.long(), (0, -len(codes) % 8)).view(-1, 8)
    stream = (padded[:, :, None] >> _range(bits, codes)) & 1
    weight = 1 << _range(8, codes)
    return (stream.view(-1, bits, 8) * weight).sum(2).to(torch.uint8).view(-1)


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The first ``n`` codes: int64, (n,)."""
    stream = (packed.long().view(-1, bits, 1) >> _range(8, packed)) & 1
    weight = 1 << _range(bits, packed)
    return (stream.reshape(-1, 8, bits) * weight).sum(2).view(-1)[:n]


def summed(terms: Tensor) -> Tensor:
    """Sums over the last dimension, in the order that :func:`moments` specifies."""
    rows = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % LANES)).view(*terms.shape[:-1], -1, LANES)
    sums = terms.new_zeros(*terms.shape[:-1], LANES)
    for row in rows.unbind(-2):  # the order of sum() is not specified
        sums = sums + row
    while sums.shape[-1] > 1:
        lower, upper = sums.chunk(2, -1)
        sums = lower + upper
    return sums[..., 0]


def moments(values: Tensor, edges: Tensor, out: Tensor) -> None:
    """Per group: the sum of squares, the sum of fourth powers, and the largest magnitude.

    The sums are of float64 products (``square = v * v``, ``square * square``), in this order on every back end: a group
    is cut into parts of 8192 values, the last one shorter. In a part, value ``i`` is added to running sum ``i % 32``;
    then the upper half of the sums is added to the lower until one is left. The parts' sums are summed likewise, part
    ``i`` into running sum ``i % 32``. The largest magnitude ignores NaNs. All three are 0 for an empty group.

    ``values``: float32, (n,). ``edges``: int64, (groups + 1,). ``out``: float64, (groups, 3).
    """
    for group, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        mine = values[begin:end]
        square = mine.double() ** 2
        terms = torch.stack([square, square * square])
        if end - begin > PART:
            terms = summed(torch.nn.functional.pad(terms, (0, -(end - begin) % PART)).view(2, -1, PART))
        out[group, :2] = summed(terms)
        out[group, 2] = torch.where(mine.isnan(), 0.0, mine.abs()).max() if end > begin else 0.0


def lanes_encode(
    values: Tensor,
    scale: Tensor,
    edges: Tensor,
    words: Tensor,
    quantization_error: Tensor,
    bits: int,
    width: int,
    key: int,
) -> None:
    """Write values as ``bits``-bit integers into lanes of ``width`` bits; the words can be summed as int64.

    With ``Q = 2**(bits - 1) - 1``::

        q    = clamp(floor(value * (1 / scale) + u), -Q, Q)       (0 for a NaN)
        word = sum over its lanes of q << (width * lane)

    ``u`` is uniform in [0, 1), drawn from (key, index): stochastic rounding. With ``key`` -1 it is 1/2: rounding to
    nearest. (The sum with ``u`` is rounded to float32: a quotient of 15 bits has a bias of about 2**-10 steps.)
    Value ``i`` is in lane ``i % L`` of word ``i // L``, ``L = 64 // width``. Lanes after the last value hold 0.

    **No carry crosses lanes.** For N words to be added, N * Q must be below ``2**(width - 1)``: ``width = bits +
    ceil(log2(N))`` suffices. Then every lane's sum is in (-2**(width - 1), 2**(width - 1)), and the sum of the words is
    exactly the number with these signed digits in base ``2**width``. Its magnitude is below ``2**(width * L - 1) <=
    2**63``, so int64 does not overflow, in any order of summation. Adding ``2**(width - 1)`` to every digit makes all
    of them positive, so that they are the bit fields of the word; :func:`lanes_decode` reads them this way.

    ``values``, ``quantization_error``: float32, (n,). ``scale``: float32, (groups,), one step of the grid.
    ``words``: int64, (ceil(n / L),). ``2 <= bits <= 24``, so that float32 holds every q; ``bits <= width <= 32``.
    """
    count, top = 64 // width, 2 ** (bits - 1) - 1
    step = _each(scale, edges)
    index = _range(len(values), values)
    draw = torch.full_like(values, 0.5) if key == -1 else (mix(index & 0xFFFFFFFF, key) >> 8).float() * 2.0**-24
    q = (values * (1.0 / step) + draw).floor().clamp(-top, top).nan_to_num(nan=0.0)
    quantization_error.copy_(values - q * step)
    lanes = torch.nn.functional.pad(q.long(), (0, -len(values) % count)).view(-1, count)
    words.copy_((lanes << (width * _range(count, values))).sum(1))


def lanes_decode(words: Tensor, scale: Tensor, edges: Tensor, values: Tensor, width: int, factor: float) -> None:
    """Read summed lanes: ``value = sum * (scale * factor)``; ``factor`` is 1 / ranks for the mean.

    ``words``: int64, (ceil(n / L),). ``values``: float32, (n,), is written. See :func:`lanes_encode`.
    """
    count, n = 64 // width, len(values)
    shift = width * _range(count, words)
    half = 1 << (width - 1)
    digits = ((words + (half << shift).sum())[:, None] >> shift) & ((1 << width) - 1)
    values.copy_((digits - half).view(-1)[:n].float() * _each(scale * factor, edges))


def codebook_encode(
    values: Tensor,
    scale: Tensor,
    edges: Tensor,
    book: Tensor,
    kind: Tensor,
    codes: Tensor,
    quantization_error: Tensor | None,
    bits: int,
) -> None:
    """Write the code of the nearest level; it decodes to ``level * scale``.

    With ``levels = book[kind]`` of the value's group, the code is the number of midpoints ``(levels[i] + levels[i + 1])
    * 0.5`` below ``value * (1 / scale)`` (0 for a NaN).

    ``values``: float32, (n,). ``quantization_error``: of this form, also ``values`` itself, or None. ``scale``:
    float32, (groups,). ``book``: float32, (kinds, 2**bits), rows ascending. ``kind``: int64, (groups,). ``codes``:
    uint8, (ceil(n / 8) * bits,). ``1 <= bits <= 8``.
    """
    each, number = _each(scale, edges), _each(kind, edges)
    scaled = values * (1.0 / each)
    code = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    for row, levels in enumerate(book):
        midpoints = (levels[:-1] + levels[1:]) * 0.5
        below = (midpoints < scaled[:, None]).sum(1)
        code = torch.where(number == row, below, code)
    codes.copy_(pack(code, bits))
    if quantization_error is not None:
        quantization_error.copy_(values - book[number, code] * each)


def codebook_decode(
    codes: Tensor, scale: Tensor, edges: Tensor, book: Tensor, kind: Tensor, values: Tensor, bits: int, add: bool
) -> None:
    """Write ``level * scale`` to ``values``, or add it; see :func:`codebook_encode`."""
    level = book[_each(kind, edges), unpack(codes, bits, len(values))]
    store(values, level * _each(scale, edges), add)


def range_encode(
    values: Tensor,
    base: Tensor,
    edges: Tensor,
    codes: Tensor,
    quantization_error: Tensor,
    bits: int,
    mantissa: int,
    positive: int,
) -> None:
    """Write range-based floats: ``2**bits`` codes for a window of floats with ``mantissa`` bits of fraction.

    With ``s = 23 - mantissa``, P = ``positive`` codes for positive values and ``2**bits - 1 - P`` for negative ones::

        magnitude m(c) = float32 of the bit pattern (base + c - 1) << s          c = 1 .. P (or the negatives' count)
        code          = clamp(((bits(|value|) + 2**(s - 1)) >> s) - base + 1, 1, P)         (+ P for a negative value)
        code          = 0       where |value| < m(1) * 0.5, and for a NaN

    ``values``, ``quantization_error``: float32, (n,). ``base``: int64, (groups,), >= 1; every ``m(c)`` must be finite.
    ``codes``: uint8, (ceil(n / 8) * bits,). ``4 <= bits <= 16``, ``1 <= mantissa <= 22``, ``1 <= P <= 2**bits - 2``.
    """
    shift, each = 23 - mantissa, _each(base, edges)
    word = values.view(torch.int32).long() & 0x7FFFFFFF
    code = ((word + (1 << (shift - 1))) >> shift) - each + 1
    negative = values.signbit()
    code = torch.where(negative, code.clamp(1, 2**bits - 1 - positive) + positive, code.clamp(1, positive))
    smallest = (each << shift).to(torch.int32).view(torch.float32)
    code = torch.where((values.abs() < smallest * 0.5) | values.isnan(), 0, code)
    codes.copy_(pack(code, bits))
    quantization_error.copy_(values - _range_value(code, each, shift, positive))


def range_decode(
    codes: Tensor, base: Tensor, edges: Tensor, values: Tensor, bits: int, mantissa: int, positive: int, add: bool
) -> None:
    """Write the decoded codes to ``values``, or add them; see :func:`range_encode`."""
    code = unpack(codes, bits, len(values))
    store(values, _range_value(code, _each(base, edges), 23 - mantissa, positive), add)


def _range_value(code: Tensor, base: Tensor, shift: int, positive: int) -> Tensor:
    negative = code > positive
    word = (base + torch.where(negative, code - positive, code) - 1) << shift
    value = word.to(torch.int32).view(torch.float32)
    return torch.where(code == 0, 0.0, torch.where(negative, -value, value))


def store(values: Tensor, decoded: Tensor, add: bool) -> None:
    """Write decoded values to ``values``, or add them."""
    if add:
        values.add_(decoded)
    else:
        values.copy_(decoded)
