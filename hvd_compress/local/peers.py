"""The quorums and commits of ranks that come and go: each round begins with a quorum and ends with a vote.

A rank that has received the averages of a round, and not the result of the vote, does not know whether the others have
committed it. The next quorum tells. Either the round is taken back, or this rank is behind and is healed, and its
payload was applied (:class:`hvd_compress.local.round.Round`).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

from torch.optim import Optimizer

from ..engine.engine import Engine
from ..engine.membership import Membership, NoQuorum, PeerLost
from ..engine.state import Saved, Tree, check, load, save
from .common_weights import CommonWeights

Attempt = tuple[int, int]

# Committed rounds that are remembered for ranks in doubt.
_REMEMBERED = 1024


class Peers:
    """The quorums and commits of rounds, and healing: a rank that is behind gets the common weights, the outer
    momentum, the states and settings (not ``lr``) of optimizers on averaged gradients, and the numbers of rounds and
    of local steps. Its own progress since its last round, and its residual, stay, and are exchanged in the next one; a
    rank that has ended no round so far has none.

    Args:
        members: the ranks.
        optimizers: those on averaged gradients.
        steps: describes the number of local steps.
    """

    def __init__(
        self, engine: Engine, members: Membership, common: CommonWeights, optimizers: Sequence[Optimizer], steps: Tree
    ) -> None:
        self._engine, self._members, self._common, self._steps = engine, members, common, steps
        self._optimizers = optimizers
        #: Whether this rank has ended a round with the others, so that its progress is relative to their weights; and
        #: whether the last quorum has healed it.
        self.joined, self.healed, self._changed = False, False, False
        # Rounds that were committed, the last ones, and the failures in a row since.
        self._committed, self._failures = list[Attempt](), 0
        self._before_healing: Callable[[], None] = lambda: None

    def register(self) -> None:
        """Lets ranks be healed from each other. Raises ``ValueError`` if the ``Manager`` has a compressor already."""
        self._members.heal_with(self._save, self._load)

    def begin(self, before_healing: Callable[[], None]) -> bool:
        """Waits for the ranks of the next round. Returns whether it can begin, after :meth:`enter`. Calls
        ``before_healing`` before it changes the common weights."""
        self._before_healing, self.healed = before_healing, False
        try:
            self._changed = self._members.start_quorum()
        except PeerLost as error:
            self.fail(error)
            return False
        finally:
            self._before_healing = lambda: None
        return True

    def enter(self) -> None:
        """Begins with the ranks of the last quorum. If they are others, no earlier round can be taken back any more."""
        if self._changed:
            self._engine.comparison.register(self._engine.method)
            self._engine.restart()

    def commit(self) -> bool:
        """Votes for a round whose averages this rank has received. Returns whether it is committed."""
        if not self._members.commit():
            return False
        self.joined, self._failures = True, 0
        self._committed = [*self._committed, self._members.attempt][-_REMEMBERED:]
        return True

    @property
    def attempt(self) -> Attempt:
        """The round that has begun last."""
        return self._members.attempt

    def was_committed(self, attempt: Attempt) -> bool:
        """Whether other ranks have committed a round of this rank."""
        committed = attempt in self._committed
        self.joined |= committed
        return committed

    def fail(self, error: RuntimeError) -> None:
        """A round has failed before this rank received its averages, or has not begun: no rank commits it. Warns at the
        1st, 10th, 100th and 1,000th failure in a row."""
        self._members.fail(error)
        self._failures += 1
        if self._failures in (1, 10, 100, 1000):
            what = "a round has not begun" if isinstance(error, NoQuorum) else "a round is taken back"
            row = "" if self._failures == 1 else f" ({self._failures} in a row)"
            self._engine.warn(f"{what}{row}, and the next one exchanges its progress: {error}")

    def _save(self) -> Saved:
        optimizers = [deepcopy(optimizer.state_dict()) for optimizer in self._optimizers]
        return {"state": save(self._shared()), "committed": list(self._committed), "optimizers": optimizers}

    def _load(self, state: Saved) -> None:
        self._before_healing()
        check(self._shared(), state["state"])
        load(self._shared(), state["state"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            rates = [{key: group[key] for key in ("lr",) if key in group} for group in optimizer.param_groups]
            optimizer.load_state_dict(deepcopy(saved))  # which keeps the tensors that it gets
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group.update(rate)  # its schedule goes on from there
        self._committed = list(state["committed"])
        self.healed = True

    def _shared(self) -> Tree:
        """Describes the state that all ranks have in common between rounds."""
        common = self._common.state()
        named = {key: common[key] for key in ("common", "velocity")}
        return {"rounds": self._engine.state(), "steps": self._steps, **named}
