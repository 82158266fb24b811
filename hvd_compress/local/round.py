"""Rounds, one at a time: the progress of a fragment goes to the compressor, and its averages move the weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.comparison import Unexpected
from ..engine.engine import Engine
from ..engine.membership import PeerLost
from ..engine.place import check_gradient
from ..engine.state import Entry, OptionalTensor, Tree, load
from ..engine.work import undo
from ..guards.own_gradients import OwnGradients
from .averaged_steps import AveragedSteps
from .buffers import average_in_place
from .calls import AGES, Calls, Different, Row
from .common_weights import Average, CommonWeights, LeavesCodes, Weight, scale_residuals
from .fragments import Fragment, Turns
from .lengths import Lengths
from .peers import Attempt, Peers

_NOTHING = torch.zeros((), dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class _Sent:
    """A payload on its way: its fragment, and the local steps that its progress is of."""

    fragment: Fragment
    age: int


@dataclass(frozen=True)
class _Doubt(_Sent):
    """A round that this rank has received and not committed, and other ranks may have."""

    attempt: Attempt


@dataclass(frozen=True)
class Settings:
    """Arguments of :class:`hvd_compress.LocalSteps` that must be the same on all ranks, beside the period."""

    unsent: str
    decay: float
    outer_lr: float
    outer_momentum: float
    restore_length: bool
    fragments: int
    delay: int

    @property
    def plain(self) -> bool:
        """Whether the outer optimizer adds averages to the common weights as they are."""
        return self.outer_lr == 1.0 and not self.outer_momentum


class Round:
    """The round in flight, one at most, without a thread: each call of ``LocalSteps.step()`` resumes it.

    ::

        begin() ──► SENT ──► ARRIVED ──► landed
                      │          │
                      └──────────┴─────► taken back; in doubt, the next quorum decides

        progress  d = w - start             what this rank sends; start = A, or A + r with the residual r in the weights
        averages  u = mean_i Q(r + d)       what all ranks receive
        before    w at the beginning        if training goes on until the round has landed

        landed:      A += outer(finite u),          w = start + non-finite u + (w - before)
        taken back:  compressed d is in r again,    w = start + uncompressed d + (w - before)

    Weights of optimizers on averaged gradients have sums of gradients in place of progress, and their optimizers' steps
    in place of ``outer``.

    A round lands ``delay`` calls after it has begun; if that is 0, d and u are in the parameters until it has ended.

    Args:
        averaged: the optimizers on averaged gradients.
        calls, gradients: compare what the ranks are in, and whether their gradients are their own.
        peers: if ranks come and go, or None: a round that fails is then taken back, and raises no error.
    """

    def __init__(
        self,
        engine: Engine,
        common: CommonWeights,
        averaged: AveragedSteps,
        turns: Turns,
        calls: Calls,
        gradients: OwnGradients,
        settings: Settings,
        peers: Peers | None,
    ) -> None:
        self._engine, self._common, self._turns, self._averaged = engine, common, turns, averaged
        self._calls, self._gradients, self._peers = calls, gradients, peers
        self._delay, self._decay = settings.delay, settings.decay
        self._lengths = Lengths(engine) if settings.restore_length else None
        self._devices = {parameter.device for parameter in engine.parameters}
        #: Calls until the round lands, and whether the last one has landed.
        self._left, self._landed = 0, False
        #: By name of the weight, in its shape: in its dtype, and in that of the common weights, or not written out.
        self._progress: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor | Average] = {}
        #: By name, where the compressor has weights that it got with their starts.
        self._coded = dict[str, tuple[LeavesCodes, int]]()
        #: The calls that the averages are of; of peers, see :meth:`AveragedSteps.rates`.
        self._age, self._rates = 0, dict[str, Tensor]()
        # The weights of the last fragment that has arrived.
        self._landing: Sequence[Weight] = ()
        self._before: dict[str, Tensor] = {}
        # What this rank has done since its last round, while it waits for a quorum.
        self._held: dict[str, Tensor] = {}
        # Whether averages are being applied, or were when an error or an interrupt came.
        self._applying = False
        self._sent: _Sent | None = None
        # The sums of squares of what was sent, and then their means.
        self._squares: Tensor | None = None
        self._doubt: _Doubt | None = None

    @property
    def waits(self) -> bool:
        """Whether averages have still to arrive."""
        return self._sent is not None

    # What the calls of LocalSteps.step() do.

    def begin(self, number: int) -> bool:
        """Begins the next round, in call ``number`` of ``LocalSteps.step()``. Returns whether it has landed."""
        self.finish()
        engine, turns, self._landed = self._engine, self._turns, False
        begins = self._peers is None or self._meet(self._peers)
        fragment, rounds, age = turns.next, turns.rounds, turns.age
        if not begins:
            turns.take()
            turns.take_back(fragment, age, at_once=False)
            return False
        with self._taken_back_on_failure():
            self._sent = _Sent(fragment, age)
            turns.take()
            self._left = self._delay
            self._common.stand_in(fragment.weights)
            step = engine.begin(fragment.works, rounds, compared=True)
            # Of peers, each may have taken another number of steps.
            digest = step.digest ^ self._averaged.begin(age)
            must_equal = (age if self._peers is None else engine.step) + (digest << AGES)
            may_differ = engine.nodes.inside is None and all(map(engine.collectives.may_differ, self._devices))
            first = tuple(one for work in fragment.works for one in work.first_requests()) if may_differ else ()
            self._calls.begin(Row("step()", must_equal, number, self._gradients.taken()), first)
            # With a delay a rank would wait here for the slowest one, and between sites for a trip.
            if self._peers is not None or not (self._delay or may_differ):
                self.check()
            self._send(self._sent)
        if not self._delay:
            self.finish()
        return not self._delay and self._landed

    def called(self) -> bool:
        """A call of ``LocalSteps.step()``: resumes the exchange. Returns whether the round has landed."""
        if not self._left:
            return False
        self._left -= 1
        if not self._left:
            self.finish()
            return self._landed
        if self._sent is not None:
            with self._taken_back_on_failure():
                if self._calls.due:
                    self.check()
                self._engine.exchanges.take_turns()
        return False

    @contextmanager
    def _applies(self, weights: Sequence[Weight] = ()) -> Iterator[None]:
        """A context in which averages are applied, which ``weights`` may hold. An error does not end it."""
        self._applying, self._landing = True, weights
        yield
        self._applying = False

    def refuse_applied_in_part(self) -> None:
        """Raises ``RuntimeError`` if a landing was interrupted, and no other weights were taken since."""
        if self._applying:
            raise RuntimeError(
                "a round of local steps has failed while its averages were applied on this rank: load a checkpoint, or "
                "the same weights on all ranks, and call local.take_weights() there"
            )

    def check(self) -> None:
        """Waits for the ranks' rows. Raises ``RuntimeError``, on all, if calls differ or gradients are averages."""
        self._gradients.check([row.extra for row in self._calls.check()])

    def finish(self) -> None:
        """Waits for the averages, and lands."""
        self._receive()
        self.land()

    def average_weights(self) -> None:
        """Averages all weights in full precision, in place of a round: at the end, and before a test. They become the
        common weights. Weights with sums move by their optimizer, if any call was counted since their exchange."""
        engine, weights, turns = self._engine, self._common.weights, self._turns
        whole = [(w.own if w.sums is None else w.sums).to(w.common.dtype, copy=True) for w in weights]
        for tensor in whole:
            engine.stats.count_dense(0, tensor.nbytes, engine.collectives.size, engine.nodes.ranks)
        for fragment, age in zip(turns.fragments, turns.ages, strict=True):
            self._count_gradients(fragment, age)
        average_in_place(whole, engine.collectives, f"{engine.exchanges.label}.finish")
        averages = {weight.name: mean for weight, mean in zip(weights, whole, strict=True)}
        with self._applies():
            self._common.replace(whole)
            for fragment, age in zip(turns.fragments, turns.ages, strict=True):
                summed = {weight.name: weight.sums for weight in fragment.weights if weight.sums is not None and age}
                self._averaged.step({name: averages[name] for name in summed}, age)
                for sums in summed.values():
                    sums.zero_()

    # The road of a fragment.

    def _send(self, sent: _Sent) -> None:
        """Starts to exchange the progress, bucket by bucket."""
        engine, fragment, squares = self._engine, sent.fragment, dict[str, Tensor]()
        self._coded.clear()
        # The last parameters first: their buckets come first.
        for weight in reversed(fragment.weights):
            if self._delay and weight.sums is None:
                with weight.order:
                    self._before[weight.name] = torch.empty_like(weight.common).copy_(weight.own)
            if (coded := self._subtracts(weight)) is not None:
                progress = self._before.get(weight.name, weight.own)
            else:
                progress = self._progress[weight.name] = self._common.progress(weight, not self._delay)
                if self._lengths is not None and weight.sums is None:
                    squares[weight.name] = self._lengths.square(weight, progress)
            check_gradient(weight.name, progress, weight.place)
            if coded is not None:
                self._progress[weight.name], self._coded[weight.name] = _NOTHING, coded
            engine.arrive(weight.number, progress, None if coded is None else weight.common)
        self._count_gradients(fragment, sent.age - 1)  # arrive() has counted one
        if self._peers is not None and self._common.summed:
            rates = self._rates["mean"] = self._averaged.rates(sent.age)
            engine.dense.arrive(None, rates, rates)
        exchanged = [weight for weight in fragment.weights if weight.sums is None]
        if self._lengths is not None and exchanged:
            found = [squares[w.name] if w.name in squares else self._lengths.square(w, None) for w in exchanged]
            self._squares = torch.stack(found)
            engine.dense.arrive(None, self._squares, self._squares)
        engine.dense.start(f"local.{fragment.number}")

    def _count_gradients(self, fragment: Fragment, steps: int) -> None:
        """Counts a dense exchange of the gradients of so many steps. In nodes, this rank's share of it."""
        engine, nodes = self._engine, self._engine.nodes
        for weight in fragment.weights:
            owner = None if weight.place is None else weight.place.work.bucket.owner
            share = 1.0 / nodes.ranks if owner is None else float(owner == nodes.rank)
            engine.stats.count_gradient(steps * weight.own.numel(), engine.collectives.size, share)

    def _subtracts(self, weight: Weight) -> tuple[LeavesCodes, int] | None:
        """:attr:`Weight.in_codes` if the compressor gets a weight with its start, not its progress."""
        takes = weight.sums is None and self._common.starts_common and self._engine.nodes.inside is None
        return weight.in_codes if takes and weight.alike else None

    def arrive(self) -> None:
        """Waits for the averages, and writes them out, for a state."""
        self._receive()
        weights = [weight for weight in self._common.weights if weight.name in self._averages]
        self._averages |= {weight.name: weight.written(self._averages[weight.name]) for weight in weights}

    def _receive(self) -> None:
        """Waits for the averages. With peers, a round that is not committed is in doubt."""
        sent = self._sent
        if sent is None:
            return
        with self._taken_back_on_failure():
            self.check()
            self._engine.finish()
            if self._peers is not None and not self._commit(self._peers, sent):
                return
            weights = sent.fragment.weights
            with self._applies(weights):
                self._sent, self._age = None, sent.age
                squares, self._squares = self._squares, None
                self._engine.dense.write(self._engine.method)
                for work in sent.fragment.works:
                    work.bucket.write_results()
                received, averages = self._released(sent), dict[str, Tensor | Average]()
                for weight in weights:
                    if weight.name in self._coded:
                        coded, index = self._coded[weight.name]
                        averages[weight.name] = coded.average_of(index)
                    else:
                        averages[weight.name] = received[weight.name].to(weight.common.dtype)
                if self._lengths is not None:
                    self._lengths.restore([weight for weight in weights if weight.sums is None], averages, squares)
                self._averages = averages

    def land(self) -> None:
        """Moves the common weights by the averages, and makes the new weights of this rank."""
        self._left = 0
        if not self._averages:
            return
        with self._taken_back_on_failure(), self._applies(self._landing):
            averages, self._averages = self._averages, {}
            weights = [weight for weight in self._common.weights if weight.name in averages]
            left = self._common.move([w for w in weights if w.sums is None], averages, self._before)
            sums = {name: average for name, average in averages.items() if isinstance(average, Tensor)}
            stepped = self._averaged.step(sums, self._age, self._rates.get("mean"))
            left |= {} if stepped else sums
            for work in {w.place.work for w in weights if w.place is not None}:
                with work.bucket.order:
                    work.commit()
            self._write([weight for weight in weights if weight.name in left], left)
            if self._decay != 1.0:
                scale_residuals({w.place.work for w in weights if w.place is not None}, self._decay)
            self._landed = True

    def take_back(self) -> bool:
        """Called when the engine was reset: compressed progress is in the residual, and is zero here. Weights whose
        progress was not sent stay as they are. If a landing was interrupted, and parameters hold averages, these become
        the common weights. Returns whether weights were written."""
        if (sent := self._sent) is None:
            if interrupted := self._applying and not self._delay:
                self._common.write_common(self._landing)
            return interrupted
        self._sent, self._left = None, 0
        self._calls.clear()
        progress = self._released(sent)
        self._turns.take_back(sent.fragment, sent.age, at_once=self._peers is None)
        self._write([weight for weight in sent.fragment.weights if weight.name in progress], progress)
        self._before.clear()
        return True

    def discard(self, wait: bool) -> None:
        """The parameters are other ones: what is in flight is not applied to them. ``wait``: for its messages, or the
        next exchange would start those again that another rank has not started yet."""
        sent, self._sent, self._left, self._doubt, self._applying = self._sent, None, 0, None, False
        try:
            if wait and sent is not None:
                with self._engine.entered:
                    self._calls.check()
                    self._engine.finish()
        except (Different, Unexpected):
            self._engine.clock.reset()
            raise
        except Exception:  # ranks may have failed
            pass
        finally:
            self._calls.clear()
            if sent is not None:
                self._released(sent)
            for tensors in (self._progress, self._averages, self._before):
                tensors.clear()

    def _released(self, sent: _Sent) -> dict[str, Tensor]:
        """Ends the exchange, or what became of it. Returns the progress, or what is in its place now."""
        for work in sent.fragment.works:
            work.bucket.clear()  # or it would hold the averages until its next exchange
        self._common.stand_in(sent.fragment.weights, ends=True)
        self._engine.dense.clear()
        progress, self._progress, self._squares = self._progress, {}, None
        return progress

    def _write(self, weights: Iterable[Weight], extra: Mapping[str, Tensor]) -> None:
        """Writes this rank's weights: start, ``extra`` and progress since ``before``. Sums get what is extra."""
        for weight in weights:
            before, left = self._before.pop(weight.name, None), extra.get(weight.name, _NOTHING)
            with weight.order:
                if weight.sums is not None:
                    weight.sums.add_(left)
                elif before is None:
                    torch.add(self._common.start(weight), left, out=weight.own)
                else:
                    now = self._common.start(weight) + left
                    torch.add(torch.sub(weight.own, before, out=before), now, out=weight.own)

    # With peers that come and go.

    def _meet(self, peers: Peers) -> bool:
        """Waits for the ranks of the next round. A rank that is healed keeps what it has done since its last round; the
        payload of a round in doubt is taken back, unless others have committed it. Returns whether one can begin."""
        self._held.clear()
        begins, doubt = peers.begin(self._hold), self._doubt
        if peers.healed or (begins and doubt is not None):
            self._hold()
            own, self._held = self._held, {}
            self._doubt = None
            if doubt is not None and not peers.was_committed(doubt.attempt):
                undo(doubt.fragment.works)
                self._turns.take_back(doubt.fragment, doubt.age, at_once=False)
                own |= {name: own.get(name, 0.0) + uncompressed for name, uncompressed in self._progress.items()}
            self._progress.clear()
            if fresh := peers.healed and not peers.joined:  # relative to weights of its own
                self._turns.restart()
                scale_residuals(self._engine.works, 0.0)
                own.clear()
            self._common.write_common(None if fresh else self._common.summed)
            self._write(self._common.weights, own)
        if begins:
            peers.enter()
        return begins

    def _commit(self, peers: Peers, sent: _Sent) -> bool:
        """Whether a round is committed whose averages this rank has received. If not, it is in doubt: residuals exclude
        its payload, and uncompressed progress is kept beside the weights. So saved weights and residuals fit."""
        committed = False
        try:
            committed = peers.commit()
        finally:
            if not committed:
                self._sent, self._left = None, 0
                progress, weights = self._released(sent), sent.fragment.weights
                self._progress = {w.name: progress[w.name].clone() for w in weights if w.place is None}  # not in place
                load(self._engine.state(), self._engine.step - 1)
                self._write(weights, {})
                self._doubt = _Doubt(sent.fragment, sent.age, peers.attempt)
        return committed

    def _hold(self) -> None:
        """Keeps what this rank has done since its last round, before weights or residuals become others."""
        moved = [weight for weight in self._common.weights if weight.sums is None]
        self._held = self._held or {weight.name: self._common.advance(weight) for weight in moved}

    def state(self) -> Tree:
        """The saved state, after :meth:`arrive`."""
        each: dict[str, Any] = {"averages": self._averages, "before": self._before}
        ws = self._common.weights
        found: dict[str, Tree] = {k: {w.name: OptionalTensor(t, w.name, w.common) for w in ws} for k, t in each.items()}
        if self._common.summed:
            rates = OptionalTensor(self._rates, "mean", self._averaged.rates(0))
            found["of"] = {"calls": Entry(vars(self), "_age", int, 0), "rates": rates}
        return {"calls left": Entry(vars(self), "_left", int, 0, self._delay), **found}

    @contextmanager
    def _taken_back_on_failure(self) -> Iterator[None]:
        with self._engine.entered:
            try:
                yield
            except BaseException as error:
                self._engine.clock.reset()  # calls take_back()
                # A new lighthouse numbers quorums from 1 again: some peers may take a new quorum for their last one.
                if self._peers is None or not isinstance(error, PeerLost | Unexpected):
                    raise
                self._peers.fail(error)
