"""The option --all: without it, tests marked slow are deselected and hypothesis runs fewer examples."""

import pytest
import torch
from hypothesis import settings

# Ranks are threads or processes on few cores: one thread each.
torch.set_num_threads(1)

settings.register_profile("all", max_examples=100, deadline=None)
settings.register_profile("short", max_examples=25, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow too, and all examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("--all") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
