"""Local steps: several optimizer steps of each rank between two exchanges (local SGD, DiLoCo, SparseLoCo)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine.arguments import check_flag, check_integer, check_number
from ..engine.modes import modes_off
from ..guards.unfit_compressor import check_compressor, check_own_gradients
from ..methods.base import Compressor
from .round import Settings
from .rounds import Rounds


class LocalSteps:
    r"""Local steps of any optimizer; every ``period`` of them, a compressor exchanges how far the weights have come.

    Implements local SGD (Stich, *Local SGD Converges Fast and Communicates Little*, ICLR 2019) with the selection,
    codec and exchange of any compressor; with ``outer_lr`` and ``outer_momentum``, DiLoCo (Douillard et al., arXiv
    2311.08105). What was not sent stays in an error-feedback buffer (SparseLoCo, Sarfi et al., arXiv 2508.15706). A are
    the common weights, w_i the weights of rank i after its local steps, r_i the compressor's residual::

        d_i = w_i - A                     the local progress: to the compressor, a gradient
        u   = mean_i Q((r_i + d_i)[S])    on the entries S that the compressor selects, 0 elsewhere; Q: its codec
        r_i = decay (r_i + d_i - what was sent)
        A   = A + u
        w_i = A

    With ``unsent="weights"``, Slim-DP's form, it stays in the rank's own weights::

        d_i = w_i - (A + r_i)
        r_i = w_i - A - what was sent
        w_i = A + r_i

    With ``outer_lr`` and ``outer_momentum``::

        v   = outer_momentum v + u
        A   = A + outer_lr (u + outer_momentum v)

    With ``restore_length``, RDA's length (arXiv 2604.21428; of N ranks, in each tensor): the mean of differences that
    point apart is shorter than they are, and the common weights would move as with a smaller learning rate::

        u   = min(sqrt(N), sqrt(mean_i |d_i|^2) / |u|) u

    With ``on_averaged_gradients`` (ours), weights and states of some optimizers are the same on all ranks, and no rank
    normalises noise of its own. Between exchanges these weights stand still: ``step()`` adds the gradients to a sum,
    s_i. In an exchange after H calls the optimizer takes one step for H, in place of the outer one::

        d_i = s_i
        A   = A + the step by u / H, with lr H, and momentum and betas to the power H

    With ``fragments`` and ``delay``, Streaming DiLoCo (Douillard et al., arXiv 2501.18512): fragments of the weights,
    contiguous groups of the compressor's buckets with the uncompressed tensors beside them, are exchanged in turn, and
    training goes on while an exchange is in flight. With the weights w_i(0) at its beginning, and w_i' what an exchange
    without delay would have made of them::

        w_i = w_i + w_i' - w_i(0)         at its end: the progress that was made meanwhile is kept

    Ours: any compressor, complete averages of what it does not compress, common weights in the place of the rank's own
    for methods that select by weights, and progress in flight that is kept in full (Streaming DiLoCo mixes it in by a
    factor). Of differences that are not finite, all ranks see NaN in their weights, and A keeps its value: once the
    weights are restored, the next exchange is valid.

    Use it instead of ``hvd.DistributedOptimizer`` or ``DistributedDataParallel``, with the plain model and optimizer
    (``docs/local_steps.md``).

    All ranks must begin with the same parameters, which the first :meth:`step` checks, and call :meth:`step` equally
    often: before each exchange the ranks compare what they are in (32 bytes a rank), and all raise an error if that
    differs. After the parameters were replaced in training, call :meth:`take_weights`. The gradients, their clipping
    and accumulation, a ``GradScaler`` and the state of an optimizer that takes local steps are each rank's own.

    Example::

        local = hvd_compress.LocalSteps(hvd_compress.Quantized(model, bits=2), optimizer, period=3)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss_function(model(inputs), targets).backward()
            optimizer.step()
            local.step()
        local.finish(model)  # on all ranks, before testing the model; end(model) when the training is over

    Args:
        compression: any compressor, without momentum and without ``grad_scaler``, which stay with the optimizer. Its
            steps (of schedules, ``warmup_steps``, ``budget_interval``) are exchanges.
        optimizer: the optimizer that takes the local steps, or a list of several, of different parameters. They must
            hold no trained parameter that the compressor was not given. A parameter that none of them holds is
            averaged, too. Accelerate's and Lightning's wrappers are removed.
        period: calls of :meth:`step` between two exchanges of a weight, at least 1. It can change (:attr:`period`).
        unsent: where the part of the difference stays that was not sent: in an error-feedback ``"buffer"``, so that all
            ranks have the same weights after an exchange, or in the rank's own ``"weights"``.
        decay: factor of that buffer after each exchange, in [0, 1]; SparseLoCo's is 0.95.
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
        on_averaged_gradients: optimizers, such as AdamW of embeddings and norms beside Muon, that step on gradients
            averaged over ranks and calls: one or several, which may also be in ``optimizer``, or in a
            ``CombinedOptimizer`` there: SGD, RMSprop without momentum, Adam, AdamW, Adamax, Muon, or others of means by
            ``betas`` or ``momentum`` (with ``dampening``, SGD's sums). Step them in each iteration as the others,
            clipped and scaled as usual, without a closure; step hooks run there only. ``lr`` and other settings must be
            the same on all ranks (of torchft's peers, ``lr`` is averaged over calls). One rank does the same.

    Raises:
        TypeError: ``compression`` is not a compressor, ``optimizer`` neither an optimizer nor a list of them, or
            ``period``, ``fragments`` or ``delay`` no integer.
        ValueError: an argument out of range; ``on_averaged_gradients`` whose step cannot stand for several; a
            compressor with momentum, sign or ``grad_scaler``, with local steps already, of few entries and
            ``restore_length``, or with ``nodes`` and ``unsent="weights"``; a ``delay``, or ``on_averaged_gradients``,
            with torchft replica groups of several ranks; an optimizer with unknown parameters, those of another one, or
            Horovod's; FSDP2 shards over whose ranks the compressor averages, or gradients that hooks average; in
            training, another optimizer of the compressor's parameters, or a model that has other parameters now.
        RuntimeError: in training, on all ranks, ranks in different calls, or gradients that are averaged already;
            weights that were replaced without :meth:`take_weights`; of a torchft replica group of several ranks, one
            that was not healed with the others, or has not come to a round.
    """

    @modes_off
    def __init__(
        self,
        compression: Compressor,
        optimizer: Optimizer | Sequence[Optimizer],
        period: int,
        *,
        unsent: str = "buffer",
        decay: float = 1.0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        restore_length: bool = False,
        fragments: int = 1,
        delay: int = 0,
        watch_weights: bool = True,
        on_averaged_gradients: Optimizer | Sequence[Optimizer] = (),
    ) -> None:
        if not isinstance(compression, Compressor):
            raise TypeError(f"compression must be a compressor such as hvd_compress.IWP, got {compression!r:.80}")
        if isinstance(period, Optimizer):
            raise TypeError("several optimizers are given as a list: LocalSteps(compression, [first, second], period)")
        fragments = check_integer("fragments", fragments, 1)
        delay = check_integer("delay", delay, 0)
        if unsent not in ("weights", "buffer"):
            raise ValueError(f"unsent must be weights or buffer, got {unsent!r}")
        decay = check_number("decay", decay, at_least=0, at_most=1)
        if decay != 1.0 and unsent == "weights":
            raise ValueError('decay is of the error-feedback buffer: it goes with unsent="buffer"')
        if on_averaged_gradients and unsent == "weights":
            raise ValueError('what was not sent of gradients is no part of weights: use unsent="buffer"')
        outer_lr = check_number("outer_lr", outer_lr, above=0)
        outer_momentum = check_number("outer_momentum", outer_momentum, at_least=0, below=1)
        restore_length = check_flag("restore_length", restore_length)
        self.compression, engine = compression, compression.engine
        check_compressor(engine, compression.grad_scaler is not None, unsent, restore_length, delay)
        check_own_gradients(engine, compression.model)
        settings = Settings(unsent, decay, outer_lr, outer_momentum, restore_length, fragments, delay)
        watches = check_flag("watch_weights", watch_weights)
        optimizers = optimizer, on_averaged_gradients
        self._rounds = Rounds(engine, settings, period, optimizers, compression.model, watches)
        compression.bind(self._rounds)

    @modes_off
    def step(self) -> bool:
        """Call it after each ``optimizer.step()`` or ``scaler.step(optimizer)``, also if the scaler skips that step; of
        several optimizers, once, after all of them. All ranks must call it equally often: the others wait.

        Every ``period / fragments``-th call begins an exchange, which ends in the same call or ``delay`` calls later.
        Returns whether one has ended in this call. Without a ``delay`` the parameters hold differences until then: a
        signal handler must not save them.
        """
        return self._rounds.count()

    @modes_off
    def join(self) -> None:
        """Takes part, with a torchft ``Manager``, in a round of the others without progress, and returns with their
        weights. Call it once before training, after a state was loaded. A peer that does not join drops the progress of
        its first period. Without a manager it does nothing.

        Raises:
            RuntimeError: on all ranks, options that differ; rounds that failed more than the manager's ``max_retries``.
        """
        self._rounds.join()

    @property
    def stepped(self) -> bool:
        """Whether one of the optimizers has stepped since the last :meth:`step`."""
        return self._rounds.stepped

    @property
    def moved(self) -> bool:
        """Whether the ranks' weights may differ: since :meth:`finish` or :meth:`take_weights` an optimizer has stepped,
        :meth:`step` was called, or a state was loaded."""
        return self._rounds.moved

    @property
    def period(self) -> int:
        """Calls of :meth:`step` between two exchanges of a weight. It can be set, on all ranks at the same place, for
        example to let it grow as the learning rate falls (Gu et al., *A Quadratic Synchronization Rule for Distributed
        Deep Learning*, ICLR 2024): ``local.period = max(3, int((0.01 / lr) ** 2))``. A state does not have it: set it
        again after loading one. Setting raises as the constructor."""
        return self._rounds.turns.period

    @period.setter
    def period(self, period: int) -> None:
        self._rounds.turns.change(period)

    @modes_off
    def finish(self, model: torch.nn.Module | None = None, *, moved_only: bool = False) -> None:
        """Averages all parameters over the ranks, without compression, before testing or saving; training may go on.
        An exchange in flight is completed first.

        With ``unsent="weights"`` nothing unsent is left afterwards; a ``"buffer"`` is kept. The outer optimizer takes
        no part. All ranks must call it.

        Args:
            model: its buffers become the same on all ranks, too: the running averages of BatchNorm and InstanceNorm
                modules are averaged, all others become rank 0's, as in DistributedDataParallel. Of a model sharded by
                FSDP2, also within the shard group. Without it, buffers stay each rank's own.
            moved_only: averages no weights if no rank's optimizers have stepped since the last call.

        Raises:
            ValueError: a model without parameters of the compressor; a buffer without values, or a quantized one.
            RuntimeError: on all ranks, some of them are in other calls, or buffers have other shapes on some.
        """
        self._rounds.finish(model, check_flag("moved_only", moved_only))

    @modes_off
    def end(self, model: torch.nn.Module | None = None) -> None:
        """Ends the training by local steps: calls :meth:`finish`, and makes the optimizers' states rank 0's, since each
        rank has moments of its own. Then model and optimizers can be trained in any other way, and
        DistributedDataParallel averages the gradients that ``local_gradients()`` had left to the ranks.

        All ranks must call it. :meth:`step` raises an error from then on; :meth:`state_dict` does not. Does nothing
        when called again, or after :meth:`close`. With a torchft ``Manager`` the optimizers' states stay each peer's
        own.

        Args:
            model: see :meth:`finish`, which may raise an error. The local steps have not ended then.
        """
        self._rounds.end(model)

    @modes_off
    def close(self) -> None:
        """Ends the training by local steps without any message, on this rank: after an error or an interrupt, where the
        others may not come. Weights and optimizers stay as they are, each rank's own; nothing in flight is applied."""
        self._rounds.close()

    @modes_off
    def take_weights(self) -> None:
        """Makes the parameters, as they are now, the common weights. Call it on all ranks after the parameters were
        replaced in training: by ``model.load_state_dict()``, an EMA switch, a roll-back, averaged weights (SWA), a
        merge of adapters. Without it the replacement would count as progress of the local steps; a change that is
        noticed raises an error.

        Progress in flight is not applied, and neither residuals nor outer momentum are kept. The optimizers' states
        stay. Not needed after ``load_state_dict()`` of this object or of its compressor.

        Raises:
            ValueError: the model has other parameters now.
            RuntimeError: on all ranks, their parameters differ, or some of them are in other calls.
        """
        self._rounds.take_weights()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of :meth:`the compressor <hvd_compress.Compressor.state_dict>`, which contains the state of
        this object.

        With a ``delay`` it waits for what is in flight, which is saved with it and applied when it is time: all ranks
        must call it, and :meth:`load_state_dict`, at the same place.
        """
        return self.compression.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` has returned. Raises ``ValueError`` if it does not fit."""
        self.compression.load_state_dict(state)
