"""The option --all. Without it, tests marked slow are deselected, and values of a parameter marked ``alternate`` take
turns: each combination of the others has one of them, and neighbouring combinations have different ones."""

import gc
import os
from collections import defaultdict

import pytest
import torch
from hypothesis import settings

# Ranks are threads or processes on few cores: one thread each.
torch.set_num_threads(1)

settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow, too")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--all"):
        os.environ.setdefault("TEST_EXAMPLES", "0.4")  # operators/checks.py


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    fast = [item for item in items if not item.get_closest_marker("slow")]
    #: By test and parameter: the numbers of its values.
    numbers = defaultdict[tuple[object, str], dict[int, int]](dict)
    for item in fast:
        if item.get_closest_marker("alternate"):
            for name, value in item.callspec.params.items():
                of_values = numbers[item.function, name]
                of_values.setdefault(id(value), len(of_values))

    def has_turn(item: pytest.Item) -> bool:
        alternating = [name for marker in item.iter_markers("alternate") for name in marker.args]
        if not alternating:
            return True
        places = {name: numbers[item.function, name][id(value)] for name, value in item.callspec.params.items()}
        own = [places.pop(name) for name in alternating]
        turn = sum(places.values())
        for name, place in zip(alternating, own, strict=True):
            turn, mine = divmod(turn, len(numbers[item.function, name]))
            if place != mine:
                return False
        return True

    chosen = {item for item in fast if has_turn(item)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Collections, and scans for objects of a class, look at what the module's tests make, not at all that was
    imported: a first step or a ``gc.collect()`` takes a millisecond, not 30 to 200."""
    gc.collect()
    gc.freeze()
