"""Hypothesis strategies and comparisons for the operators' tests."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_compress import ops, reference
from hvd_compress.reference import BLOCK

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
#: Whether the operators for CPU tensors are the CUDA kernels, on the emulator of tests/emulation.
EMULATED = "EMULATED_ARCH" in os.environ
#: Devices whose operators cannot check the contents of TABLES, because the host would have to wait for the device.
UNCHECKED_DEVICES = [device for device in DEVICES if device != "cpu" or EMULATED]
TABLES = ("pieces", "edges", "kind", "base", "book")
#: The share of hypothesis' examples: fewer for slow builds.
EXAMPLES = float(os.environ.get("TEST_EXAMPLES", "1"))
#: Whether tests that are slow in such builds try fewer of their cases, too.
FEW = EXAMPLES < 1
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Without the extension, the operators are the reference.
needs_compiled = pytest.mark.skipif(not ops.COMPILED, reason="the extension is not built")


def check_device(device: str) -> None:
    if device == "cuda" and not ops.COMPILED_CUDA:
        pytest.skip("the CUDA extension is not built")


def bounded(examples: int) -> settings:
    return settings(
        max_examples=max(1, round(examples * EXAMPLES)), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Runs the operators with ``count`` threads; otherwise the tests use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether tensors are bitwise equal, except that all NaNs are equal."""
    if got is None or want is None:
        return got is want
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape or got.stride() != want.stride():
        return False
    word = WORDS[got.element_size()]
    equal = got.contiguous().view(word) == want.contiguous().view(word)
    return bool((equal | (got.isnan() & want.isnan()).contiguous()).all())


def bad_selection(pieces: int, indices: int, draw: int) -> dict[str, tuple[int, Callable, str]]:
    """Errors of accumulate_select and select, for the pieces of ``PAIR``, 6 indices and two ranks: (argument, change,
    message). ``draw``: the position of the first argument of a Draw."""
    return {
        "indices short": (indices, lambda x: x[:5].clone(), "indices must have 6 entries for these slots, got 5"),
        "indices dtype": (indices, lambda x: x.int(), "indices must be Byte, got Int"),
        "pieces dtype": (pieces, lambda x: x.int(), "pieces must be Long, got Int"),
        "pieces number": (pieces, lambda x: x[:1].clone(), "must have 1 tensors, one per piece, got 2"),
        "pieces order": (pieces, lambda x: x.flip(0).contiguous(), "pieces must follow one another"),
        "pieces slots": (pieces, lambda x: torch.tensor([[0, 2, 0, 513], [2, 1, 513, 5]]), "slots 513 in row 0"),
        "pieces blocks": (pieces, lambda x: torch.tensor([[0, 1, 0, 8], [2, 1, 8, 4]]), "piece 0 has 1 blocks, .* 400"),
        "run": (draw + 1, lambda x: 0, "run must be 1 to .*, got 0"),
        "ranks": (draw + 2, lambda x: 0, "ranks must be 1 to .*, got 0"),
        "position": (draw + 3, lambda x: 2, "position must be 0 to 1, got 2"),
        "key": (draw + 4, lambda x: 2**32, "key must be .*, got 4294967296"),
        "explore": (draw + 5, lambda x: 2**32 + 1, "explore must be .*, got 4294967297"),
    }


def clone(args: list) -> list:
    """A copy of an operator's arguments, in the same memory order."""
    return tree_map_only(Tensor, Tensor.clone, args)


def bad_tensors(values: int | None = None, edges: int | None = None, error: int | None = None) -> dict[str, tuple]:
    """Errors for the arguments at these positions, of 13 values in 3 groups: (argument, change, message)."""
    name = "quantization_error"
    cases: dict[str, tuple] = {
        "values dtype": (values, lambda x: x.half(), "values must be Float, got Half"),
        "values strided": (values, lambda x: x.repeat_interleave(2)[::2], "values must be contiguous"),
        "edges dtype": (edges, lambda x: x.int(), "edges must be Long, got Int"),
        "edges few": (edges, lambda x: x[:1].clone(), "edges must have one entry more .*, got 1 for 13 values"),
        "edges begin": (edges, lambda x: torch.tensor([1, 5, 5, 13]), "edges .* from 0 to 13, got 1 in entry 0"),
        "edges descend": (edges, lambda x: torch.tensor([0, 5, 4, 13]), "edges .* 0 to 13, got 4 in entry 2 after 5"),
        "edges beyond": (edges, lambda x: torch.tensor([0, 5, 5, 14]), "edges .* from 0 to 13, got 14 in entry 3"),
        "edges short": (edges, lambda x: torch.tensor([0, 5, 5, 12]), "edges must end at 13, got 12"),
        f"{name} dtype": (error, lambda x: x.half(), f"{name} must be Float, got Half"),
        f"{name} numel": (error, lambda x: x[:12].clone(), f"{name} must have 13 entries, got 12"),
    }
    return {case: change for case, change in cases.items() if change[0] is not None}


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


def on(device: str, args: list) -> list:
    """An operator's arguments, with tensors moved to ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), args)


# Unaligned, adjacent small, and empty groups, with more values than one thread's part.
MANY_EDGES = torch.tensor([0, 0, 40_001, 40_002, 40_002, 40_009, 99_000, 100_003])


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


def agrees(name: str, args: list, device: str) -> list:
    """Checks that the operator and its reference write the same. Returns the operator's tensors."""
    check_device(device)
    got, want = on(device, clone(args)), clone(args)
    getattr(ops, name)(*got)
    getattr(reference, name)(*want)
    all_same(name, got, want)
    return got


def all_same(name: str, got: list, want: list) -> None:
    for parameter, mine, theirs in zip(inspect.signature(getattr(ops, name)).parameters, got, want, strict=False):
        for i, (one, other) in enumerate(zip(tree_leaves(mine), tree_leaves(theirs), strict=True)):
            assert not isinstance(one, Tensor) or same(one, other), f"{parameter} {i}"


def agrees_within(name: str, args: list, device: str) -> None:
    """The same for unaligned views into larger tensors, which must not be written outside the views."""
    check_device(device)
    for before in (1, 2, 3, 7, 8):  # 8 entries keep the alignment
        want = clone(args)
        with within_memory(args, before, device) as got:
            getattr(ops, name)(*got)
        getattr(reference, name)(*want)
        all_same(name, got, want)


@contextmanager
def within_memory(args: list, before: int, device: str) -> Iterator[list]:
    """Views into larger tensors, copied from the arguments. Checks at the end that nothing was written outside them."""
    memories = []

    def view(arg: Tensor) -> Tensor:
        memory = torch.full((arg.numel() + before + 64,), 77, dtype=arg.dtype, device=device)
        memories.append((memory, before, before + arg.numel()))
        return memory[before : before + arg.numel()].view(arg.shape).copy_(arg)

    yield tree_map_only(Tensor, view, args)
    for memory, begin, end in memories:
        assert bool((memory[:begin] == 77).all()) and bool((memory[end:] == 77).all())


def errors_add_up(value: Tensor, decoded: Tensor, error: Tensor) -> None:
    """Checks that the quantization error is the value minus the decoded value, up to rounding."""
    want = (value.cpu().double() - decoded.cpu().double()).float()
    torch.testing.assert_close(error.cpu(), want, rtol=2.0**-23, atol=0.0, equal_nan=True)


def refuses(name: str, args: list, change: tuple) -> None:
    """Checks the error for a changed argument. ``change``: (argument, function, message). Nothing may be written.

    The CUDA operators take any contents of TABLES, but write nothing outside the tensors."""
    index, becomes, message = change
    args = clone(args)
    old, new = args[index], becomes(args[index])
    args[index] = new
    parameter = list(inspect.signature(getattr(ops, name)).parameters)[index]
    contents = parameter in TABLES and (new.dtype, new.shape) == (old.dtype, old.shape)
    if EMULATED and (contents or "for these slots" in message):  # the table says how many
        with within_memory(args, 1, "cpu") as given:
            getattr(ops, name)(*given)
        return
    before = clone(args)
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, name)(*args)
    for mine, theirs in zip(tree_leaves(args), tree_leaves(before), strict=True):
        assert not isinstance(mine, Tensor) or same(mine, theirs.view(mine.shape)) or not mine.is_contiguous()
