"""The option --all. Without it, tests marked slow are deselected, and values of a parameter marked ``alternate`` take
turns: each combination of the others has one of them, and neighbouring combinations have different ones."""

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    #: By test and parameter: the numbers of its values.
    numbers = defaultdict[tuple[object, str], dict[int, int]](dict)
    for item in items:
        if item.get_closest_marker("alternate"):
            for name, value in item.callspec.params.items():
                of_values = numbers[item.function, name]
                of_values.setdefault(id(value), len(of_values))

    def has_turn(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("alternate")
        if marker is None:
            return True
        places = {name: numbers[item.function, name][id(value)] for name, value in item.callspec.params.items()}
        (name,) = marker.args
        return places.pop(name) == sum(places.values()) % len(numbers[item.function, name])

    chosen = [not item.get_closest_marker("slow") and has_turn(item) for item in items]
    config.hook.pytest_deselected(items=[item for item, here in zip(items, chosen, strict=True) if not here])
    items[:] = [item for item, here in zip(items, chosen, strict=True) if here]
