"""The round in flight between local steps: one at most, whose averages reach the parameters some calls later."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..engine.comparison import Unexpected
from ..engine.engine import Engine
from ..engine.membership import PeerLost
from ..engine.state import Entry, OptionalTensor, Tree
from .calls import Calls, Different, Row
from .common_weights import CommonWeights, scale_residuals
from .fragments import Turns
from .gradients import OwnGradients
from .lengths import Lengths
from .peers import Peers
from .round import Round


class InFlight:
    """A round of the fragment whose turn it is, without a thread: each call of ``LocalSteps.step()`` resumes it.

    Its averages reach the parameters ``delay`` calls after it has begun. Parameters then keep the progress that they
    have made meanwhile: w += w' - w(0), with the weights w(0) at the beginning of the round and w' that a round without
    delay would have made of them.

    Args:
        calls, gradients: compare what the ranks are in, and whether their gradients are their own.
        decay: factor of the residuals after a round.
        lengths: restores the length of averages, or None.
        peers: if ranks come and go, or None: a round that fails is then taken back, and raises no error.
    """

    def __init__(
        self,
        engine: Engine,
        common: CommonWeights,
        turns: Turns,
        calls: Calls,
        gradients: OwnGradients,
        delay: int,
        decay: float,
        lengths: Lengths | None,
        peers: Peers | None,
    ) -> None:
        self._engine, self._common, self._turns, self._delay, self._decay = engine, common, turns, delay, decay
        self._calls, self._gradients, self._lengths, self._peers = calls, gradients, lengths, peers
        self._round: Round | None = None
        #: Calls until the parameters change, and whether the last round counts.
        self._left, self._counts = 0, False
        #: Of weights whose averages have arrived and wait, by name, w(0) and w': float32 or wider, (2, *shape).
        self._waiting: dict[str, Tensor] = {}

    @property
    def waits(self) -> bool:
        """Whether averages have still to arrive."""
        return self._round is not None

    def begin(self, number: int) -> bool:
        """Begins the next round, in the call of ``LocalSteps.step()`` with this number. Returns whether it has ended:
        without delay."""
        self.finish()
        engine, self._counts = self._engine, False
        if self._peers is not None:
            begins = self._peers.begin()
            if self._peers.dropped:
                self._turns.restart()
            if not begins:
                age = self._turns.age
                self._turns.take()
                self._turns.take_back(self._turns.next, age, at_once=False)
                return False
        fragment, rounds, age = self._turns.next, self._turns.rounds, self._turns.age
        with self._reset_on_failure():
            self._round = Round(engine, self._common, fragment, age, self._delay > 0, self._lengths)
            self._turns.take()
            self._left = self._delay
            engine.begin(fragment.works, rounds)
            # Of peers, each may have taken another number of steps.
            must_equal = age if self._peers is None else engine.step
            self._calls.begin(Row("step()", must_equal, number, self._gradients.taken()))
            if not self._delay or self._peers is not None:  # or a rank would wait here for the slowest one
                self.check()
            self._round.send()
        if not self._delay:
            self.finish()
        return not self._delay and self._counts

    def called(self) -> bool:
        """A call of ``LocalSteps.step()``: resumes the exchange. Returns whether the round has ended."""
        if not self._left:
            return False
        self._left -= 1
        if not self._left:
            arrived = bool(self._waiting)  # since a state was saved, which has waited for them
            self.finish()
            return arrived or self._counts
        if self._round is not None:
            with self._reset_on_failure():
                if self._calls.due:
                    self.check()
                self._engine.exchanges.take_turns()
        return False

    def check(self) -> list[Row]:
        """The rows of all ranks, if they have not been seen. Raises ``RuntimeError``, on all ranks, if they are in
        different calls, or their gradients are averages."""
        rows = self._calls.check()
        self._gradients.check(rows)
        return rows

    def wait(self) -> None:
        """Waits for the averages. The parameters change when it is time."""
        if self._round is None:
            return
        with self._reset_on_failure():
            self.check()
            self._round.receive()
            if not self._committed(self._round):
                return
            self._round.store()
            ended, self._round, self._counts = self._round, None, True
            self._waiting |= ended.land(received=True)
            if self._decay != 1.0:
                scale_residuals(ended.fragment.works, self._decay)

    def finish(self) -> None:
        """Waits for the averages, and changes the parameters."""
        self.wait()
        self._left = 0
        for weight in self._common.weights:
            if (waiting := self._waiting.pop(weight.name, None)) is not None:
                before, now = waiting
                with weight.order:
                    torch.add(torch.sub(weight.own, before, out=before), now, out=weight.own)

    def reset(self) -> None:
        """The exchange has failed. What was compressed is in the residual, and zero in the round."""
        failed, self._round = self._round, None
        self._calls.clear()
        if failed is not None:
            self._take_back(failed)

    def _committed(self, ended: Round) -> bool:
        """Whether a round counts of which this rank has everything. If not, it is taken back."""
        if self._peers is None:
            return True
        counts = False
        try:
            counts = self._peers.commit()
        finally:
            if not counts:
                self._round = None
                counted = partial(self._turns.counted, ended.fragment, ended.age)
                self._peers.doubt(ended.fragment.works, ended.withdraw(), counted)
                self._take_back(ended)
        return counts

    def _take_back(self, failed: Round) -> None:
        self._turns.take_back(failed.fragment, failed.age, at_once=self._peers is None)
        self._waiting |= failed.land(received=False)
        self.finish()

    def discard(self, wait: bool) -> None:
        """The parameters are other ones: what is in flight is not applied to them. ``wait``: for its messages, or the
        next exchange would start those again that another rank has not started yet."""
        discarded, self._round, self._left = self._round, None, 0
        self._waiting.clear()
        if discarded is None:
            return
        try:
            if wait:
                with self._engine.entered:
                    self._calls.check()
                    discarded.receive()
        except (Different, Unexpected):
            raise
        except Exception:  # ranks may have failed
            pass
        finally:
            self._calls.clear()
            discarded.clear()

    def state(self) -> Tree:
        """The saved state, after :meth:`wait`."""
        waiting: dict[str, Tree] = {}
        for weight in self._common.weights:
            waiting[weight.name] = OptionalTensor(
                self._waiting, weight.name, weight.common.expand(2, *weight.common.shape)
            )
        return {"calls left": Entry(vars(self), "_left", int, 0, self._delay), "waiting": waiting}

    @contextmanager
    def _reset_on_failure(self) -> Iterator[None]:
        with self._engine.entered:
            try:
                yield
            except BaseException as error:
                self._engine.clock.reset()  # calls reset() here
                # A new lighthouse numbers quorums from 1 again: some peers may take a new quorum for their last one.
                if self._peers is None or not isinstance(error, PeerLost | Unexpected):
                    raise
                self._peers.fail(error)
