"""Lifetimes. A compressor ends with its last reference, so nothing that it owns refers to it strongly::

    method ──► engine
          └──► clock: a host, or rounds of local steps

A method that was dropped in a reference cycle waits for the garbage collector, which may run at any allocation. So what
is called from outside (by torch's hooks of all optimizers, by other engines, by a ``Manager``) begins with a weak
reference to the method: it keeps the method, and with it all of the others, to its end, or does nothing. What is called
inside has a caller that keeps the method.

The collector runs at another time on every rank. So what would raise an error about something that exists, or wait for
it, first lets the collector run: :func:`in_use`.
"""

import gc
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_use(look: Callable[[], T]) -> T:
    """Returns what ``look()`` finds, without objects that were dropped and wait for the garbage collector."""
    if look():
        gc.collect()
    return look()
