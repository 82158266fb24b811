"""What an engine shares with the other engines of its process, and compares with the other ranks."""

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from .collectives import Collectives
from .comparison import Comparison
from .driver import Driver
from .entered import Entered
from .exchange import Exchanges
from .registry import Peer


class Compared(Protocol):
    """What an :class:`EnginePeer` uses of its engine."""

    parameters: list[torch.nn.Parameter]
    collectives: Collectives
    exchanges: Exchanges
    entered: Entered

    @property
    def driver(self) -> Driver: ...

    def check_generation(self) -> bool: ...


class EnginePeer:
    """An engine's entry in the registry, and the comparison of its configuration. Other engines of the process call the
    methods of :class:`~hvd_compress.engine.registry.Peer`.

    Args:
        engine: only a weak reference is kept.
        lock: of the engine.
        configuration: returns what of the engine must be the same on all ranks; keeps no strong reference either.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self, engine: Compared, lock: "threading.RLock", configuration: Callable[[], dict[str, object]], timeout: float
    ) -> None:
        self._engine: weakref.ref[Compared] = weakref.ref(engine)
        self._lock = lock
        collectives, device = engine.collectives, engine.parameters[0].device
        self._registry = collectives.registry()
        self._number = self._registry.add(self)
        #: Begins the names of the engine's collectives: the same on all ranks, and another one for every engine.
        self.label = f"hvd_compress.{self._number}"
        self._comparison = Comparison(collectives, self.label, device, configuration, timeout)

    @property
    def _alive(self) -> Compared:
        found = self._engine()
        assert found is not None, "the engine no longer exists"
        return found

    @property
    def compared(self) -> bool:
        """Whether the ranks have compared the engine's configuration since the last change."""
        return self._comparison.done

    def compare(self) -> None:
        """Compares the ranks' configurations, unless they were since the last change. Raises ``RuntimeError``, on all
        ranks, if they differ or one does not come. Waits."""
        if not self._comparison.done:
            engine = self._alive
            with engine.exchanges.waiting():
                self._comparison.require(self._comparing)

    def changed(self) -> None:
        """The configuration may have changed: the ranks compare it before their next exchange."""
        self._comparison.changed()

    def renew(self) -> None:
        """Registers the engine again: the set of ranks has changed (elastic)."""
        self._registry = self._alive.collectives.registry()
        self._registry.add(self, self._number)
        self._comparison.changed()

    def advance_others(self) -> None:
        """Continues the exchanges of all other engines: another rank may wait for those first."""
        for other in self._registry.others(self):
            other.advance_if_free()

    def _comparing(self) -> list[Peer]:
        return [other for other in self._registry.others(self) if other.compares]

    # Called by the other engines, see Peer.

    @property
    def exchanging(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.collectives.active and engine.collectives.size > 1

    @property
    def compares(self) -> bool:
        return not self._comparison.done and self._alive.driver.comes_first

    def join_comparison(self) -> None:
        engine = self._alive
        engine.check_generation()
        self._comparison.join()

    def advance_comparison(self) -> None:
        self._comparison.advance()

    def advance_if_free(self) -> None:
        engine = self._alive
        if not engine.exchanges.running or not self._lock.acquire(blocking=False):
            return
        try:
            with engine.entered:
                engine.exchanges.advance()
        except BaseException:
            engine.driver.reset()
            raise
        finally:
            self._lock.release()
