"""What is in flight between local steps: one exchange at most, whose averages reach the parameters some calls later."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..engine.dense import Averaging, DenseGradient
from ..engine.engine import Engine
from ..engine.state import Entry, OptionalTensor, Tree
from .calls import Calls, Different, Row
from .common_weights import CommonWeights, Weight, scale_residuals
from .fragments import Fragment, Turns
from .gradients import OwnGradients
from .lengths import Lengths


class _Exchange:
    """The differences of one fragment on their way through the compressor, which replaces them by their averages as far
    as it sends them.

    Args:
        age: local steps that the differences are of.
        keep: whether to keep the parameters as they are now.
        lengths: restores the length of the averages, or None.
    """

    def __init__(
        self, common: CommonWeights, fragment: Fragment, age: int, keep: bool, lengths: Lengths | None
    ) -> None:
        self.fragment, self.age, self._lengths = fragment, age, lengths
        self.differences = common.differences(fragment.weights)
        #: By weight, what its average is to be multiplied by; None: nothing.
        self.factors: Sequence[Tensor | None] = [None] * len(fragment.weights)
        self._squares = [] if lengths is None else [lengths.squares(fragment.weights, self.differences)]
        self.pairs = [_pair(weight) if keep else None for weight in fragment.weights]
        self._dense: list[DenseGradient] = []

    def begin(self, engine: Engine) -> None:
        # The last parameters first: their buckets come first.
        for weight, difference in reversed(list(zip(self.fragment.weights, self.differences, strict=True))):
            arrived = engine.arrive(weight.number, difference)
            if isinstance(arrived, DenseGradient):
                self._dense.append(arrived)
        count_gradients(engine, self.fragment, self.age - 1)  # arrive() has counted one
        label = f"{engine.exchanges.label}.local.{self.fragment.number}"
        for squares in self._squares:
            engine.count_dense(0, squares.nbytes)
        payloads = [*(gradient.payload for gradient in self._dense), *self._squares]
        self._averaging = Averaging(engine.collectives, payloads, label)

    def finish(self, engine: Engine) -> None:
        """Waits."""
        engine.finish_step()
        engine.keep_step()
        averages = self._averaging.results()
        squares = averages.pop() if self._squares else None
        for gradient, average in zip(self._dense, averages, strict=True):
            gradient.store(average)
            engine.method.dense_averaged(gradient.number, gradient.grad)
        for work in self.fragment.works:
            work.bucket.write_results()
            work.bucket.clear()  # or it would hold the differences until its next exchange
        if self._lengths is not None and squares is not None:
            self.factors = self._lengths.factors(self.fragment.weights, self.differences, squares)


def _pair(weight: Weight) -> Tensor:
    """w0, the weight as it is now, and the place of w': float32 or wider, (2, *shape), both in its memory order."""
    common = weight.common
    shape, strides = (2, *common.shape), (common.numel(), *common.stride())
    with weight.order:
        pair = torch.empty_strided(shape, strides, dtype=common.dtype, device=common.device)
        pair[0].copy_(weight.own)
    return pair


def count_gradients(engine: Engine, fragment: Fragment, steps: int) -> None:
    """In the statistics: a dense exchange of the gradients of so many steps. In nodes, this rank's share of it."""
    nodes = engine.nodes
    for weight in fragment.weights:
        owner = None if weight.place is None else weight.place.work.bucket.owner
        share = 1.0 / nodes.ranks if owner is None else float(owner == nodes.rank)
        engine.stats.count_gradient(steps * weight.own.numel(), engine.collectives.size, share)


class InFlight:
    """An exchange of the fragment whose turn it is, without a thread: each call of ``LocalSteps.step()`` resumes it.

    Its averages reach the parameters ``delay`` calls after it has begun. Parameters then keep the progress that they
    have made meanwhile: w += w' - w0, with the weights w0 at the beginning of the exchange and w' that an exchange
    without delay would have made of them.

    Args:
        calls, gradients: compare what the ranks are in, and whether their gradients are their own.
        decay: factor of the residuals after an exchange.
        restore_length: see :class:`hvd_compress.LocalSteps`.
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
        restore_length: bool,
    ) -> None:
        self._engine, self._common, self._turns, self._delay, self._decay = engine, common, turns, delay, decay
        self._calls, self._gradients = calls, gradients
        self._lengths = Lengths(engine) if restore_length else None
        self._exchange: _Exchange | None = None
        #: Calls until the parameters change.
        self._left = 0
        #: Of weights whose averages have arrived and wait, by name, w0 and w': float32 or wider, (2, *shape).
        self._waiting: dict[str, Tensor] = {}

    @property
    def waits(self) -> bool:
        """Whether averages have still to arrive."""
        return self._exchange is not None

    def begin(self, number: int) -> bool:
        """Begins the next exchange, in the call of ``LocalSteps.step()`` with this number. Returns whether it has
        ended: without delay."""
        self.finish()
        fragment, engine = self._turns.next, self._engine
        age = self._turns.ages[fragment.number]
        with self._dropped_on_failure():
            self._exchange = _Exchange(self._common, fragment, age, self._delay > 0, self._lengths)
            rounds, self._turns.ages[fragment.number], self._left = self._turns.rounds, 0, self._delay
            engine.begin_step(fragment.works, rounds)
            self._calls.begin(Row("step()", age, number, self._gradients.taken()))
            if not self._delay:  # or a rank would wait here for the slowest one
                self.check()
            self._exchange.begin(engine)
        if not self._delay:
            self.finish()
        return not self._delay

    def called(self) -> bool:
        """A call of ``LocalSteps.step()``: resumes the exchange. Returns whether it has ended."""
        if not self._left:
            return False
        self._left -= 1
        if not self._left:
            self.finish()
            return True
        if self._exchange is not None:
            with self._dropped_on_failure():
                if self._calls.due:
                    self.check()
                self._engine.exchanges.take_turns()
        return False

    def check(self) -> None:
        """Raises ``RuntimeError``, on all ranks, if they are in different calls, or their gradients are averages."""
        self._gradients.check(self._calls.check())

    def drain(self) -> None:
        """Waits for the averages. The parameters change when it is time."""
        exchange = self._exchange
        if exchange is None:
            return
        with self._dropped_on_failure():
            self.check()
            exchange.finish(self._engine)
            self._exchange = None
            self._common.move(exchange.fragment.weights, exchange.differences, exchange.factors)
            self._end(exchange)
            if self._decay != 1.0:
                scale_residuals(exchange.fragment.works, self._decay)

    def finish(self) -> None:
        """Waits for the averages, and changes the parameters."""
        self.drain()
        self._left = 0
        for weight in self._common.weights:
            if (waiting := self._waiting.pop(weight.name, None)) is not None:
                before, now = waiting
                with weight.order:
                    torch.add(torch.sub(weight.own, before, out=before), now, out=weight.own)

    def dropped(self) -> None:
        """The exchange has failed. What was compressed is in the residual, and zero among the differences."""
        exchange, self._exchange = self._exchange, None
        self._calls.forget()
        if exchange is not None:
            self._turns.ages[exchange.fragment.number] += exchange.age
            self._end(exchange)
            self.finish()

    def discard(self, wait: bool) -> None:
        """Forgets what is in flight: the parameters are other ones. ``wait``: for its messages, or the next exchange
        would start those again that another rank has not started yet."""
        exchange, self._exchange, self._left = self._exchange, None, 0
        self._waiting.clear()
        if exchange is None:
            return
        try:
            if wait:
                with self._engine.entered:
                    self._calls.check()
                    exchange.finish(self._engine)
        except Different:
            raise
        except Exception:  # ranks may have failed
            pass
        finally:
            self._calls.forget()
            self._common.end(exchange.fragment.weights)

    def state(self) -> Tree:
        """The saved state, after :meth:`drain`."""
        waiting: dict[str, Tree] = {}
        for weight in self._common.weights:
            waiting[weight.name] = OptionalTensor(
                self._waiting, weight.name, weight.common.expand(2, *weight.common.shape)
            )
        return {"calls left": Entry(vars(self), "_left", int, 0, self._delay), "waiting": waiting}

    def _end(self, exchange: _Exchange) -> None:
        """Makes the weights that follow from what the exchange has done: they are written to the parameters, or
        wait."""
        weights = exchange.fragment.weights
        self._common.end(weights)
        for weight, rest, pair in zip(weights, exchange.differences, exchange.pairs, strict=True):
            with weight.order:
                self._common.write_after(weight, rest, weight.own if pair is None else pair[1])
            if pair is not None:
                self._waiting[weight.name] = pair

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        with self._engine.entered:
            try:
                yield
            except BaseException:
                self._engine.reset()  # calls dropped()
                raise
