"""Local steps: several optimizer steps of each rank between two exchanges (local SGD, DiLoCo, SparseLoCo)."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from ..engine.arguments import check_fraction
from ..engine.collectives import allreduce
from ..engine.dense import Averaging, dense_gradient
from ..engine.engine import Engine
from ..engine.modes import modes_off
from ..engine.state import Entry, Fixed, Tree
from ..methods.base import Compressor
from .common_weights import CommonWeights
from .fragments import Turns
from .in_flight import InFlight, count_gradients
from .optimizers import LocalOptimizers


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

    All ranks must begin with the same parameters, which the first exchange checks, and call :meth:`step` equally often.
    The gradients, their clipping and accumulation, a ``GradScaler`` and the optimizer's state are each rank's own.
    Checkpoints: ``compression.state_dict()`` contains this object's state. With a ``delay`` it waits for what is in
    flight, which is saved with it and applied when it is time: all ranks must call it, and ``load_state_dict()``, at
    the same place.

    Args:
        compression: any compressor, without momentum and without ``grad_scaler``, which stay with the optimizer. Its
            steps (of schedules, ``warmup_steps``, ``budget_interval``) are exchanges.
        optimizer: the optimizer that takes the local steps, or a list of several, of different parameters. They must
            hold no trained parameter that the compressor was not given. A parameter that none of them holds is
            averaged, too.
        period: calls of :meth:`step` between two exchanges, at least 1.
        unsent: where the part of the difference stays that was not sent: in the rank's own ``"weights"``, or in an
            error-feedback ``"buffer"``, so that all ranks have the same weights after an exchange.
        decay: factor of that buffer after each exchange, in [0, 1]; SparseLoCo's is 0.95. Only with
            ``unsent="buffer"``.
        outer_lr: factor of the averaged difference, above 0; 1 is plain averaging, DiLoCo's is 0.7.
        outer_momentum: Nesterov momentum of the common weights, in [0, 1); DiLoCo's is 0.9.
        fragments: parts of the weights that are exchanged in turn, one every ``period / fragments`` calls of
            :meth:`step`, which must be an integer. The compressor must have at least as many buckets
            (``bucket_mb=``). The bytes of one exchange are divided by it.
        delay: calls of :meth:`step` between the beginning and the end of an exchange, 0 to ``period / fragments``.

    Raises:
        TypeError: ``compression`` is not a compressor, or ``optimizer`` neither an optimizer nor a list of them.
        ValueError: an argument out of range; a compressor with momentum, sign or ``grad_scaler``, with local steps
            already, or with ``nodes`` and ``unsent="weights"``; an optimizer with unknown parameters, with parameters
            of another one, or Horovod's; in training, an optimizer of the compressor's parameters that is not one of
            these.
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
        fragments: int = 1,
        delay: int = 0,
    ) -> None:
        if not isinstance(compression, Compressor):
            raise TypeError(f"compression must be a compressor such as hvd_compress.IWP, got {compression!r:.80}")
        if period < 1:
            raise ValueError(f"period must be at least 1, got {period}")
        if unsent not in ("weights", "buffer"):
            raise ValueError(f"unsent must be weights or buffer, got {unsent!r}")
        check_fraction("decay", decay)
        if decay != 1.0 and unsent == "weights":
            raise ValueError('decay is of the error-feedback buffer: it goes with unsent="buffer"')
        if not outer_lr > 0.0:
            raise ValueError(f"outer_lr must be above 0, got {outer_lr}")
        if not 0.0 <= outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must lie in [0, 1), got {outer_momentum}")
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
        if traits.signs:
            raise ValueError(
                "local steps move the weights by averages, not by signs: build the compressor with sign=False"
            )
        if unsent == "weights" and not traits.exact:
            raise ValueError(
                "what stays in the weights is what was not sent: build the compressor with decay=1 and subtract=1, or "
                'use unsent="buffer"'
            )
        self.compression = compression
        self._common = CommonWeights(engine, unsent, outer_lr, outer_momentum)
        self._turns = Turns(engine, self._common.weights, period, fragments)
        if not 0 <= delay <= self._turns.interval:
            raise ValueError(f"delay must lie in 0 to period / fragments = {self._turns.interval}, got {delay}")
        self._in_flight = InFlight(engine, self._common, self._turns, delay, decay)
        #: What must be the same on all ranks.
        self._arguments = {"period": period, "unsent": unsent, "decay": decay, "outer_lr": outer_lr}
        self._arguments |= {"outer_momentum": outer_momentum, "fragments": fragments, "delay": delay}
        self._optimizers = LocalOptimizers(optimizer, self._common.ids, self._before_step, engine.warn)
        #: Whether the common weights have been taken from the parameters, and whether a local step has followed.
        self._taken, self._begun = False, False
        engine.local_steps = self

    # What the user calls.

    @modes_off
    def step(self) -> bool:
        """Call it after each ``optimizer.step()`` or ``scaler.step(optimizer)``, also if the scaler skips that step; of
        several optimizers, after all of them. All ranks must call it equally often: the others wait.

        Every ``period / fragments``-th call begins an exchange, which ends in the same call or ``delay`` calls later.
        Returns whether one has ended in this call.
        """
        self._begin()
        self._optimizers.counted()
        self._begun = True
        self._turns.count()
        ended = self._in_flight.called()
        if not self._turns.due:
            return ended
        if not self._engine.collectives.active:
            self._turns.begin_anew()
            return True
        self._optimizers.check()
        return self._in_flight.begin() or ended

    @modes_off
    def finish(self, model: torch.nn.Module | None = None) -> None:
        """Averages all parameters over the ranks, without compression, before testing or saving; training may go on.
        What is in flight arrives before.

        With ``unsent="weights"`` nothing unsent is left afterwards; a ``"buffer"`` is kept. The outer optimizer takes
        no part. All ranks must call it.

        Args:
            model: its floating-point buffers, such as BatchNorm's statistics, are averaged, too; others are not
                touched.
        """
        self._begin()
        engine, weights = self._engine, self._common.weights
        if not engine.collectives.active:
            return
        self._in_flight.finish()
        with engine.outside_steps():
            whole = [
                dense_gradient(w.number, w.parameter, w.own.to(w.common.dtype, copy=True), False, 1.0) for w in weights
            ]
            buffers = [b for b in model.buffers() if b.is_floating_point()] if model is not None else []
            # In double precision the mean of equal values is that value.
            payloads = [*(w.payload for w in whole), *(b.double().flatten() for b in buffers)]
            for payload in payloads:
                engine.stats.count_dense(0, payload.nbytes, engine.collectives.size, engine.nodes.ranks)
            for fragment, age in zip(self._turns.fragments, self._turns.ages, strict=True):
                count_gradients(engine, fragment, age)
            averages = iter(Averaging(engine.collectives, payloads, f"{engine.exchanges.label}.finish").results())
            for weight in whole:
                weight.store(next(averages))
            self._common.replace(weight.grad for weight in whole)
            for buffer in buffers:
                buffer.copy_(next(averages).view(buffer.shape))
        for module in model.modules() if model is not None else ():
            if hasattr(module, "unshard"):  # of FSDP2: after an evaluation it may hold what the shards were before
                cast(Any, module).reshard()
        self._turns.begin_anew()

    # What the engine calls.

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` for an optimizer that was not given here."""
        self._optimizers.check_stepping(optimizer)

    def restart(self, same_ranks: bool) -> None:
        """A state will be loaded, or the set of ranks has changed: the parameters before the next local step become the
        common weights. What is in flight is not applied to them; in an error-feedback buffer it stays."""
        self._in_flight.discard(wait=same_ranks)
        self._taken = self._begun = False
        self._turns.begin_anew()

    def dropped(self) -> None:
        """The compressor's step was dropped: what was in flight returns to the weights, or to the buffer."""
        self._in_flight.dropped()

    def drain(self) -> None:
        """Waits for what is in flight; the parameters change when it is time."""
        self._in_flight.drain()

    def options(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        compared = {
            **self._arguments,
            "steps since the last exchange": " ".join(map(str, self._turns.ages)),
            "hash of the weights before the first step (were they broadcast?)": self._common.hash(),
        }
        return {f"LocalSteps: {name}": value for name, value in compared.items()}

    def check_common(self) -> None:
        """Raises ``RuntimeError``, on all ranks, if the weights of one are not the common ones. All ranks call it."""
        engine = self._engine
        differs = self._taken and not self._common.applied()
        differ = torch.tensor([float(differs)], dtype=torch.float32, device=engine.parameters[0].device)
        if engine.collectives.active:
            with engine.entered:
                name = f"{engine.exchanges.label}.common"
                differ = engine.collectives.start(allreduce(differ, "budget"), name).result()
        if differ.item():
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

    @modes_off
    def _before_step(self, optimizer: Optimizer) -> None:
        self._begin()
        if not self._begun:
            # Again before each step up to the first call of step(): hvd.broadcast_optimizer_state() may step before the
            # parameters are broadcast. Not those that another optimizer may have changed already.
            self._common.take(self._optimizers.may_change(optimizer))

    def _begin(self) -> None:
        self._engine.check_generation()
        if not self._taken:
            self._common.take(self._common.ids)
            self._taken = True
