"""What the operators' tests share: random sizes, values and segments, and equality to the last bit."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from hvd_compress import ops
from hvd_compress.reference import BLOCK

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Without the extension an operator *is* its reference: comparing them would prove nothing.
needs_compiled = pytest.mark.skipif(not ops.COMPILED, reason="the extension is not built")


def check_device(device: str) -> None:
    if device == "cuda" and not ops.COMPILED_CUDA:
        pytest.skip("the CUDA extension is not built")


def bounded(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(got: Tensor | None, want: Tensor | None) -> bool:
    """Equal to the last bit, except that a NaN is a NaN."""
    if got is None or want is None:
        return got is want
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape or got.stride() != want.stride():
        return False
    word = WORDS[got.element_size()]
    equal = got.contiguous().view(word) == want.contiguous().view(word)
    return bool((equal | (got.isnan() & want.isnan()).contiguous()).all())


def clone(args: list) -> list:
    """The arguments of an operator, on memory of their own, in the same memory order."""
    return [arg.clone() if isinstance(arg, Tensor) else clone(arg) if isinstance(arg, list) else arg for arg in args]


KINDS = ["normal", "normal", "equal", "zero", "tiny", "huge", "wild"]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
payload_dtypes = st.sampled_from([torch.float32, torch.float16])
phases = st.one_of(st.integers(0, 1000), st.integers(-1000, 2**40))


def values(n: int, kind: str, seed: int) -> Tensor:
    """n float32 values. equal: only three; tiny: denormals too; huge: sums overflow; wild: NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(n, generator=generator)
    where = torch.randint(0, 40, (n,), generator=generator)
    if kind == "equal":
        return where.remainder(3) - 1.0
    if kind == "zero":
        return torch.where(where == 0, value, torch.where(where == 1, -0.0, 0.0))
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
    """1 to 100,003 entries; mostly flat, sometimes an image batch (for channels_last)."""
    if draw(st.integers(0, 3)) == 0:
        return (draw(st.integers(1, 9)), draw(st.integers(1, 30)), draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    edges = st.sampled_from([1, 255, 256, 257, 511, 512, 513, 100_003])
    sizes = st.one_of(edges, st.integers(1, 3000), st.integers(1, 100_003))
    return (draw(sizes),)


def shaped(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """In channels_last memory order if it is an image batch."""
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
    """A bucket: rows of first block, blocks, first slot, slots; and every parameter's entries."""

    rows: list[list[int]]
    entries: list[int]
    blocks: int
    slots: int

    def tensor(self, device: str) -> Tensor:
        return torch.tensor(self.rows, device=device)


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


def offsets_of(layout: Layout, seed: int, spread: int) -> Tensor:
    """Random offsets below ``spread``: a small one makes several slots share an entry."""
    return torch.randint(0, spread, (layout.slots,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def on(device: str, args: list) -> list:
    """An operator's arguments, its tensors moved to ``device``."""
    return [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
