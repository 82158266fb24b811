"""The registry of cases that run on real ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from methods import EXACT, METHODS


@dataclass(frozen=True)
class Case:
    """``once``: does not depend on the method, and runs for "iwp" only. ``named``: runs only if a plan names it, since
    it takes long or needs settings of its own. ``applies``: whether it applies to a method."""

    run: Callable[[], None]
    once: bool
    named: bool
    applies: Callable[[str], bool]


Cases = dict[str, Case]


def register(cases: Cases, **properties: object) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A decorator that adds a case under its function's name."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        assert function.__name__ not in cases
        defaults = {"once": False, "named": False, "applies": lambda method: True}
        cases[function.__name__] = Case(function, **{**defaults, **properties})  # type: ignore[arg-type]
        return function

    return add


@contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], says: str) -> Iterator[pytest.ExceptionInfo]:
    """Checks that its block raises an error that contains this text."""
    with pytest.raises(error) as raised:
        yield raised
    assert says in str(raised.value), raised.value


def has_exact_options(method: str) -> bool:
    return method.partition("-")[0] in EXACT


def has_momentum(method: str) -> bool:
    return hasattr(METHODS[method].func, "take_momentum")


def is_demo(method: str) -> bool:
    return method.partition("-")[0] == "demo"


def names_of(cases: Cases, method: str) -> list[str]:
    """The cases to run for a method if the plan names none."""
    return [n for n, c in cases.items() if not c.named and c.applies(method) and (method == "iwp" or not c.once)]
