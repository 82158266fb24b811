"""The steps of ranks that come and go: each is an attempt, which may fail.

The user's program starts a quorum before the forward pass and asks for the commit after backward, as
``torchft.optim.OptimizerWrapper`` does; the exchange lies in between. A rank that has everything votes, and knows after
the vote that all have. One on which the exchange fails takes the step back and reports it, and no rank commits.

A rank that was not told the result of the vote, or not to commit, is in doubt: others may have committed. The next
quorum tells. Either the step is taken back, or this rank is healed, and what it has sent was applied. If that quorum
fails, too, the one after it tells.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from ..engine.agreement import hash_of
from ..engine.commits import Commits
from ..engine.engine import Engine
from ..engine.membership import Membership, PeerLost
from ..engine.method import Method
from ..engine.shards import local
from ..engine.state import Saved, Tree, check, load, part_of, save


class Step(Protocol):
    """What :class:`Attempts` uses of a :class:`~hvd_compress.gradients.step.GradientStep`."""

    @property
    def collecting(self) -> bool: ...

    def reset(self) -> None: ...

    def discard(self) -> None: ...

    def undo(self) -> None: ...

    def undo_by(self, restore: Callable[[], None]) -> None: ...


class Attempts:
    """The quorums and votes of steps, and healing. A context in which a step's exchange ends: at its end this rank has
    everything, and votes; a lost peer ends it without an error. In healing, a rank that is behind gets what all ranks
    have in common, from the number of the step to a method's history. Its own residual stays; a rank that has committed
    no step has none.

    Args:
        members: the ranks.
        step: owns this object: only a weak reference is kept.
    """

    def __init__(self, engine: Engine, members: Membership, step: Step) -> None:
        self._engine, self._members = engine, members
        self._step: Step = weakref.proxy(step)
        self._claimed = self._joined = self._healed = False
        self._commits = Commits(engine)
        #: The attempt of which this rank has everything, until it is known whether it counts.
        self._doubt: tuple[int, int] | None = None
        #: What it has sent, by parameter, if it was taken back in doubt.
        self._sent: dict[int, Tensor] = {}
        #: The number of the step of the last attempt; None before the first.
        self._number: int | None = None
        self._register(claim=False)

    def begin(self) -> None:
        """The first gradient of a step has arrived. Compares the ranks' configurations if they are others than before.

        Raises:
            ValueError: the ``Manager`` has another compressor.
            RuntimeError: the user's program has started no quorum, and nothing has changed; or the ranks differ.
        """
        engine, members = self._engine, self._members
        if not self._claimed:
            self._register(claim=True)
            self._claimed = True
        self.settle()
        try:
            changed = members.follow_quorum()
        except PeerLost:  # as will the exchange
            self._suspend()
        else:
            self._settle(counts=False)
            if changed or self._healed:
                self._renew()
        self._number = engine.step
        try:
            engine.peer.compare()
        except PeerLost as error:
            members.lose(error)
            engine.peer.waive()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self._vote()
            return False
        # Before this rank had everything: no rank commits the step.
        self._reset()
        self._take_back()
        if isinstance(error, PeerLost):
            self._report(error, "a step is taken back, and later ones send what the residuals keep of its gradients")
            return True
        self.drop()
        return False

    def _vote(self) -> None:
        self._doubt = self._members.attempt
        try:
            self._members.vote()
        except PeerLost as error:
            self._report(error, "a vote has failed, and the next quorum tells whether its step counts")

    def drop(self) -> None:
        """A step has failed on this rank: the others must not wait for it."""
        self._members.lose(PeerLost("the step has failed or was reset"))

    def settle(self) -> None:
        """Ends the doubt about the last step if this rank has committed it."""
        if self._members.committed:
            self._settle(counts=True)

    @property
    def in_doubt(self) -> bool:
        """Whether the last step may still count or be taken back."""
        return self._doubt is not None and not self._sent

    def undo(self) -> None:
        """See :meth:`~hvd_compress.engine.driver.Unapplied.undo`."""
        self._step.undo()
        self._restore_number()

    def undo_by(self, restore: Callable[[], None]) -> None:
        """See :meth:`~hvd_compress.engine.driver.Unapplied.undo_by`."""
        self._step.undo_by(restore)

    def options(self) -> dict[str, object]:
        """What all ranks must have in common, beside the compressor's options. Synchronises a GPU."""
        cause = "does load_state_dict= of the Manager restore all? Did peers go on apart after a vote?"
        weights = hash_of(local(p) for p in self._engine.parameters)
        return {f"hash of the weights ({cause} Restart those that differ)": weights}

    @property
    def refused(self) -> bool:
        """Whether no optimizer may apply what is in the gradients: the last step was not committed, or its gradients
        were not exchanged."""
        return self._number is not None and not (self._members.committed and self._members.following)

    def _reset(self) -> None:
        """Drops a step in progress, whose backward pass has failed."""
        if self._step.collecting:
            self._step.reset()

    def _settle(self, counts: bool) -> None:
        attempt, self._doubt = self._doubt, None
        sent, self._sent = self._sent, {}
        if attempt is None:
            return
        if counts:
            self._joined = True
            self._commits.add(attempt)
            self._add_to_residuals({number: -tensor for number, tensor in sent.items()})
        elif not sent:
            self._take_back()

    def _suspend(self) -> None:
        """The step in doubt can be undone only before the next one begins, and nobody knows yet whether it counts:
        takes it back, and keeps what it has sent, which leaves the residuals again if it counts."""
        if self.in_doubt:
            before = self._residuals()
            self._take_back()
            self._sent = {number: after - before[number] for number, after in self._residuals().items()}

    def _residuals(self) -> dict[int, Tensor]:
        """By parameter: copies."""
        copies = {}
        for number, place in enumerate(self._engine.place_of):
            if place is not None:
                with place.work.bucket.order:
                    copies[number] = place.work.residual_of(place.piece).clone()
        return copies

    def _add_to_residuals(self, tensors: dict[int, Tensor]) -> None:
        for number, tensor in tensors.items():
            place = self._engine.place_of[number]
            assert place is not None
            with place.work.bucket.order:
                place.work.set_residual(place.piece, place.work.residual_of(place.piece) + tensor)

    def _take_back(self) -> None:
        self._step.discard()
        self._restore_number()

    def _restore_number(self) -> None:
        if self._number is not None:
            load(self._engine.state(), self._number)

    def _report(self, error: RuntimeError, what: str) -> None:
        self._members.lose(error)
        self._commits.fail(what, f": {error}")

    def _renew(self) -> None:
        """The ranks are others than before: what depends on their number is made anew."""
        engine, shared = self._engine, save(self._shared())
        engine.peer.renew()
        engine.restart()
        load(self._shared(), shared)
        self._healed = False

    def _shared(self) -> Tree:
        """What all ranks have in common between steps."""
        engine = self._engine
        body: Tree = {
            "step": engine.state(),
            "method": engine.method.state(),
            "buckets": {str(work.bucket.index): work.state() for work in engine.works},
        }
        return part_of(body, per_rank=False)

    # Called by the carrier, in a quorum.

    def _register(self, claim: bool) -> None:
        # The Manager must not keep the compressor.
        owner, this = weakref.ref(self._engine.method), weakref.ref(self)
        self._members.heal_with(partial(_save, owner, this), partial(_load, owner, this), claim)

    def save(self) -> Saved:
        """The state for ranks that are behind. This one is not: a step that it has not committed counts nowhere."""
        with self._engine.entered:
            self._reset()
            self.settle()
            self._settle(counts=False)
            return {"state": save(self._shared()), "committed": list(self._commits.attempts)}

    def load(self, state: Saved) -> None:
        """Takes the state of another rank. Raises ``ValueError`` if it does not fit."""
        with self._engine.entered:
            self._reset()
            self._settle(self._doubt in state["committed"])
            check(self._shared(), state["state"])
            load(self._shared(), state["state"])
            for work in self._engine.works if not self._joined else ():
                with work.bucket.order:
                    work.scale_residual(0.0)
            self._commits.replace(state["committed"])
            self._healed = True


def _save(owner: "weakref.ref[Method]", reference: "weakref.ref[Attempts]") -> Saved:
    method, attempts = owner(), reference()
    return None if method is None or attempts is None else attempts.save()


def _load(owner: "weakref.ref[Method]", reference: "weakref.ref[Attempts]", state: Saved) -> None:
    method, attempts = owner(), reference()
    if method is not None and attempts is not None and state is not None:
        attempts.load(state)
