"""An engine's side of the process's other engines, and of the comparison with other ranks."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from .collectives import Collectives
from .comparison import Comparison
from .driver import Driver
from .entered import Entered
from .exchange import Exchanges
from .owner import Owner, in_use
from .registry import Peer


class Compared(Protocol):
    """The part of an engine that :class:`EnginePeer` uses."""

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
        owner: of the engine, which need not be complete before :meth:`register`. Only a weak reference is kept.
        lock, collectives: of the engine.
        device: of the messages.
        configuration: returns what of the engine must be the same on all ranks.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self,
        owner: Owner[Compared],
        lock: "threading.RLock",
        collectives: Collectives,
        device: torch.device,
        configuration: Callable[[Any], dict[str, object]],
        timeout: float,
    ) -> None:
        self._owner, self._lock, self._configuration = weakref.ref(owner), lock, configuration
        self._registry = collectives.registry()
        self._number = self._registry.number()
        #: Begins the names of the engine's collectives: the same on all ranks, and another one for every engine.
        self.label = f"hvd_compress.{self._number}"
        self._comparison = Comparison(collectives, self.label, device, timeout)

    def register(self) -> None:
        """Lets the other engines call this one from now on."""
        self._registry.add(self, self._number)

    @property
    def compared(self) -> bool:
        """Whether the ranks have compared the engine's configuration since the last change."""
        return self._comparison.done

    def compare(self) -> None:
        """Compares the ranks' configurations, unless they were since the last change. Raises ``RuntimeError``, on all
        ranks, if they differ or one does not come. Waits."""
        owner = self._owner()
        if owner is not None and not self._comparison.done:
            in_use(lambda: any(self._registry.others(self)))  # a dropped one would wait for the other ranks for ever
            with owner.engine.exchanges.waiting():
                self._comparison.require(partial(self._configuration, owner.engine), self._comparing)

    def changed(self) -> None:
        """The configuration may have changed: the ranks compare it before their next exchange."""
        self._comparison.changed()

    def renew(self) -> None:
        """Registers the engine again: the set of ranks has changed (elastic)."""
        if (owner := self._owner()) is not None:
            self._registry = owner.engine.collectives.registry()
            self.register()
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
        owner = self._owner()
        return owner is not None and owner.engine.collectives.active and owner.engine.collectives.size > 1

    @property
    def compares(self) -> bool:
        owner = self._owner()
        return owner is not None and not self._comparison.done and owner.engine.driver.comes_first

    def join_comparison(self) -> None:
        if (owner := self._owner()) is not None:
            owner.engine.check_generation()
            self._comparison.join(partial(self._configuration, owner.engine))

    def advance_comparison(self) -> None:
        self._comparison.advance()

    def advance_if_free(self) -> None:
        owner = self._owner()
        if owner is None or not owner.engine.exchanges.running or not self._lock.acquire(blocking=False):
            return
        try:
            with owner.engine.entered:
                owner.engine.exchanges.advance()
        except BaseException:
            owner.engine.driver.reset()
            raise
        finally:
            self._lock.release()
