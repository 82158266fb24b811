"""Hypothesis strategies of the operators' arguments."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st
from torch import Tensor

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

KINDS = ["normal", "normal", "equal", "zero", "tiny", "huge", "wild"]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
phases = st.one_of(st.integers(0, 1000), st.integers(-1000, 2**40))


def values(n: int, kind: str, seed: int) -> Tensor:
    """n float32 values. equal: three different ones; signed zeros: 0 and -0 only; tiny: also denormals; huge: sums
    overflow; wild: also NaN, inf."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(n, generator=generator)
    where = torch.randint(0, 40, (n,), generator=generator)
    if kind == "equal":
        return where.remainder(3) - 1.0
    if kind == "zero":
        return torch.where(where == 0, value, torch.where(where == 1, -0.0, 0.0))
    if kind == "signed zeros":
        return torch.where(where < 20, -0.0, 0.0)
    if kind == "tiny":
        return value * torch.where(where < 20, 1e-40, 1e-38)
    if kind == "huge":
        return value * torch.where(where < 20, 1e38, 1e3)
    if kind == "wild":
        for place, special in enumerate((float("nan"), float("inf"), -float("inf"))):
            value[where == place] = special
    return value


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """1 to 100,003 entries; mostly flat, sometimes 4-dimensional (for channels_last)."""
    if draw(st.integers(0, 3)) == 0:
        return (draw(st.integers(1, 9)), draw(st.integers(1, 30)), draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    edges = st.sampled_from([1, 255, 256, 257, 511, 512, 513, 100_003])
    sizes = st.one_of(edges, st.integers(1, 3000), st.integers(1, 100_003))
    return (draw(sizes),)


def shaped(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """In channels_last memory order if it is 4-dimensional."""
    tensor = flat.view(shape)
    return tensor.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else tensor


@st.composite
def slot_counts(draw: st.DrawFn, blocks: int) -> int:
    return draw(
        st.one_of(
            st.integers(0, blocks),
            st.sampled_from([blocks, 4 * blocks, 9 * blocks, BLOCK * blocks - 1, BLOCK * blocks]),
            st.integers(0, BLOCK * blocks),
        )
    )


@dataclass
class Layout:
    """A bucket: rows of first block, blocks, first slot, slots; and the number of entries of each piece."""

    rows: list[list[int]]
    entries: list[int]
    blocks: int
    slots: int

    def tensor(self) -> Tensor:
        return torch.tensor(self.rows)

    def unpadded(self, flat: Tensor) -> Tensor:
        """A bucket-wide tensor with zeros outside the pieces' entries."""
        inside = torch.zeros_like(flat)
        for (block, *_), entries in zip(self.rows, self.entries, strict=True):
            inside[block * BLOCK : block * BLOCK + entries] = 1
        return torch.where(inside > 0, flat, 0.0)

    def room(self, draw: ops.Draw) -> int:
        """How many slots the rank leads."""
        slots = torch.tensor(self.slots)
        return int(reference.slots_before(slots, draw.run, draw.ranks, draw.position))


def layout_of(pieces: list[tuple[int, int]]) -> Layout:
    """Pieces of so many entries and slots, one after the other."""
    blocks = [-(-entries // BLOCK) for entries, _ in pieces]
    slots = [count for _, count in pieces]
    first_block, first_slot = ([0, *accumulate(counts)] for counts in (blocks, slots))
    rows = [list(row) for row in zip(first_block, blocks, first_slot, slots, strict=False)]
    return Layout(rows, [entries for entries, _ in pieces], first_block[-1], first_slot[-1])


#: 3 blocks, 12 slots.
PAIR = layout_of([(400, 8), (200, 4)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    rows, entries, block, slot = [], [], draw(st.integers(0, 2)), 0
    for _ in range(draw(st.integers(1, 6))):
        blocks = draw(st.integers(1, 40))
        slots = draw(slot_counts(blocks))
        entries.append(draw(st.integers((blocks - 1) * BLOCK + 1, blocks * BLOCK)))
        rows.append([block, blocks, slot, slots])
        block += blocks + draw(st.integers(0, 2))
        slot += slots
    return Layout(rows, entries, block, slot)


# More blocks than one thread's part: pieces with less than a slot per block, none, one block, and several per block.
MANY = Layout(
    rows=[[0, 3000, 0, 701], [3000, 2, 701, 0], [3003, 1, 701, 256], [3004, 4001, 957, 17_203]],
    entries=[3000 * BLOCK, 300, 7, 4001 * BLOCK - 5],
    blocks=7010,
    slots=18_160,
)


@st.composite
def gradients(draw: st.DrawFn, layout: Layout, kind: st.SearchStrategy[str], seed: int) -> list[Tensor]:
    """A tensor for each piece, in some memory order and dtype; some are missing."""
    found = []
    for i, entries in enumerate(layout.entries):
        n = 0 if draw(st.integers(0, 4)) == 0 else entries
        shape = (1, n // 4, 2, 2) if n and n % 4 == 0 else (n,)
        found.append(shaped(values(n, draw(kind), seed + i).to(draw(dtypes)), shape))
    return found


@st.composite
def draws(draw: st.DrawFn) -> ops.Draw:
    ranks = draw(st.integers(1, 8))
    run, position = draw(st.one_of(st.integers(1, 4), st.integers(1, 3000))), draw(st.integers(0, ranks - 1))
    explore = draw(st.sampled_from([0, 2**30, 2**32 - 1, 2**32]))
    return ops.Draw(draw(phases), run, ranks, position, draw(st.integers(0, 2**32 - 1)), explore)


def random_indices(layout: Layout, seed: int, spread: int) -> Tensor:
    """Random indices below ``spread``. With a small spread, several slots have the same entry."""
    return torch.randint(0, spread, (layout.slots,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


# Unaligned, adjacent small, and empty groups, with more values than one thread's part.
MANY_EDGES = torch.tensor([0, 0, 40_001, 40_002, 40_002, 40_009, 99_000, 100_003])

#: Groups as kernels on tiles meet them. runs: of 512 values, as of parameters one after the other. tiny: more than 32
#: in 256 values. empty: more than 32 at one value. mixed: runs, and groups of more than one part of moments.
RUNS = {
    "runs": [72, *[512] * 9, 344, 17, *[512] * 3, 1],
    "tiny": [i % 4 for i in range(1500)],
    "empty": [0] * 40 + [700] + [0] * 100 + [3] + [0] * 33 + [512, 512, 0, 900] + [0] * 40,
    "mixed": [512] * 40 + [9000, 1, 8193] + [300] * 30 + [20_000],
}


@st.composite
def group_edges(draw: st.DrawFn) -> Tensor:
    """0 to 12 groups, some empty, of at most 6000 values in total."""
    small, middle = st.integers(0, 9), st.integers(0, 400)
    wide = st.one_of(st.sampled_from([31, 32, 33, 511, 512, 513, 1024]), st.integers(0, 2000))
    sizes = draw(st.lists(st.one_of(small, middle, small, wide), max_size=12).filter(lambda sizes: sum(sizes) <= 6000))
    return torch.tensor([0, *accumulate(sizes)])


def scales(value: Tensor, groups: int, seed: int, bits: int) -> Tensor:
    """A scale per group, from far above to far below the values, half of them powers of two; also denormals."""
    generator = torch.Generator().manual_seed(seed)
    finite = value[value.isfinite()].abs()
    most = float(finite.max()) if len(finite) else 1.0
    power = torch.rand(groups, generator=generator) * (bits + 3) - bits - 1
    power = torch.where(torch.rand(groups, generator=generator) < 0.5, power.round(), power)
    return (power + torch.frexp(torch.tensor(most)).exponent).clamp(-127, 127).exp2()


def bytes_for(n: int, bits: int) -> int:
    """The bytes of n codes."""
    return -(-n // 8) * bits


def bytes_of(n: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
