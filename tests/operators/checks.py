"""Comparisons of operators with their references."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_compress import ops, reference

_needs_cuda = pytest.mark.skipif(not ops.COMPILED_CUDA, reason="the CUDA extension is not built")
DEVICES = ["cpu", *[pytest.param("cuda", marks=_needs_cuda)] * torch.cuda.is_available()]
#: Whether the operators for CPU tensors are the CUDA kernels, on the emulator of tests/emulation.
EMULATED = "EMULATED_ARCH" in os.environ
#: Arguments whose contents operators on other devices than the CPU do not check.
TABLES = ("pieces", "edges", "kind", "base", "book")
#: The share of hypothesis' examples: fewer in the short run, and for slow builds.
EXAMPLES = float(os.environ.get("TEST_EXAMPLES", "1"))
#: Whether slow tests try fewer of their cases, too.
FEW = EXAMPLES < 1
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def on(device: str, args: list) -> list:
    """An operator's arguments, with tensors moved to ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), args)


def agrees(name: str, args: list, device: str) -> list:
    """Checks that the operator and its reference write the same. Returns the operator's tensors."""
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


def refusals(name: str, sample: Callable[[], list], changes: dict[str, tuple]) -> Callable[[str], None]:
    """A test that the operator refuses each of the changed arguments."""

    @pytest.mark.parametrize("case", changes)
    def test(case: str) -> None:
        refuses(name, sample(), changes[case])

    return test


def overlaps(name: str, sample: Callable[[], list], pairs: list[tuple[int, int]]) -> Callable[[], None]:
    """A test that the operator refuses the first argument of each pair in the memory of the second."""

    def test() -> None:
        parameters = list(inspect.signature(getattr(ops, name)).parameters)
        for one, other in pairs:
            args = sample()
            args[one] = args[other]
            with pytest.raises(RuntimeError, match=f"{parameters[one]} must not overlap {parameters[other]}"):
                getattr(ops, name)(*args)

    return test


def opchecks(*cases: tuple[str, Callable[[], list]]) -> Callable[[str], None]:
    """A test of the schemas and fake kernels of operators, each with arguments for it."""

    def test(device: str) -> None:
        for name, sample in cases:
            torch.library.opcheck(getattr(torch.ops.hvd_compress, name).default, tuple(on(device, sample())))

    return test
