"""The buckets of one compressor and their exchanges. An engine knows no step: its clock begins and ends exchanges.

The clock calls :meth:`Engine.begin`, :meth:`Engine.arrive` for every gradient, or what else is to be averaged, and
:meth:`Engine.finish` after the last one. When a bucket is full, its exchange is launched: a generator of the method
that yields a :class:`~hvd_compress.engine.collectives.Request` whenever tensors must cross the network. A rank blocks
only in ``finish``, after it has started the first collective of every bucket, so that ranks cannot deadlock; and before
an exchange, to compare configurations, if they have not been compared since a change. This wait ends after
``start_timeout`` seconds.
"""

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from .. import ops
from .._version import __version__
from .bucket import make_buckets, strides_of
from .clock import Clock
from .collectives import Nodes
from .comparison import Comparison, Configuration, digest
from .dense import DenseAverages, DenseGradient
from .entered import Entered
from .exchange import Exchange, Exchanges
from .method import Method
from .optimizers import Optimizers
from .owner import in_use
from .place import Place, compressed
from .profiling import stage
from .shards import local
from .state import Entry, Tree
from .two_levels import NotOwned, two_level_exchange
from .user_warning import warn_user
from .wire_stats import WireStats
from .work import Step, Work, undo


class Engine:
    """The buckets of one compressor, their exchanges, and what its ranks compare.

    Args:
        method: a :class:`hvd_compress.Compressor`, which owns the engine (:mod:`.owner`).
        named: ``(name, parameter)`` pairs, checked, in the same order on all ranks.
        nodes: the host's collectives.
        seed, min_numel, bucket_mb, dense_values, start_timeout: as of :class:`hvd_compress.Compressor`.
    """

    def __init__(
        self,
        method: Method,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        nodes: Nodes,
        *,
        seed: int,
        min_numel: int,
        bucket_mb: float,
        dense_values: str,
        start_timeout: float,
    ) -> None:
        self._method, self.nodes, self.collectives, self._seed = weakref.ref(method), nodes, nodes.everyone, seed
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        alone = nodes.inside is not None and nodes.between.size == 1
        found = [] if alone else compressed(named, min_numel, method.compresses)
        buckets = make_buckets(found, int(bucket_mb * 2**20), nodes.ranks)
        for bucket in buckets:
            ops.check_device(bucket.device)
        self.works = [method.work(bucket) if bucket.owner == nodes.rank else NotOwned(bucket) for bucket in buckets]
        # The buckets of the exchange that began last.
        self._begun: Sequence[Work] = self.works
        places = (Place(work, index) for work in self.works for index in range(len(work.bucket.pieces)))
        by_number = {place.piece.number: place for place in places}
        #: By parameter, its place in a bucket, or None if it is not compressed.
        self.place_of = [by_number.get(number) for number in range(len(named))]
        self.stats = WireStats()
        # Gradients of a model on several GPUs arrive from several threads.
        self._lock = lock = threading.RLock()
        self.comparison = Comparison(self.collectives, self.parameters[0].device, start_timeout)
        label = self.comparison.label
        self.exchanges = Exchanges(nodes, self.stats, label, partial(_advance_others, self._method))
        self.dense = DenseAverages(self.exchanges, dense_values == "fp16")
        #: The context of all calls that exchange.
        self.entered = Entered(lock, self.exchanges, self.stats)
        self.optimizers = Optimizers(self.parameters)
        #: The number of completed exchanges, each of all buckets or of those of a fragment.
        self.step = 0
        #: Whether an exchange is in progress: from begin() to finish().
        self._open = False
        #: The ranks of this exchange; the method's options in it, and their hash.
        self._ranks = 1
        self._options, self._settings = "", 0
        self._generation = self.collectives.generation()
        self._warned: set[str] = set()
        if alone:
            self.warn("all ranks are on one node: nothing is compressed, all gradients are averaged as they are")

    @property
    def method(self) -> Method:
        return cast(Method, self._method())

    @property
    def clock(self) -> Clock:
        """The object that begins and ends exchanges. Makes a host if there is none."""
        return self.method.clock

    # An exchange.

    def begin(
        self, works: Sequence[Work], number: int, scale: float = 1.0, *, by_host: bool = False, compared: bool = False
    ) -> Step:
        """Begins an exchange of the buckets of ``works``. The state of the others is not touched.

        Args:
            number: of completed exchanges of these buckets.
            scale: the factor of everything that arrives (a ``GradScaler``'s scale).
            by_host: the host averages uncompressed gradients itself. It passes in ``p.grad``, which others may add to.
            compared: the caller compares the step's digest between the ranks.
        """
        self.compare()
        self._ranks = self.collectives.size
        self.dense.begin(scale, by_host)
        self.stats.begin_step()
        options = {"method": type(self.method).__name__, **self.method.options()}
        if (text := repr(options)) != self._options:  # one rank may have changed its own between steps
            self._options, self._settings = text, digest(options)
        between = self.nodes.between
        step = Step(number, between.rank, between.size, scale, self._seed, self._settings, compared)
        self._begun = works
        for work in works:
            work.bucket.clear(shared=by_host)
            with work.bucket.order:
                work.begin(step)
        # Last: if a method could not begin, there is nothing to undo and the next gradient begins again.
        self._open = True
        return step

    def arrive(self, number: int, grad: Tensor, start: Tensor | None = None) -> Place | DenseGradient:
        """Takes a tensor of parameter ``number`` that is to be averaged, after ``check_gradient()``. Returns its place
        in a bucket, or its payload, if it is not compressed. Raises ``RuntimeError`` for a second one in one exchange.
        If an exchange fails, resets the clock. ``start``: see :attr:`Work.starts`."""
        place = self.place_of[number]
        if place is None:
            with stage("dense"):
                dense = self.dense.arrive(number, self.parameters[number], grad)
            # Requests count the bytes of what the engine averages.
            sent = dense.payload.nbytes if self.dense.by_host else 0
            self.stats.count_dense(grad.numel(), sent, self._ranks, self.nodes.ranks)
            return dense
        if start is not None:
            place.work.starts[place.index] = start
        full = place.work.bucket.arrive(place.index, grad)
        if full or self.exchanges.due():
            try:
                if full:
                    self._launch(place.work)
                self.exchanges.advance()
            except BaseException:
                self.clock.reset()
                raise
        return place

    def finish(self) -> None:
        """Runs the exchanges to their ends; everything must have arrived on this rank. Waits. If an exchange fails,
        resets the clock. The averages are written by ``dense.write()``, and by each bucket."""
        try:
            for work in self.works:
                if work.bucket.incomplete:
                    self._warn_of_missing(work)
                    self._launch(work)
            self.exchanges.finish()
        except BaseException:
            self.clock.reset()
            raise
        self.stats.end_step()
        self._open = False
        self.step += 1

    def _warn_of_missing(self, work: Work) -> None:
        # Hosts pass the same parameters on all ranks, so the same ones are missing everywhere.
        missing = ", ".join(piece.name for piece in work.bucket.missing())
        self.warn(
            f"no gradients arrived for {missing}, and the exchange of their bucket could not overlap backward: does "
            "the optimizer not hold them, or does DistributedDataParallel ignore or skip them? Give the compressor "
            "only parameters whose gradients are averaged in every step"
        )

    def reset(self, overwritten: bool = False) -> None:
        """Ends an exchange that failed: what was sent is added back to the residuals. What has arrived is there, too,
        and becomes zero where the caller reads it, unless others have written to it since; with nodes, where it may
        have been summed already, it is lost. ``overwritten``: whether its memory holds something else now."""
        self.exchanges.clear()
        self.dense.clear()
        try:
            if self._open:
                self._open = False
                undo(self._begun)
                if not overwritten:
                    self._keep_arrived()
        finally:
            for work in self.works:
                work.bucket.clear()
                for piece in work.bucket.pieces:
                    piece.let_stand_in(None)

    def _keep_arrived(self) -> None:
        for work in self.works:  # before any becomes zero: gradients that are views of one memory have one version
            work.bucket.clear_changed()
        for work in self.works:
            if work.bucket.incomplete and self.nodes.inside is None:
                try:
                    _accumulate(work)
                except Exception:  # the error that led here matters more
                    work.bucket.clear()
        for work in self.works:
            work.bucket.zero(but=work.starts)

    def _launch(self, work: Work) -> None:
        bucket, nodes = work.bucket, self.nodes
        if bucket.owner == nodes.rank:
            self.stats.count_gradient(bucket.numel - sum(piece.numel for piece in bucket.missing()), self._ranks)
        if nodes.inside is None:
            _accumulate(work)
            self.exchanges.launch(str(bucket.index), bucket.order, _whole_exchange(work))
        else:
            self.exchanges.launch(str(bucket.index), bucket.order, two_level_exchange(work, nodes))

    # Other ranks, and states.

    def compare(self) -> None:
        """Compares the ranks' configurations, unless they were since the last change. Raises ``RuntimeError``, on all
        ranks, if they differ or one does not come. Waits."""
        if not self.comparison.done:
            method = self.method
            in_use(lambda: [*self.comparison.others(method)])  # a dropped one would wait for the other ranks for ever
            with self.exchanges.waiting():
                self.comparison.require(partial(_configuration, method), partial(_comparing, method))

    def check_generation(self) -> bool:
        """Whether the set of ranks has changed since the last call (elastic). If so, shared state is reset."""
        generation = self.collectives.generation()
        if generation is self._generation:
            return False
        self.clock.restart(same_ranks=False)
        self.nodes.renew()
        self._generation = generation
        self.comparison.register(self.method)
        self.optimizers.restart()
        self.step = 0
        self.restart()
        return True

    def restart(self) -> None:
        """Resets what new ranks cannot know, and what would undo the last exchange."""
        self.method.restart()
        for work in self.works:
            work.restart()

    def state(self) -> Tree:
        """Describes the engine's own saved state: how many exchanges have ended."""
        return Entry(vars(self), "step", int, low=0)

    def warn(self, text: str) -> None:
        """Warns once per text."""
        if text not in self._warned:
            self._warned.add(text)
            warn_user(f"{type(self.method).__name__}: {text}")


def _accumulate(work: Work) -> None:
    """Adds what has arrived to the state."""
    bucket = work.bucket
    with bucket.order, stage("accumulate"), bucket.collected():
        work.accumulate()


def _whole_exchange(work: Work) -> Exchange:
    yield from work.exchange()
    work.bucket.mark_written()


def _advance_others(method: "weakref.ref[Method]") -> None:
    """Continues the exchanges of all other compressors, as far as possible without waiting for them, or for a thread:
    another rank may wait for those first."""
    this = method()
    for other in () if this is None else this.engine.comparison.others(this):
        engine: Engine = other.engine
        if not engine.exchanges.running or not engine._lock.acquire(blocking=False):
            continue
        try:
            with engine.entered:
                engine.exchanges.advance()
        except BaseException:
            engine.clock.reset()
            raise
        finally:
            engine._lock.release()


def _comparing(method: Method) -> list[tuple[Comparison, Configuration]]:
    """The comparisons of the other compressors with which another rank may begin."""
    others = method.engine.comparison.others(method)
    found = [other for other in others if not other.engine.comparison.done and other.clock.comes_first]
    for other in found:
        other.engine.check_generation()
    return [(other.engine.comparison, partial(_configuration, other)) for other in found]


def _configuration(method: Method) -> dict[str, object]:
    """Returns values that must be the same on all ranks, by name."""
    engine: Engine = method.engine
    parameters = {}
    for number, (name, p) in enumerate(zip(engine.names, engine.parameters, strict=True)):
        place = engine.place_of[number]
        where = "uncompressed" if place is None else f"in bucket {place.work.bucket.index}"
        state = "trained" if p.requires_grad else "frozen"
        weight = local(p)
        layout = f"shape {tuple(weight.shape)}, strides {strides_of(weight)}, {p.dtype}"
        text = f"number {number}, {layout}, {state}, {where}"
        parameters[f"parameter {name}"] = text
    return {
        "version of hvd_compress": __version__,
        "method": type(method).__name__,
        **method.options(),
        **engine.clock.options(),
        "seed": engine._seed,
        "nodes, ranks of a node": f"{engine.nodes.between.size}, {engine.nodes.ranks}",
        "step": engine.step,
        "parameters in changed groups": engine.optimizers.regrouped,
        **parameters,
    }
