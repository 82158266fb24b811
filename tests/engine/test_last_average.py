"""An average between backward and the optimizer's step: states that are saved there, and gradients that contain it."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import HOSTS, Rank, waiting_average
from methods import METHODS, SMALL, TRAINED
from torch import Tensor

from hvd_compress import DeMo
from hvd_compress.engine.spread import spread
from hvd_compress.gradients.last_average import _PROBES

ALL = {**METHODS, "demo-sign": DeMo, **{f"{name}-momentum": method for name, method in TRAINED.items()}}


def _tensors(state: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(state, dict):
        parts = [_tensors(item, f"{path}.{key}") for key, item in state.items() if key != "wire_stats"]
        return {name: tensor for part in parts for name, tensor in part.items()}
    return {path: state} if isinstance(state, Tensor) else {}


def _state(rank: Rank) -> dict[str, Tensor]:
    return _tensors(rank.compression.state_dict())


def _different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def _pending(host: str, name: str) -> list[Rank]:
    return waiting_average(partial(ALL[name], **SMALL), host)[1]


@pytest.mark.parametrize("name", ALL)
def test_a_state_before_the_optimizers_step_holds_the_whole_gradient(name: str) -> None:
    """It is that of a step whose average is discarded, and saving it changes nothing."""
    for rank, discarded, plain in zip(*(_pending("ddp", name) for _ in range(3)), strict=True):
        saved = _state(rank)
        assert _different(saved, _state(rank)) == []
        for r in (rank, plain):
            torch.optim.SGD(r.model.parameters(), lr=0.1).step()
        assert _different(_state(rank), _state(plain)) == []
        discarded.compression.discard_step()
        assert _different(saved, _state(discarded)) == []


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["iwp", "iwp-lanes4", "fft-gather", "mipd", "mp2", "powersgd", "topk", "demo-sign"])
def test_an_average_can_be_discarded_after_its_state_was_saved(name: str, host: str) -> None:
    for rank, other in zip(_pending(host, name), _pending(host, name), strict=True):
        rank.compression.state_dict()
        for r in (rank, other):
            r.compression.discard_step()
        assert _different(_state(rank), _state(other)) == []


@pytest.mark.parametrize("count", [1, 32, 33, 64, 100, 1000, 4001])
def test_what_is_done_to_a_part_of_the_model_is_seen(count: int) -> None:
    """The parameters that are looked at: few, some of them in every second, third and fourth, and in every tenth of the
    model."""
    numbers = range(count)
    seen = spread(numbers, _PROBES)
    assert len(seen) == len(set(seen)) <= 32 and set(seen) <= set(numbers)
    assert list(seen) == list(numbers) or len(seen) > 20
    for period in (2, 3, 4):
        assert {number % period for number in seen} == {number % period for number in numbers}
    assert {number * 10 // count for number in seen} == {number * 10 // count for number in numbers}
