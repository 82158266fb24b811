"""The rounds of ranks that come and go: each begins with a quorum, and counts if it is committed.

A rank that has everything of a round, but was not told to commit it, is in doubt: others may have committed it. The
next quorum tells. Either the round is taken back, or this rank, which is behind, is healed, and what it has sent was
applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..engine.commits import Commits
from ..engine.engine import Engine
from ..engine.membership import Membership, NoQuorum, PeerLost
from ..engine.state import Saved, TensorLeaf, Tree, check, load, save
from ..engine.work import Work, undo
from .common_weights import CommonWeights, Weight, scale_residuals

Progress = Sequence[tuple[Weight, Tensor]]


@dataclass(frozen=True)
class _Doubt:
    """A round that may have been committed by others. ``works``: residuals are as after it. ``uncompressed``: progress
    that it has sent from no residual; the parameters do not contain it. ``counts``: called if others have committed
    it."""

    attempt: tuple[int, int]
    works: Sequence[Work]
    uncompressed: Progress
    counts: Callable[[], None]


class Peers:
    """The quorums and commits of rounds, and healing: a rank that is behind gets the common weights, the outer momentum
    and the numbers of rounds and of local steps. Its own progress since its last round, and its residual, stay, and are
    exchanged in the next one; a rank that has ended no round so far has none.

    Args:
        members: the ranks.
        steps: describes the number of local steps.
    """

    def __init__(self, engine: Engine, members: Membership, common: CommonWeights, steps: Tree) -> None:
        self._engine, self._members, self._common, self._steps = engine, members, common, steps
        #: Whether this rank has ended a round with the others, so that its progress is relative to their weights; and
        #: whether the last quorum has dropped its progress, since it had not.
        self.joined, self.dropped = False, False
        self._commits = Commits(engine)
        self._doubt: _Doubt | None = None
        # In a quorum: whether this rank was healed, and its progress before that.
        self._healed, self._progress = False, list[tuple[Weight, Tensor]]()

    def register(self) -> None:
        """Lets other ranks be healed from this one, and this one from them. Raises ``ValueError`` if the ``Manager``
        has a compressor already."""
        self._members.heal_with(self._save, self._load)

    def begin(self) -> bool:
        """Waits for the ranks of the next round. Returns whether it can begin. What this rank has done before its first
        round with others may be :attr:`dropped`."""
        self._healed, self._progress = False, self._own_progress() if self._doubt else []
        failure = None
        try:
            changed = self._members.start_quorum()
        except PeerLost as error:
            failure = error
        self.dropped = self._healed and not self.joined
        if self._healed or (self._doubt and failure is None):
            self._settle()
        self._progress = []
        if failure is not None:
            self.fail(failure)
            return False
        if changed:
            self._engine.comparison.register(self._engine.method)
            self._engine.restart()
        return True

    def commit(self) -> bool:
        """This rank has everything of a round. Returns whether the round counts."""
        if not self._members.commit():
            return False
        self.joined = True
        self._commits.add(self._members.attempt)
        return True

    def fail(self, error: RuntimeError) -> None:
        """A round has failed before this rank had everything, or has not begun: no rank commits it."""
        self._members.fail(error)
        what = "a round has not begun" if isinstance(error, NoQuorum) else "a round is taken back"
        self._commits.fail(what, f", and the next one exchanges its progress: {error}")

    def doubt(self, works: Sequence[Work], uncompressed: Progress, counts: Callable[[], None]) -> None:
        """A round was not committed by this rank, which had everything of it. See :class:`_Doubt`."""
        self._doubt = _Doubt(self._members.attempt, works, uncompressed, counts)

    def _settle(self) -> None:
        """Takes a round in doubt back, unless others have committed it; then makes the parameters the common weights
        and this rank's progress."""
        doubt, self._doubt = self._doubt, None
        taken_back = doubt is not None and doubt.attempt not in self._commits.attempts
        if doubt is not None:
            if taken_back:
                undo(doubt.works)
            else:
                doubt.counts()
        if not self.joined:
            scale_residuals(self._engine.works, 0.0)
        progress = {weight.name: tensor for weight, tensor in self._progress}
        for weight in self._common.weights:
            with weight.order:
                left = progress.get(weight.name, weight.common.new_zeros(()))
                self._common.write_after(weight, left, weight.own)
        for weight, tensor in doubt.uncompressed if doubt is not None and taken_back else ():
            with weight.order:
                weight.own.add_(tensor)

    def _own_progress(self) -> list[tuple[Weight, Tensor]]:
        return [(weight, self._common.advance(weight)) for weight in self._common.weights]

    def _save(self) -> Saved:
        return {"state": save(self._shared()), "committed": list(self._commits.attempts)}

    def _load(self, state: Saved) -> None:
        if self.joined and not self._progress:
            self._progress = self._own_progress()
        check(self._shared(), state["state"])
        load(self._shared(), state["state"])
        self._commits.replace(state["committed"])
        self._healed = True

    def _shared(self) -> Tree:
        """Describes the state that all ranks have in common between rounds."""
        weights = self._common.weights
        return {
            "rounds": self._engine.state(),
            "steps": self._steps,
            "common": {w.name: TensorLeaf(w.common) for w in weights},
            "velocity": {w.name: TensorLeaf(w.velocity) for w in weights if w.velocity is not None},
        }
