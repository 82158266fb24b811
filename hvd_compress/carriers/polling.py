"""Waiting for a collective without using the CPU."""

import time
from collections.abc import Callable

_INTERVAL = 50e-6


def wait_until(done: Callable[[], bool], timeout: float, library: str) -> None:
    """Returns when ``done()`` is true. Raises ``TimeoutError`` after ``timeout`` seconds, which may be infinite.
    ``library``: the name of the collective's library, for the error message."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a collective of {library} has not ended in {timeout:g} s")
        time.sleep(_INTERVAL)
