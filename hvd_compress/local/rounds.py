"""The clock of local steps: counts them, begins rounds, and knows which weights are whose.

::

    taken ──► begun ──► a call that is due ──► in flight ──► landed
      ▲         ▲    (all ranks compare calls)     │            │
      │         ├───────────── reset ◄─────────────┘            │
      │         └───────────────────────────────────────────────┘
      └── restart: other ranks, or another state

``taken``: the common weights are the parameters. ``begun``: a local step has followed. What fails in flight is reset:
it is local progress again, or in the error-feedback buffer, and the next round sends it. After ``close()`` nothing is
counted, and optimizers are not looked at.
"""

import time
import weakref
from contextlib import suppress
from dataclasses import asdict

import torch
from torch.optim import Optimizer

from ..engine.clock import Clock
from ..engine.engine import Engine
from ..engine.membership import Membership
from ..engine.optimizers import parameters_of
from ..engine.owner import in_use
from ..engine.shards import local, shards
from ..engine.state import Entry, Fixed, Tree
from ..guards.averaging import average_again
from ..guards.local_steps import LocalGuards
from ..guards.replaced_parameters import check_model
from ..guards.unfit_optimizer import check_parameters, refuse_other
from .averaged_steps import AveragedSteps
from .buffers import Buffers
from .calls import AGES, Calls, Row
from .common_weights import CommonWeights, scale_residuals
from .fragments import Turns
from .from_rank_0 import share_states
from .holders import Holders
from .optimizers import Given, LocalOptimizers
from .peers import Peers
from .round import Round, Settings

# Seconds between two attempts to join.
_PAUSE = 0.5


class Rounds(Clock):
    """Drives an engine by local steps. Methods without a docstring: see :class:`~hvd_compress.engine.clock.Clock`.

    Args:
        optimizers: as the user has given them: of local steps, and on averaged gradients.
        model: of the parameters, if it is known.
        watches: whether weights that were replaced are an error.
    """

    takes_local_steps = True
    bound = "belongs to LocalSteps, which needs the plain model and optimizer"

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        period: int,
        optimizers: tuple[Given, Given],
        model: torch.nn.Module | None,
        watches: bool,
    ) -> None:
        self._engine, self._settings = engine, settings
        # With shards of unequal size, the ranks of a shard group have different buckets.
        uneven = any(p.numel() != local(p).numel() * shards(p) for p in engine.parameters)
        self._optimizers = LocalOptimizers(*optimizers, apart=uneven and settings.fragments > 1)
        summed = parameters_of(self._optimizers.averaged)
        self._common = CommonWeights(engine, settings.unsent, settings.outer_lr, settings.outer_momentum, summed)
        check_parameters(self._optimizers.all, self._common.ids)
        weights = self._common.weights
        self._averaged = AveragedSteps(self._optimizers.averaged, weights, engine)
        self.turns = Turns(engine, weights, period, settings.fragments, settings.delay)
        # The mean of all weights keeps what was replaced on all ranks, and nothing else is added.
        rounded = bool(engine.works) or "fp16" in engine.method.options().values()
        exact = settings.plain and not (settings.restore_length or settings.delay or rounded or summed)
        self._calls = Calls(engine)
        named = [(weight.name, weight.parameter) for weight in weights]
        self._guards = LocalGuards(engine, named, model, self._optimizers.all, watches and not exact)
        members, self._peers = engine.collectives, None
        if isinstance(members, Membership):
            if summed and members.group_size > 1:
                raise ValueError("on_averaged_gradients does not go with torchft replica groups of several ranks")
            self._peers = Peers(engine, members, self._common, self._optimizers.averaged, self.turns.steps())
        averaged, gradients = self._averaged, self._guards.gradients
        self._round = Round(engine, self._common, averaged, self.turns, self._calls, gradients, settings, self._peers)
        self._holders = Holders(named, model)
        #: Whether the common weights have been taken from the parameters, and whether a local step has followed.
        self._taken, self._begun = False, False
        #: Whether parameters that differ from the common weights by rounding errors only do not replace them.
        self._rounds_off = True
        self._common.take(self._common.ids)
        #: Optimizers that have taken a local step, until then.
        self._applied = weakref.WeakSet[Optimizer]()
        #: Whether an optimizer has stepped since the last call of count().
        self.stepped = False
        #: Whether the ranks' weights may differ: since finish() or take_weights() an optimizer has stepped, a step was
        #: counted, or a state was loaded.
        self.moved = False
        self._closed = False
        if self._peers is not None:
            self._peers.register()
        _living.add(self)

    # What LocalSteps calls.

    def count(self) -> bool:
        """A local step was taken. Returns whether a round has ended."""
        self._begin()
        self._round.refuse_applied_in_part()
        self._guards.call(self._exchanging, self.stepped)
        if moved := self._averaged.drop_created():
            self._common.write_common(moved)
            self._note()
        self._begun, self.stepped, self.moved = True, False, True
        self._applied.clear()
        self.turns.count()
        if not self._exchanging:
            ended = self.turns.due()
            if ended:
                self.turns.restart()
        else:
            if self._peers is None:
                with self._engine.entered:
                    self._engine.compare()
            self._guards.loaded.refuse()
            waited = self._round.waits
            ended = self._round.called()
            due = self.turns.due()
            if due:
                self._check()
                ended = self._round.begin(self.turns.number) or ended
            # With peers, a round that is taken back changes the weights, too.
            if ended or (self._peers is not None and (waited or due)):
                self._holders.reshard()
                self._note()
        return ended

    def join(self) -> None:
        """Takes part in a round of the others without progress, until one counts."""
        if self._peers is None:
            return
        self._begin()
        self._round.refuse_applied_in_part()
        self._guards.loaded.look()
        self._guards.loaded.refuse()
        self._check()
        while True:
            self._round.begin(self.turns.number)
            self._round.finish()
            if self._peers.joined:
                break
            time.sleep(_PAUSE)
        # From now on the common weights are the peers', and not the parameters before the first step.
        self._begun = True
        self._guards.common()
        self._holders.reshard()
        self._note()

    def finish(self, model: torch.nn.Module | None, moved_only: bool = False, call: str = "finish()") -> None:
        """Averages all weights, and the buffers of ``model``. ``moved_only``: no weights if nobody has moved them since
        the last time. ``call``: what the user has called."""
        self._begin()
        self._round.refuse_applied_in_part()
        self._guards.loaded.look()
        self._check()
        chosen = None
        if model is not None:
            check_model(model, [(weight.name, weight.parameter) for weight in self._common.weights])
            chosen = Buffers(model, self._engine)
        if not self._exchanging:
            if chosen is not None:  # a shard group has ranks, too
                with self._engine.entered:
                    chosen.check_same()
                    chosen.exchange()
            self._common.take(self._common.ids)
            self._restarted()
            return
        self._guards.before_average(self.stepped)
        self._round.finish()
        if self._peers is not None:
            self._common.write_common()
            self._restarted()
            return
        with self._engine.entered:
            self._engine.compare()
            self._guards.loaded.refuse()
            self._engine.stats.begin_step()
            extra = int(self.moved or not (moved_only and self._guards.watches))
            age, number = (sum(self.turns.ages), self.turns.number) if self._optimizers.averaged else (0, 0)
            rows = self._calls.compare(Row(call, age + (self._averaged.digest() << AGES), number, extra))
            if chosen is not None:
                chosen.check_same()
            if any(row.extra for row in rows):
                self._round.average_weights()
            if chosen is not None:
                chosen.exchange()
            self._engine.stats.end_step()
        self._restarted()

    def _restarted(self) -> None:
        """All parameters are the common weights."""
        self._holders.reshard()
        self.turns.restart()
        self.moved = False
        self._guards.common()
        self._note()

    def end(self, model: torch.nn.Module | None) -> None:
        """Averages all weights, makes the optimizers' states rank 0's, and closes."""
        if self._closed:
            return
        self.finish(model, moved_only=True, call="end()")
        if self._exchanging and self._peers is None:
            with self._engine.entered:
                share_states(self._optimizers.all, self._engine)
        self.close()

    def close(self) -> None:
        """Nothing follows: what is in flight is not applied, and others may average the gradients. Waits for nobody."""
        if self._closed:
            return
        self._closed = True
        self._engine.optimizers.release()
        try:
            self.restart(same_ranks=False)
        finally:
            others = in_use(lambda: [rounds for rounds in _living if not rounds._closed])
            kept = {number for rounds in others for number in rounds._common.ids}
            average_again(self._engine.parameters, kept)

    def take_weights(self) -> None:
        """Makes the parameters the common weights; nothing is kept of before."""
        self._refuse_closed()
        if self._peers is not None:
            raise RuntimeError(
                "with a torchft.Manager, all peers have the weights of the last round: load other ones before join()"
            )
        self._engine.check_generation()
        self._check()
        self._round.discard(wait=True)
        self._common.take(self._common.ids)
        scale_residuals(self._engine.works, 0.0)
        self._taken = True
        self._guards.loaded.clear()
        self.turns.restart()
        if self._exchanging:
            with self._engine.entered:
                must_equal = self._common.hash() ^ self._averaged.digest_of_all()
                self._calls.compare(Row("take_weights()", must_equal))
        self.stepped, self.moved = False, False
        self._guards.common()
        self._note()

    # What the engine calls.

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` for an optimizer that was not given here or to other local steps, or is Horovod's,
        ``RuntimeError`` if the weights were replaced."""
        if not self._optimizers.given(optimizer):
            if any(optimizer in other for other in _living if other is not self and not other._closed):
                return  # of a later training of the same parameters
            refuse_other(optimizer)
        self._begin()
        due = self.turns.due(calls=1)
        self._guards.before_optimizer_step(optimizer, self._exchanging, self._begun, self.stepped, due)
        self.stepped = self.moved = True
        if self._exchanging:
            self._averaged.before_step(optimizer, self._begun)
        if self._begun:
            return
        if self._guards.changed():
            self._applied.clear()
        if optimizer not in self._applied:
            # Again before each step up to the first one with gradients, and after a change from outside:
            # hvd.broadcast_optimizer_state() may step before the parameters are broadcast. Not those that another
            # optimizer may have changed already.
            self._common.take(self._optimizers.may_change(optimizer, self._common.ids), self._rounds_off)
            if self._engine.optimizers.applies_gradients(optimizer):
                self._applied.add(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer, counts: bool) -> None:
        self._averaged.after_step(optimizer)
        if self._exchanging:
            self._averaged.refuse_counts(optimizer)
        self._guards.after_optimizer_step(optimizer, self._exchanging, self._begun)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return self._optimizers.given(optimizer)

    def reset(self, wait: bool = False) -> None:
        if wait:
            with suppress(Exception):
                self._round.arrive()
        with self._engine.entered:
            try:
                self._engine.reset()
            finally:
                if self._round.take_back():
                    self._note()

    def restart(self, same_ranks: bool) -> None:
        """The parameters before the next local step become the common weights. Progress in flight is not applied to
        them; it stays in an error-feedback buffer."""
        self._round.discard(wait=same_ranks)
        self._averaged.restart()
        self._guards.restart()
        self._taken = self._begun = self._rounds_off = False
        self.moved, self.stepped = True, False
        self.turns.restart()
        with self._engine.entered:
            self._engine.reset()
        self._engine.comparison.changed()

    def begin_saving(self) -> None:
        """Completes the messages of an exchange in flight, which is saved. One rank has the average of all."""
        if self._engine.entered.again or (self._round.waits and not self._settings.delay):
            raise RuntimeError(
                "state_dict() was called during step(), where parameters may hold differences: set a flag in a signal "
                "handler, and save after step()"
            )
        self._round.refuse_applied_in_part()
        if self._taken and not self._exchanging:
            self._common.take(self._common.ids)
        if not self._round.waits:
            return
        with self._calls.meeting(Row("state_dict()")):
            self._round.arrive()
        if self._peers is not None:
            self._note()  # what was taken back is in the weights again
            return
        with self._engine.entered:
            self._calls.compare(Row("state_dict()"))

    def check_equal_weights(self) -> None:
        differs = (self._taken or self._closed) and not self._common.applied()
        if self._exchanging and self._peers is None:
            with self._engine.entered:
                rows = self._calls.compare(Row("DCPState.state_dict()", extra=int(differs)))
            differs = any(row.extra for row in rows)
        if differs:
            raise RuntimeError("the ranks' weights differ between exchanges: call finish() before saving")

    def options(self) -> dict[str, object]:
        first = "were they broadcast? After a restart, was local.load_state_dict() called?"
        ages = " ".join(map(str, self.turns.ages))
        timing = {"period": self.turns.period, "steps since the last exchange": ages}
        compared = {
            **asdict(self._settings),
            **(timing if self._peers is None else {}),
            f"hash of the weights before the first step ({first})": self._common.hash(),
            "weights of another time than the loaded state": self._guards.loaded.foreign,
            "on_averaged_gradients (settings and states of the optimizers)": self._averaged.digest_of_all(),
        }
        return {f"LocalSteps: {name}": value for name, value in compared.items()}

    def state(self) -> dict[str, Tree]:
        own: Tree = {
            **self._common.state(),
            **self._guards.loaded.state(),
            "fragments": Fixed(self._settings.fragments),
            "steps": self.turns.steps(),
            "since": self.turns.state(self._peers is not None),
            "in_flight": self._round.state(),
            "taken": Entry(vars(self), "_taken", bool),
            "begun": Entry(vars(self), "_begun", bool),
        }
        return {"local_steps": own}

    @property
    def _exchanging(self) -> bool:
        """Whether there is anything to exchange: the plain average of one rank is what it has."""
        collectives = self._engine.collectives
        settings, summed = self._settings, self._optimizers.averaged
        alone = collectives.size == 1 and settings.plain and not summed and self._peers is None
        return collectives.active and not alone

    def _note(self) -> None:
        self._guards.note(self._exchanging, self._begun)

    def _begin(self) -> None:
        self._refuse_closed()
        self._engine.check_generation()
        if not self._taken:
            self._guards.begin()
            self._common.take(self._common.ids, self._rounds_off)
            self._taken = True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("these local steps have ended: build a new compressor and new LocalSteps")

    def _check(self) -> None:
        """Raises ``ValueError`` if the optimizers or the model have other parameters now."""
        self._holders.reshard()
        self._guards.check()


#: All of this process.
_living = weakref.WeakSet[Rounds]()
