"""Local steps: several optimizer steps of each rank between two exchanges (local SGD, DiLoCo, SparseLoCo)."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..carriers import shard_groups
from ..engine.arguments import check_flag, check_fraction, check_integer, check_number, plain_names
from ..engine.dense import Averaging, dense_gradient
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.shards import is_sharded
from ..engine.state import Entry, Fixed, Tree
from ..hosts.fsdp import FSDPHost, check_sharded, hooked
from ..hosts.horovod import is_distributed_optimizer
from ..hosts.owners import Owners
from ..methods.base import Compressor
from ..methods.sparse import SparseMethod
from .buffers import Buffers, refresh_spectral_norms
from .calls import Calls, Row
from .common_weights import CommonWeights, scale_residuals
from .fragments import Turns
from .gradients import OwnGradients
from .in_flight import InFlight, count_gradients
from .optimizers import LocalOptimizers
from .outside import OutsideChanges

# Where in a training loop weights are looked at, for errors.
_AFTER_STEP, _AFTER_CALL = "since the optimizer's last step", "since the last call of LocalSteps"


class LocalSteps:
    r"""Local steps of any optimizer; every ``period`` of them, a compressor exchanges how far the weights have come.

    Implements local SGD (Stich, *Local SGD Converges Fast and Communicates Little*, ICLR 2019) with the selection,
    codec and exchange of any compressor; with ``outer_lr`` and ``outer_momentum``, DiLoCo (Douillard et al., arXiv
    2311.08105); with ``unsent="buffer"``, SparseLoCo's error feedback (Sarfi et al., arXiv 2508.15706). A are the
    common weights, w_i the weights of rank i after its local steps, r_i the compressor's residual::

        d_i = w_i - (A + r_i)             the local progress: to the compressor, a gradient
        a_i = r_i + d_i                   = w_i - A
        u   = mean_i Q(a_i[S])            on the entries S that the compressor selects, 0 elsewhere; Q: its codec
        r_i = a_i - what was sent
        A   = A + u
        w_i = A + r_i                     what was not sent stays in the rank's own weights

    With ``unsent="buffer"``::

        d_i = w_i - A
        r_i = decay (r_i + d_i - what was sent)
        w_i = A

    With ``outer_lr`` and ``outer_momentum``::

        v   = outer_momentum v + u
        A   = A + outer_lr (u + outer_momentum v)

    With ``restore_length``, RDA's length (arXiv 2604.21428; of N ranks, in each tensor): the mean of differences that
    point apart is shorter than they are, and the common weights would move as with a smaller learning rate::

        u   = min(sqrt(N), sqrt(mean_i |d_i|^2) / |u|) u

    With ``fragments`` and ``delay``, Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments of the weights,
    contiguous groups of the compressor's buckets with the uncompressed tensors beside them, are exchanged in turn, and
    training goes on while an exchange is in flight. With the weights w_i(0) at its beginning, and w_i' what an exchange
    without delay would have made of them::

        w_i = w_i + w_i' - w_i(0)         at its end: the progress that was made meanwhile is kept

    With the defaults, the mean of the ranks' weights is the same before and after an exchange. Ours: what was not sent
    stays in the rank's own weights (Slim-DP's idea), any compressor, complete averages of what it does not compress,
    common weights in the place of the rank's own for methods that select by weights, and progress in flight that is
    kept in full (Streaming DiLoCo mixes it in by a factor). Of differences that are not finite, all ranks see NaN in
    their weights, and A keeps its value: once the weights are restored, the next exchange is valid.

    Use it instead of ``hvd.DistributedOptimizer`` or ``DistributedDataParallel``, with the plain model and optimizer
    (``docs/local_steps.md``).

    All ranks must begin with the same parameters, which the first :meth:`step` checks, and call :meth:`step` equally
    often: before each exchange the ranks compare what they are in (32 bytes a rank), and all raise an error if that
    differs. After the parameters were replaced in training, call :meth:`take_weights`. The gradients, their clipping
    and accumulation, a ``GradScaler`` and the optimizer's state are each rank's own.

    Example::

        local = hvd_compress.LocalSteps(hvd_compress.Quantized(model, bits=2), optimizer, period=3, unsent="buffer")
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            local.step()
        local.finish(model)  # before testing or saving the model

    Args:
        compression: any compressor, without momentum and without ``grad_scaler``, which stay with the optimizer. Its
            steps (of schedules, ``warmup_steps``, ``budget_interval``) are exchanges.
        optimizer: the optimizer that takes the local steps, or a list of several, of different parameters. They must
            hold no trained parameter that the compressor was not given. A parameter that none of them holds is
            averaged, too. Accelerate's and Lightning's wrappers are removed.
        period: calls of :meth:`step` between two exchanges, at least 1. It can be changed in training
            (:attr:`period`).
        unsent: where the part of the difference stays that was not sent: in the rank's own ``"weights"``, or in an
            error-feedback ``"buffer"``, so that all ranks have the same weights after an exchange.
        decay: factor of that buffer after each exchange, in [0, 1]; SparseLoCo's is 0.95. Only with
            ``unsent="buffer"``.
        outer_lr: factor of the averaged difference, above 0; 1 is plain averaging, DiLoCo's is 0.7.
        outer_momentum: Nesterov momentum of the common weights, in [0, 1); DiLoCo's is 0.9.
        restore_length: whether the averaged difference of each tensor is scaled to the length of the ranks' own. Only
            with compressors that send all entries. Eight bytes a tensor are exchanged for it.
        fragments: parts of the weights that are exchanged in turn, one every ``period / fragments`` calls of
            :meth:`step`, which must be an integer. The compressor must have at least as many buckets
            (``bucket_mb=``). The bytes of one exchange are divided by it.
        delay: calls of :meth:`step` between the beginning and the end of an exchange, 0 to ``period / fragments``.
        watch_weights: whether weights that were replaced without :meth:`take_weights` raise an error. False if
            something else than the optimizers changes them, and in some steps only.

    Raises:
        TypeError: ``compression`` is not a compressor, ``optimizer`` neither an optimizer nor a list of them, or
            ``period``, ``fragments`` or ``delay`` no integer.
        ValueError: an argument out of range; a compressor with momentum, sign or ``grad_scaler``, with local steps
            already, with ``nodes`` and ``unsent="weights"``, or of few entries and ``restore_length``; an optimizer
            with unknown parameters, with parameters of another one, or Horovod's; FSDP2 shards over whose ranks the
            compressor averages, or gradients that hooks average; in training, an optimizer of the compressor's
            parameters that is not one of these, or a model that has other parameters now.
        RuntimeError: in training, on all ranks, ranks in different calls, or gradients that are averaged already;
            weights that were replaced without :meth:`take_weights`.
    """

    @modes_off
    def __init__(
        self,
        compression: Compressor,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int,
        *,
        unsent: str = "weights",
        decay: float = 1.0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        restore_length: bool = False,
        fragments: int = 1,
        delay: int = 0,
        watch_weights: bool = True,
    ) -> None:
        if not isinstance(compression, Compressor):
            raise TypeError(f"compression must be a compressor such as hvd_compress.IWP, got {compression!r:.80}")
        if isinstance(period, Optimizer):
            raise TypeError("several optimizers are given as a list: LocalSteps(compression, [first, second], period)")
        fragments = check_integer("fragments", fragments, 1)
        period = _checked_period(period, fragments)
        delay = check_integer("delay", delay, 0)
        if unsent not in ("weights", "buffer"):
            raise ValueError(f"unsent must be weights or buffer, got {unsent!r}")
        decay = check_fraction("decay", decay)
        if decay != 1.0 and unsent == "weights":
            raise ValueError('decay is of the error-feedback buffer: it goes with unsent="buffer"')
        outer_lr = check_number("outer_lr", outer_lr, above=0)
        outer_momentum = check_number("outer_momentum", outer_momentum, at_least=0, below=1)
        restore_length = check_flag("restore_length", restore_length)
        _check_fits(compression, unsent, restore_length)
        _check_gradients_are_own(compression)
        self.compression, engine = compression, compression.engine
        self._common = CommonWeights(engine, unsent, outer_lr, outer_momentum)
        weights = self._common.weights
        self._turns = Turns(engine, weights, period, fragments)
        if delay > self._turns.interval:
            raise ValueError(f"delay must lie in 0 to period / fragments = {self._turns.interval}, got {delay}")
        self._delay, self._plain = delay, outer_lr == 1.0 and not outer_momentum
        # The mean of all weights keeps what was replaced on all ranks, and nothing else is added.
        whole = not engine.works and not engine.dense_half
        self._exact = self._plain and not delay and not restore_length and whole
        self._calls, self._gradients = Calls(engine), OwnGradients(engine, weights)
        self._in_flight = InFlight(
            engine, self._common, self._turns, self._calls, self._gradients, delay, decay, restore_length
        )
        self._owners = Owners([(weight.name, weight.parameter) for weight in weights], compression.model)
        #: What must be the same on all ranks, beside the period.
        self._arguments = {"unsent": unsent, "decay": decay, "outer_lr": outer_lr, "restore_length": restore_length}
        self._arguments |= {"outer_momentum": outer_momentum, "fragments": fragments, "delay": delay}
        self._optimizers = LocalOptimizers(optimizer, self._common.ids, engine.warn)
        held = [weight for weight in weights if id(weight.parameter) in self._optimizers.held]
        self._outside, self._watches = OutsideChanges(held, engine.warn), check_flag("watch_weights", watch_weights)
        #: Whether the common weights have been taken from the parameters, and whether a local step has followed.
        self._taken, self._begun = False, False
        #: Optimizers that have taken a local step, until then.
        self._applied = weakref.WeakSet[Optimizer]()
        #: Calls of step() in this process; whether an optimizer has stepped since the last one; and whether finish() or
        #: take_weights() was called since the last of its steps.
        self._number, self._stepped, self._finished = 0, False, False
        engine.hand_over(self)
        _living.add(self)

    # What the user calls.

    @modes_off
    def step(self) -> bool:
        """Call it after each ``optimizer.step()`` or ``scaler.step(optimizer)``, also if the scaler skips that step; of
        several optimizers, once, after all of them. All ranks must call it equally often: the others wait.

        Every ``period / fragments``-th call begins an exchange, which ends in the same call or ``delay`` calls later.
        Returns whether one has ended in this call.
        """
        self._begin()
        if self._watching and self._stepped:
            self._outside.check(_AFTER_STEP)
        self._optimizers.counted()
        self._begun, self._stepped = True, False
        self._applied.clear()
        self._number += 1
        self._turns.count()
        if not self._exchanging:
            ended = self._turns.due()
            if ended:
                self._turns.begin_anew()
        else:
            with self._engine.entered:
                self._engine.compare()
            ended = self._in_flight.called()
            if self._turns.due():
                self._check()
                ended = self._in_flight.begin(self._number) or ended
            if ended:
                self._owners.reshard()
                self._note()
        return ended

    @property
    def period(self) -> int:
        """Calls of :meth:`step` between two exchanges of a weight. It can be set, on all ranks at the same place, for
        example to let it grow as the learning rate falls (Gu et al., *A Quadratic Synchronization Rule for Distributed
        Deep Learning*, ICLR 2024): ``local.period = max(3, int((0.01 / lr) ** 2))``. It is not saved: set it again
        after loading a state. Setting raises as the constructor."""
        return self._turns.period

    @period.setter
    def period(self, period: int) -> None:
        fragments = len(self._turns.fragments)
        period = _checked_period(period, fragments)
        if self._delay > period // fragments:
            raise ValueError(f"period must be at least fragments * delay = {fragments * self._delay}, got {period}")
        self._turns.change_period(period)

    @modes_off
    def finish(self, model: torch.nn.Module | None = None, *, buffers: Mapping[str, str] | None = None) -> None:
        """Averages all parameters over the ranks, without compression, before testing or saving; training may go on.
        What is in flight arrives before.

        With ``unsent="weights"`` nothing unsent is left afterwards; a ``"buffer"`` is kept. The outer optimizer takes
        no part. All ranks must call it.

        Args:
            model: its buffers become the same on all ranks, too: the running averages of BatchNorm and InstanceNorm
                modules are averaged, all others become rank 0's, as in DistributedDataParallel. Of a model sharded by
                FSDP2, also within the shard group.
            buffers: other ways, by patterns of the buffers' names (:mod:`fnmatch`): ``{"queue*": "own", "scale":
                "mean"}``, with ``"mean"``, ``"rank 0"``, or ``"own"`` for those that stay each rank's own.

        Raises:
            ValueError: a model without parameters of the compressor; a buffer that cannot be exchanged, or a wrong
                way.
            RuntimeError: on all ranks, some of them are in other calls, or buffers have other shapes on some.
        """
        if buffers is not None and (model is None or not isinstance(buffers, Mapping)):
            raise TypeError(f'finish(model, buffers={{"NAME": "own"}}) takes both, got {model!r:.40}, {buffers!r:.80}')
        self._begin()
        self._check()
        chosen = None
        if model is not None:
            self._check_model(model)
            chosen = Buffers(model, buffers or {})
        engine, weights = self._engine, self._common.weights
        if not self._exchanging:
            return
        if self._watching:
            self._outside.check(_AFTER_STEP if self._stepped else _AFTER_CALL, routine=False)
        self._in_flight.finish()
        with engine.outside_steps():
            self._calls.compare(Row("finish()"))
            label, device = f"{engine.exchanges.label}.buffers", engine.parameters[0].device
            levels = [engine.collectives, *shard_groups(engine.parameters)]
            if chosen is not None:
                chosen.check_same(levels, label, device)
            whole = [
                dense_gradient(w.number, w.parameter, w.own.to(w.common.dtype, copy=True), False, 1.0) for w in weights
            ]
            payloads = [weight.payload for weight in whole]
            for payload in payloads:
                engine.stats.count_dense(0, payload.nbytes, engine.collectives.size, engine.nodes.ranks)
            for fragment, age in zip(self._turns.fragments, self._turns.ages, strict=True):
                count_gradients(engine, fragment, age)
            averages = Averaging(engine.collectives, payloads, f"{engine.exchanges.label}.finish").results()
            for weight, average in zip(whole, averages, strict=True):
                weight.store(average)
            if chosen is not None:
                chosen.exchange(levels, label, device, engine.stats.count_request)
            self._common.replace(weight.grad for weight in whole)
            if model is not None:
                refresh_spectral_norms(model)
        self._owners.reshard()
        self._turns.begin_anew()
        self._finished = True
        self._note()

    @modes_off
    def take_weights(self) -> None:
        """Makes the parameters, as they are now, the common weights. Call it on all ranks after the parameters were
        replaced in training: by ``model.load_state_dict()``, an EMA switch, a roll-back, averaged weights (SWA), a
        merge of adapters. Without it the replacement would count as progress of the local steps; a change that is
        noticed raises an error.

        What is in flight is not applied, and nothing unsent is kept, nor outer momentum. The optimizers' states stay as
        they are. Not needed after ``load_state_dict()`` of this object or of its compressor.

        Raises:
            ValueError: the model has other parameters now.
            RuntimeError: on all ranks, their parameters differ, or some of them are in other calls.
        """
        self._engine.check_generation()
        self._check()
        self._in_flight.discard(wait=True)
        self._common.take(self._common.ids)
        scale_residuals(self._engine.works, 0.0)
        self._taken = True
        self._turns.begin_anew()
        if self._exchanging:
            with self._engine.entered:
                self._calls.compare(Row("take_weights()", must_equal=self._common.hash()))
        self._stepped, self._finished = False, True
        self._note()

    def state_dict(self) -> dict[str, Any]:
        """That of :meth:`the compressor <hvd_compress.Compressor.state_dict>`, which contains the state of this object.

        With a ``delay`` it waits for what is in flight, which is saved with it and applied when it is time: all ranks
        must call it, and :meth:`load_state_dict`, at the same place.
        """
        return self.compression.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` has returned. Raises ``ValueError`` if it does not fit."""
        self.compression.load_state_dict(state)

    # What the engine calls.

    @modes_off
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` for an optimizer that was not given here or to other local steps, or is Horovod's,
        ``RuntimeError`` if the weights were replaced."""
        if not self._optimizers.given(optimizer):
            if any(optimizer in other for other in _living if other is not self):
                return  # of a later training of the same parameters
            raise ValueError(
                f"{type(optimizer).__name__} steps parameters of this compressor, and LocalSteps was not given it: "
                "build LocalSteps(compression, [first, second], period) with all optimizers"
            )
        if is_distributed_optimizer(optimizer) and self._exchanging:
            raise ValueError(
                "Horovod's DistributedOptimizer averages the gradients in every step, and LocalSteps exchanges weights "
                "beside that, which saves nothing: step the plain optimizer"
            )
        self._begin()
        if self._watching and self._begun and not self._stepped:
            self._outside.check(_AFTER_CALL, routine=not self._finished)
        self._stepped, self._finished = True, False
        self._optimizers.stepping(optimizer)
        if self._exchanging and self._turns.due(calls=1):
            self._gradients.look()
        if self._begun:
            return
        if self._outside.changed() > 0.0:
            self._applied.clear()
        if optimizer not in self._applied:
            # Again before each step up to the first one with gradients, and after a change from outside:
            # hvd.broadcast_optimizer_state() may step before the parameters are broadcast. Not those that another
            # optimizer may have changed already.
            self._common.take(self._optimizers.may_change(optimizer))
            if self._engine.watch.applies_gradients(optimizer):
                self._applied.add(optimizer)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """The weights are as the optimizer has left them."""
        if self._noting:
            self._outside.note_step(optimizer)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return self._optimizers.given(optimizer)

    def restart(self, same_ranks: bool) -> None:
        """A state will be loaded, or the set of ranks has changed: the parameters before the next local step become the
        common weights. What is in flight is not applied to them; in an error-feedback buffer it stays."""
        self._in_flight.discard(wait=same_ranks)
        self._outside.forget()
        self._taken = self._begun = False
        self._turns.begin_anew()

    def dropped(self) -> None:
        """The compressor's step was dropped: what was in flight returns to the weights, or to the buffer."""
        if self._in_flight.waits:
            self._in_flight.dropped()
            self._note()

    def drain(self, to_save: bool = False) -> None:
        """Waits for what is in flight; the parameters change when it is time. ``to_save``: for ``state_dict()``."""
        if not (to_save and self._in_flight.waits):
            self._in_flight.drain()
            return
        # First what the others will start in any case, wherever they are.
        self._in_flight.check()
        with self._calls.meeting(Row("state_dict()")):
            self._in_flight.drain()
        with self._engine.entered:
            self._calls.compare(Row("state_dict()"))

    def options(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        compared = {
            "period": self.period,
            **self._arguments,
            "steps since the last exchange": " ".join(map(str, self._turns.ages)),
            "hash of the weights before the first step (were they broadcast?)": self._common.hash(),
        }
        return {f"LocalSteps: {name}": value for name, value in compared.items()}

    def check_common(self) -> None:
        """Raises ``RuntimeError``, on all ranks, if the weights of one are not the common ones. All ranks call it."""
        differs = self._taken and not self._common.applied()
        if self._exchanging:
            with self._engine.entered:
                rows = self._calls.compare(Row("DCPState.state_dict()", extra=int(differs)))
            differs = any(row.extra for row in rows)
        if differs:
            raise RuntimeError("the ranks' weights differ between exchanges: call finish() before saving")

    def state(self) -> Tree:
        """The saved state, beside the compressor's."""
        return {
            **self._common.state(),
            "fragments": Fixed(len(self._turns.fragments)),
            "since": self._turns.state(),
            "in_flight": self._in_flight.state(),
            "taken": Entry(vars(self), "_taken", bool),
            "begun": Entry(vars(self), "_begun", bool),
        }

    # Local steps.

    @property
    def _engine(self) -> Engine:
        return self.compression.engine

    @property
    def _exchanging(self) -> bool:
        """Whether there is anything to exchange: the plain average of one rank is what it has."""
        collectives = self._engine.collectives
        return collectives.active and not (collectives.size == 1 and self._plain)

    @property
    def _watching(self) -> bool:
        """Whether weights that were replaced would be mixed with others."""
        return self._watches and self._exchanging and not self._exact

    @property
    def _noting(self) -> bool:
        """Whether somebody will compare the weights with those of now: before the first call, too, see
        :meth:`before_optimizer_step`."""
        return self._watching or (self._exchanging and not self._begun)

    def _note(self) -> None:
        if self._noting:
            self._outside.note()

    def _begin(self) -> None:
        self._engine.check_generation()
        if not self._taken:
            self._common.take(self._common.ids)
            self._taken = True

    def _check(self) -> None:
        """Raises ``ValueError`` if the optimizers or the model have other parameters now."""
        self._owners.reshard()
        self._owners.check()
        self._optimizers.check()

    def _check_model(self, model: torch.nn.Module) -> None:
        named = dict(model.named_parameters())
        held = {id(p) for p in named.values()}
        if held and held.isdisjoint(self._common.ids):
            raise ValueError(
                "finish(model): this model has none of the parameters that the compressor was given (a copy, another "
                "model, or one after load_state_dict(assign=True)?)"
            )
        theirs = dict(zip(plain_names(list(named)), named.values(), strict=True))
        for weight in self._common.weights:
            if id(weight.parameter) not in held and weight.name in theirs:
                raise ValueError(
                    f"finish(model): the model has another parameter {weight.name} than the compressor was given "
                    "(load_state_dict(assign=True)?): build the compressor, the optimizer and LocalSteps after that"
                )


#: All of this process.
_living = weakref.WeakSet[LocalSteps]()


def _checked_period(period: object, fragments: int) -> int:
    calls = check_integer("period", period, 1)
    if calls % fragments:
        raise ValueError(f"period must be a multiple of fragments, got {calls} and {fragments}")
    return calls


def _check_fits(compression: Compressor, unsent: str, restore_length: bool) -> None:
    """Raises ``ValueError`` for a compressor with which local steps cannot work."""
    engine = compression.engine
    if engine.local_steps is not None:
        raise ValueError("this compressor has local steps already: build one compressor for each optimizer")
    if unsent == "weights" and engine.works and engine.nodes.inside is not None:
        raise ValueError('in nodes one rank keeps what was not sent, for all of its node: use unsent="buffer"')
    traits = compression.traits
    if traits.momentum or engine.scaler is not None:
        raise ValueError(
            "momentum and grad_scaler stay with the optimizer that takes the local steps: build the compressor "
            "with momentum=0 and without grad_scaler"
        )
    if restore_length and isinstance(compression, SparseMethod):
        raise ValueError(
            f"{type(compression).__name__} sends few entries, whose length is not that of the differences: "
            "restore_length=True goes with compressors that send all, such as Quantized and NoCompression"
        )
    if traits.signs:
        raise ValueError("local steps move the weights by averages, not by signs: build the compressor with sign=False")
    if unsent == "weights" and not traits.exact:
        raise ValueError(
            "what stays in the weights is what was not sent: build the compressor with decay=1 and subtract=1, or "
            'use unsent="buffer"'
        )


def _check_gradients_are_own(compression: Compressor) -> None:
    """Raises ``ValueError`` if gradients are known to be averaged over the compressor's ranks in each step, or not to
    be averaged in a shard group."""
    parameters = compression.engine.parameters
    if compression.model is not None:
        check_sharded(compression.model)
    if hooked(parameters):
        raise ValueError(
            "hooks of register_fsdp_hooks() exchange these parameters' gradients in every step: call remove() of "
            "the handle that it has returned"
        )
    if isinstance(compression.host, FSDPHost):
        for name, parameter in zip(compression.engine.names, parameters, strict=True):
            if is_sharded(parameter):
                compression.host.check(name, parameter, True)
