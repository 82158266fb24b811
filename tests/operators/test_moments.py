"""moments against hvd_compress/reference/codes.py, bitwise."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from checks import agrees, agrees_within, bounded, on, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY_EDGES, RUNS, group_edges, kinds, seeds, values

from hvd_compress import ops
from hvd_compress.reference.codes import PART


def arguments_of(edges: torch.Tensor, kind: str, seed: int) -> list:
    return [values(int(edges[-1]), kind, seed), edges, torch.full((len(edges) - 1, 3), 7.0, dtype=torch.float64)]


sample = partial(arguments_of, torch.tensor([0, 40, 40, 141]), "normal", 3)


@bounded(150)
@given(args=st.builds(arguments_of, group_edges(), kinds, seeds))
def test_equals_reference(device: str, args: list) -> None:
    agrees("moments", args, device)


@pytest.mark.parametrize("kind", ["normal", "huge", "wild"])
def test_many_values(device: str, kind: str) -> None:
    with threads(3):
        agrees("moments", arguments_of(MANY_EDGES, kind, 5), device)


@pytest.mark.parametrize("sizes", RUNS.values(), ids=RUNS)
def test_runs(device: str, sizes: list[int]) -> None:
    agrees("moments", arguments_of(torch.tensor([0, *accumulate(sizes)]), "wild", 5), device)


def test_within_other_memory(device: str) -> None:
    agrees_within("moments", arguments_of(torch.tensor([0, 0, 33, 999]), "normal", 5), device)


def test_close_to_plain_sums(device: str) -> None:
    args = on(device, arguments_of(MANY_EDGES, "normal", 5))
    ops.moments(*args)
    value, edges, out = on("cpu", args)
    for got, begin, end in zip(out, edges, edges[1:], strict=False):
        mine = value[begin:end].double()
        want = torch.stack([(mine**2).sum(), (mine**4).sum(), mine.abs().max() if begin < end else mine.sum()])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0.0)


def test_order_of_the_sums(device: str) -> None:
    """Rounding depends on the order: 2**54 + 1 is 2**54, but 2**54 + 3 is 2**54 + 4."""
    value = torch.zeros(128)
    value[0] = 2.0**27
    value[[32, 64, 96]] = 1.0  # into sum 0, one by one
    value[[16, 48, 80]] = 1.0  # sum 16 is 3, then the first to be added to sum 0
    out = torch.empty(1, 3, dtype=torch.float64, device=device)
    ops.moments(*on(device, [value, torch.tensor([0, 128])]), out)
    # The exact sum rounds to 2**54 + 8; added in sequence the result is 2**54.
    assert out[0].tolist() == [2.0**54 + 4, 2.0**108, 2.0**27]


def test_order_of_the_parts(device: str) -> None:
    """As above, with the first values of parts in place of values: their sums are added by the number of the part."""
    value = torch.zeros(96 * PART + 1)
    value[0] = 2.0**27
    value[[32 * PART, 64 * PART, 96 * PART]] = 1.0
    value[[16 * PART, 48 * PART, 80 * PART]] = 1.0
    out = torch.empty(1, 3, dtype=torch.float64, device=device)
    ops.moments(*on(device, [value, torch.tensor([0, len(value)])]), out)
    assert out[0].tolist() == [2.0**54 + 4, 2.0**108, 2.0**27]


@pytest.mark.parametrize("sizes", [[PART - 1, PART, PART + 1], [0, 3 * PART, 0, 1, 33 * PART + 3, 0]])
def test_parts(device: str, sizes: list[int]) -> None:
    agrees("moments", arguments_of(torch.tensor([0, *accumulate(sizes)]), "normal", 5), device)


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_nan_and_infinity(device: str, count: int) -> None:
    """The sums propagate NaNs, the largest magnitude ignores them; infinities are in both."""
    for place in range(count):
        value = torch.full((count,), -2.0)
        value[place] = torch.nan
        more = value.clone()
        more[place] = -torch.inf
        args = on(device, [torch.cat([value, more]), torch.tensor([0, count, 2 * count])])
        out = torch.empty(2, 3, dtype=torch.float64, device=device)
        ops.moments(*args, out)
        assert bool(out[0, :2].isnan().all()) and out[0, 2] == (2.0 if count > 1 else 0.0)
        assert out[1].tolist() == [torch.inf] * 3


test_opcheck = opchecks(("moments", sample))


BAD = {
    "values dtype": (0, lambda x: x.double(), "values must be Float, got Double"),
    "values strided": (0, lambda x: torch.rand(282)[::2], "values must be contiguous"),
    "edges dtype": (1, lambda x: x.int(), "edges must be Long, got Int"),
    "edges none": (1, lambda x: x[:0].clone(), "edges must have one entry more .*, got 0 for 141 values"),
    "edges one": (1, lambda x: x[:1].clone(), "edges must have one entry more .*, got 1 for 141 values"),
    "edges begin": (1, lambda x: torch.tensor([1, 40, 40, 141]), "edges .* from 0 to 141, got 1 in entry 0"),
    "edges descend": (1, lambda x: torch.tensor([0, 40, 39, 141]), "from 0 to 141, got 39 in entry 2 after 40"),
    "edges beyond": (1, lambda x: torch.tensor([0, 40, 142, 142]), "from 0 to 141, got 142 in entry 2"),
    "edges short": (1, lambda x: torch.tensor([0, 40, 40, 140]), "edges must end at 141, got 140"),
    "edges < 0": (1, lambda x: torch.tensor([0, -1, 40, 141]), "from 0 to 141, got -1 in entry 1"),
    "out dtype": (2, lambda x: x.float(), "out must be Double, got Float"),
    "out shape": (2, lambda x: x.view(-1), "out must be of shape .groups, 3."),
    "out numel": (2, lambda x: x[:2].clone(), "out must have 9 entries, got 6"),
}


test_refuses = refusals("moments", sample, BAD)
