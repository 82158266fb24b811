"""One training step: collects gradients into buckets, runs their exchanges, and recovers from steps that fail.

A host calls :meth:`Engine.arrive` for every gradient and :meth:`Engine.finish_step` after the last one. When a bucket
is full, the engine launches its exchange: a generator of the method that yields a
:class:`~hvd_compress.engine.collectives.Request` whenever tensors must cross the network. A rank blocks only in
``finish_step``, after it has started the first collective of every bucket, so that ranks cannot deadlock; and in the
first hook of all, to compare configurations, when no exchange is open. This wait ends after ``start_timeout`` seconds.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from .bucket import Bucket, make_buckets
from .collectives import Collectives
from .configuration import Comparison, compare_ranks
from .dense import DenseGradient, dense_gradient
from .entered import Entered
from .exchange import Exchange, Exchanges
from .last_average import LastAverage
from .modes import modes_off
from .optimizer_watch import OptimizerWatch
from .places import Place, check_gradient, compressed
from .profiling import stage
from .registry import Registry
from .user_warning import warn_user
from .wire_stats import WireStats


class Engine:
    """The state of one compressor that is independent of its method and of its host.

    Args:
        method: a :class:`hvd_compress.Compressor`, which owns the engine: only a weak reference is kept.
        named: ``(name, parameter)`` pairs, checked, in the same order on all ranks.
        collectives: the host's collectives.
        seed, min_numel, bucket_mb, dense_values, grad_scaler, start_timeout: see :class:`hvd_compress.Compressor`.
    """

    def __init__(
        self,
        method: Any,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        collectives: Collectives,
        *,
        seed: int,
        min_numel: int,
        bucket_mb: float,
        dense_values: str,
        grad_scaler: Any,
        start_timeout: float,
    ) -> None:
        self._method, self.collectives, self.seed = weakref.ref(method), collectives, seed
        self.dense_half, self.scaler, self._start_timeout = dense_values == "fp16", grad_scaler, start_timeout
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.buckets = make_buckets(compressed(named, min_numel, method.compresses), int(bucket_mb * 2**20))
        for bucket in self.buckets:
            ops.check_device(bucket.device)
        self.places = [Place(bucket, i) for bucket in self.buckets for i in range(len(bucket.segments))]
        by_parameter = {id(place.segment.parameter): place for place in self.places}
        self._place_of = [by_parameter.get(id(parameter)) for parameter in self.parameters]
        self.stats = WireStats()
        self.registry = collectives.registry()
        self.number = self.registry.add(self)
        # Horovod matches collectives by name: the label is the same on all ranks, and every compressor has another one.
        label, advance_others = f"hvd_compress.{self.number}", partial(Registry.advance_others, weakref.ref(self))
        self.exchanges = Exchanges(collectives, self.stats, label, advance_others)
        self.watch = OptimizerWatch(self.parameters, self.before_optimizer_step, method, not collectives.ordered)
        self.last_average = LastAverage(self.parameters, self.watch)
        #: The :class:`hvd_compress.LocalSteps` that runs the steps instead of a host, if any.
        self.local_steps: Any = None
        #: Whether the ranks have compared their configurations, and the comparison in progress.
        self.compared = False
        self.comparison: Comparison | None = None
        #: The number of parameters of the optimizer whose groups changed most recently, or None.
        self.regrouped: int | None = None
        self._sizes = weakref.WeakKeyDictionary[Optimizer, int]()
        #: Whether the last average may still be taken back, and whether it was.
        self.undoable, self._discarded = False, False
        #: Loads the state before the last average, if it was saved: the methods' own means to undo are used up then.
        self.restore: Callable[[], None] | None = None
        # Gradients of a model on several GPUs arrive from several threads.
        self.lock = threading.RLock()
        self.step = 0
        #: Whether a step is in progress: after its first gradient, before finish_step().
        self.collecting = False
        #: By parameter, whether its gradient has arrived in the current step, or the last one.
        self.arrived = bytearray(len(named))
        #: The current step's loss scale and number of ranks.
        self.scale, self.ranks = 1.0, 1
        self._generation = collectives.generation()
        self._warned: set[str] = set()

    @property
    def method(self) -> Any:
        return self._method()

    def place_of(self, number: int) -> Place | None:
        """Where parameter ``number`` lies, if it is compressed."""
        return self._place_of[number]

    def arrive(self, number: int, grad: Tensor) -> Place | DenseGradient:
        """Takes the gradient of parameter ``number``: returns its place in a bucket, or, if it is not compressed, the
        payload that the host must average.

        Raises:
            TypeError: the gradient's dtype does not fit.
            ValueError: the parameter has changed its device, shape or memory order.
            RuntimeError: a second gradient of the parameter in one step; the gradient contains the last average.
        """
        place = self._place_of[number]
        check_gradient(self.names[number], self.parameters[number], grad, place)
        self.check_generation()
        reentered = self.last_average.arrives(number)
        if not self.collecting:
            self._begin_step()
        if reentered:
            self._refuse_reentry(number)
        self.arrived[number] = True
        if place is None:
            with stage("dense"):
                dense = dense_gradient(number, self.parameters[number], grad, self.dense_half, self.scale)
            self.stats.count_dense(grad.numel(), dense.payload.nbytes, self.ranks)
            return dense
        bucket, position = place
        if bucket.arrived[position]:
            raise RuntimeError(
                f"{self.names[number]}: compressed twice in one step (after a step that failed, call reset())"
            )
        self.stats.count_gradient(grad.numel(), self.ranks)
        try:
            with bucket.order, stage("accumulate"):
                self.method.receive(bucket, position, bucket.add_gradient(position, grad))
                bucket.mark_accumulated(position)
            if bucket.full:
                self.exchanges.launch(bucket, self._whole_exchange(bucket))
            self.exchanges.advance()
        except BaseException:
            self.reset()
            raise
        return place

    def finish_step(self) -> None:
        """Runs the step's exchanges to their ends; every gradient of the step must have arrived on this rank. Waits."""
        if not self.collecting:
            return
        try:
            for bucket in self.buckets:
                if any(bucket.arrived) and not bucket.full:
                    # Hosts pass the same parameters on all ranks, so the same ones are missing everywhere.
                    missing = [s.name for s, here in zip(bucket.segments, bucket.arrived, strict=True) if not here]
                    self.warn(
                        f"no gradients arrived for {', '.join(missing)}, and the exchange of their bucket could not "
                        "overlap backward: does the optimizer not hold them, or does DistributedDataParallel ignore or "
                        "skip them? Give the compressor only parameters whose gradients are averaged in every step"
                    )
                    self.exchanges.launch(bucket, self._whole_exchange(bucket))
            self.exchanges.finish()
        except BaseException:
            self.reset()
            raise
        self._end_step()
        self.undoable, self._discarded = True, False
        if self.local_steps is None:
            self.last_average.written()
        self.watch.forget_step()

    def entered(self) -> Entered:
        """The context of a host's calls."""
        return Entered(self)

    @modes_off
    def reset(self) -> None:
        """Drops the step in progress; see :meth:`hvd_compress.Compressor.reset`."""
        with self.lock:
            self.exchanges.abandon()
            if self.collecting:
                self.collecting = False
                self.undo()
                for bucket in self.buckets:
                    bucket.zero_accumulated()
            for bucket in self.buckets:
                bucket.clear()

    @modes_off
    def discard_step(self) -> None:
        """See :meth:`hvd_compress.Compressor.discard_step`."""
        with self.lock:
            if self.collecting:
                raise RuntimeError(
                    "discard_step() in the middle of a step: with Horovod call optimizer.synchronize() first, after a "
                    "failure reset() instead"
                )
            if self.undoable:
                self.undoable, self._discarded = False, True
                self.undo()

    @property
    def average_waits(self) -> bool:
        """Whether there is an average that nobody has applied so far. Synchronises a GPU."""
        return self.undoable and self.last_average.waits()

    def undo_skipped_step(self) -> float:
        """Takes the last average back if the ``GradScaler`` has lowered its scale and this optimizer has not stepped.
        (An average that no optimizer has used may be in use elsewhere, such as by the user's own update.)

        Returns the current loss scale. May synchronise a GPU.
        """
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
        if scale < self.scale and not self.watch.stepped():
            self.discard_step()
        return scale

    @modes_off
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        # hvd.broadcast_optimizer_state() steps an optimizer without state, also after an elastic reset: such a step
        # does not use an older average.
        self.check_generation()
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._sizes.setdefault(optimizer, size) != size:  # a new parameter group
            self._sizes[optimizer] = self.regrouped = size
            self.compared = False
        self.last_average.before_optimizer_step()
        self.method.check_optimizer(optimizer)

    def check_generation(self) -> bool:
        """Whether the set of ranks has changed since the last call (elastic). If so, shared state is reset."""
        generation = self.collectives.generation()
        if generation is self._generation:
            return False
        self._generation = generation
        if not self.collecting:
            self.undo_skipped_step()
        self.reset()
        self.registry = self.collectives.registry()
        self.registry.add(self, self.number)
        self.last_average.forget()
        self.step, self.compared, self.undoable, self.regrouped, self.restore = 0, False, False, None, None
        for bucket in self.buckets:
            self.method.restart(bucket)
        if self.local_steps is not None:
            self.local_steps.restart()
        return True

    def unknown_parameters(self, optimizer: Optimizer) -> int:
        """How many trained parameters of the optimizer this compressor was not given."""
        return sum(p.requires_grad and id(p) not in self.watch.ids for g in optimizer.param_groups for p in g["params"])

    def warn(self, text: str) -> None:
        """Warns once per text."""
        if text not in self._warned:
            self._warned.add(text)
            warn_user(f"{type(self.method).__name__}: {text}")

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        """For a host's collectives between two steps, which the body counts in the statistics."""
        with self.entered():
            self._compare()
            self.stats.begin_step()
            yield
            self.stats.end_step()

    # A step.

    def _compare(self) -> None:
        if not self.compared:
            compare_ranks(self, self._start_timeout)
            self.compared = True

    def _begin_step(self) -> None:
        self._compare()
        self.scale = self.undo_skipped_step()
        self.undoable, self.restore = False, None
        self.ranks = self.collectives.size
        self.arrived = bytearray(len(self.parameters))
        self.stats.begin_step()
        for bucket in self.buckets:
            bucket.clear()
            with bucket.order:
                self.method.begin(bucket)
        # Last: if a method could not begin the step, there is nothing to undo and the next gradient begins it again.
        self.collecting, self.watch.may_be_bypassed = True, False

    def _refuse_reentry(self, number: int) -> None:
        if self.method.linear and not self._discarded:
            return
        self.reset()
        raise RuntimeError(
            f"{self.names[number]}: the gradient contains the last average, to which a second backward pass has added: "
            f"with {type(self.method).__name__} it would count twice. Run all but the last forward and backward pass "
            "of a step in no_sync(), or call backward() once on the sum of the losses; and zero all gradients after "
            "every average, also of parameters that the next pass does not use (Horovod: after synchronize(), step "
            "within skip_synchronize())"
        )

    def _end_step(self) -> None:
        self.stats.end_step()
        self.collecting = False
        self.step += 1

    def _whole_exchange(self, bucket: Bucket) -> Exchange:
        bucket.drop_deferred()
        yield from self.method.exchange(bucket)
        bucket.mark_averaged()

    def undo(self) -> None:
        """Takes back what the current step, or the last one, has sent."""
        restore, self.restore = self.restore, None
        if restore is not None:
            restore()
            return
        for bucket in self.buckets:
            with bucket.order:
                self.method.undo(bucket)
