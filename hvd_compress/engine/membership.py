"""Ranks that come and go: what a carrier provides beside :class:`~hvd_compress.engine.collectives.Collectives`, if the
set of its ranks may change from exchange to exchange.

Each exchange is an attempt, which belongs to a quorum and counts if it is committed: :meth:`Membership.start_quorum`,
then :meth:`Membership.commit` or :meth:`Membership.fail`.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .state import Saved


class PeerLost(RuntimeError):
    """A collective has failed because of another rank or of the network: the exchange is taken back and repeated."""


class NoQuorum(PeerLost):
    """No exchange has begun: what waits for it waits for the next one, and nothing is taken back."""


@runtime_checkable
class Membership(Protocol):
    """``Collectives`` of ranks that come and go. A handle of theirs raises :class:`PeerLost`; ``start()`` does not."""

    @property
    def group_size(self) -> int:
        """The ranks that share this rank's replica of the model, each with its own shards, and exchange them with those
        of other replicas: all of them commit an exchange, or none."""

    @property
    def attempt(self) -> tuple[int, int]:
        """The exchange that has begun last: how many were committed before it, and the number of its quorum. Two
        exchanges may have the same pair only if the first of them was committed by no rank."""

    def start_quorum(self) -> bool:
        """Waits for the ranks of the next exchange; a rank that is behind is healed. Returns whether the ranks are
        others than before. Raises :class:`NoQuorum` if there is none, :class:`PeerLost` if the ranks of the quorum were
        not reached, or healing has failed."""

    def commit(self) -> bool:
        """Called when this rank has received everything. Waits until all have. Returns whether the exchange counts. If
        not, it may still count on other ranks: this one is then healed in the next quorum."""

    def fail(self, error: RuntimeError) -> None:
        """The exchange has failed on this rank before :meth:`commit`, or has not begun: it counts nowhere. Closes this
        rank's connections, so that the others do not wait for it."""

    def report(self) -> dict[str, float]:
        """``peers``: ranks of the last quorum. ``rounds_committed``, ``rounds_taken_back``, ``quorums_missed``:
        on this rank. ``quorum_seconds``, ``commit_seconds``: spent in all of them so far."""

    def heal_with(self, save: Callable[[], Saved], load: Callable[[Saved], None]) -> None:
        """``save`` is called on a rank from which others are healed, in a thread of its own while ``start_quorum()``
        waits; ``load``, with what that has returned, on those, before the user's model and optimizers are loaded.
        Raises ``ValueError`` if another compressor, which exists, has called it."""
