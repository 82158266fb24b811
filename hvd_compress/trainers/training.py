"""One training: the same calls for local steps and for a compressor of each step."""

import weakref
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ..carriers import one_rank_without_host, world
from ..checkpoints.convert import reshard
from ..engine.membership import Membership
from ..engine.shards import is_sharded
from ..engine.wrappers import unwrapped
from ..hosts.ddp import ddp_hook
from ..hosts.fsdp import register_fsdp_hooks
from ..hosts.gradient_hook import use_hook
from ..local.steps import LocalSteps
from ..methods.base import Compressor
from . import rank_state

#: A compressor class, or a function of the model, the optimizers and options.
Build = Callable[..., LocalSteps | Compressor]


class Training:
    """A training by local steps, or by a compressor of each step's gradients: the part that all trainers share.

    Args:
        build: a recipe of :mod:`hvd_compress.recipes`; a compressor class such as :class:`hvd_compress.DeMo`, called as
            ``build(model, **options)``, with the ``grad_scaler`` that the trainer uses; or a function, called as
            ``build(model, optimizers, **options)``, that returns :class:`~hvd_compress.LocalSteps` or a compressor.
        options: of ``build``.

    Raises:
        TypeError: ``build`` cannot be called, or, in :meth:`begin`, returns neither local steps nor a compressor.
        RuntimeError: in :meth:`begin`, the model of a compressor is in neither DDP nor FSDP2.
        FileNotFoundError: on resuming, on all ranks, the checkpoint has no files of the ranks.
        ValueError: on resuming, the states do not fit, or the checkpoint has none.
    """

    def __init__(self, build: Build, options: dict[str, Any]) -> None:
        if not callable(build):
            raise TypeError(
                "the first argument builds the method: a recipe such as hvd_compress.recipes.low_bit, a compressor "
                f"class, or a function build(model, optimizers); got {build!r:.80}"
            )
        self._build, self._options = build, options
        self._built: LocalSteps | Compressor | None = None
        self._model = torch.nn.Module()
        self._optimizers: list[Optimizer] = []
        self._scaler: Any = None
        #: The functions that :meth:`close` calls: among them, one lets DDP or FSDP2 average the gradients again.
        self.ends: list[Callable[[], None]] = []

    @property
    def begun(self) -> bool:
        return self._built is not None

    @property
    def local(self) -> LocalSteps | None:
        return self._built if isinstance(self._built, LocalSteps) else None

    @property
    def compression(self) -> Compressor:
        """As :attr:`Trained.compression`."""
        if self._built is None:
            raise RuntimeError("the compressor is built when the training begins")
        return self._built.compression if isinstance(self._built, LocalSteps) else self._built

    def begin(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: Any = None,
        lasts: Callable[[], bool] = lambda: True,
        wrapped: torch.nn.Module | None = None,
    ) -> None:
        """Builds the method, after the model is on its device, and wrapped, and the checkpoint is loaded. Closes the
        training that the model was in.

        Args:
            model: without wrappers.
            optimizers: all of them; wrappers are removed.
            scaler: the ``GradScaler`` in use, if any.
            lasts: whether the training still runs, for trainers that do not report an exception. If not, DDP's next
                forward pass ends it.
            wrapped: the model in its wrappers, if the trainer tells. Otherwise DDP's are looked for in the process.
        """
        for training in [self, *_begun]:
            if training is self or training._model is model:
                training.close()
        self._model, self._scaler = model, scaler
        self._optimizers = [unwrapped(optimizer) for optimizer in optimizers]
        built: Any
        build, context = self._build, copy_context()
        context.run(one_rank_without_host.set, True)
        if isinstance(build, type) and issubclass(build, Compressor):
            scaled = {} if scaler is None else {"grad_scaler": scaler}
            built = context.run(build, model, **{**scaled, **self._options})
        else:
            built = context.run(build, model, self._optimizers, **self._options)
        if not isinstance(built, LocalSteps | Compressor):
            raise TypeError(
                f"build(model, optimizers) must return hvd_compress.LocalSteps or a compressor, got {built!r:.80}"
            )
        self._built = built
        _begun.add(self)

        def runs() -> bool:  # keeps the training: a dropped one would end when each rank's garbage collector runs
            if not lasts():
                self.end()
            return bool(self.ends)

        whole = model if wrapped is None else wrapped  # a compiled one around DDP has no truth value
        if isinstance(built, LocalSteps):
            self.ends = use_hook(whole, None, runs)
        elif any(map(is_sharded, built.engine.parameters)):
            self.ends = [register_fsdp_hooks(model, built).remove]
        else:
            self.ends = use_hook(whole, partial(ddp_hook, built), runs)
            momentum = built.traits.momentum or built.traits.fixed_size
            if not self.ends and (world.place()[1] > 1 or momentum):
                raise RuntimeError(
                    "nothing averages the gradients: a compressor needs the model in DistributedDataParallel or FSDP2 "
                    "(fully_shard()), with momentum or signs also in one process; local steps need neither"
                )

    def end(self, optimizers: bool = True) -> None:
        """Gives all ranks the average of their weights, and closes. All ranks must call it. ``optimizers``: whether
        they are used again: then all ranks get rank 0's states. Otherwise each rank can still save its own."""
        if self.local is not None and not optimizers:
            self.local.finish(self._model, moved_only=True)
        elif self.local is not None:
            self.local.end(self._model)
            if self._scaler is not None:  # each rank's own, too
                self._scaler.load_state_dict(world.gather(self._scaler.state_dict())[0])
        self.close()

    def close(self) -> None:
        """Lets DDP or FSDP2 average the gradients again, unless another training of the model has begun since; other
        optimizers may step it. The state can still be saved. Does nothing before ``begin()``. Waits for no rank."""
        if isinstance(self._built, LocalSteps):
            self._built.close()
        elif self._built is not None:
            self._built.engine.optimizers.release()
        ends, self.ends = self.ends, []
        for end in ends:
            end()

    @property
    def stepped(self) -> bool:
        """Whether an optimizer has taken a local step since the last :meth:`count_step`."""
        return self.local is not None and self.local.stepped

    def count_step(self) -> bool:
        """Call it after all optimizers have stepped, or a scaler has skipped. Returns whether a round has ended."""
        return self.local is not None and self.local.step()

    def average(self) -> None:
        """Gives all ranks the average of their weights, if the weights of any rank may have changed since the last one.
        Raises ``RuntimeError`` with a torchft ``Manager``."""
        if self.local is None:
            return
        if isinstance(self.local.compression.engine.collectives, Membership):
            raise RuntimeError(
                "with a torchft.Manager there is no average between rounds, and finish() would drop the progress since "
                "the last: test the model after a call of step() that has returned True (callbacks: average=False)"
            )
        self.local.finish(self._model, moved_only=True)

    def weights_replaced(self) -> None:
        """Call it after the weights were replaced in the model, by the same ones on all ranks."""
        if self.local is not None:
            self.local.take_weights()

    def state(self) -> dict[str, Any]:
        """The state that this rank saves beside the trainer's checkpoint. All ranks must call it."""
        own = {"compression": self.compression.state_dict()}
        if self.local is not None:
            own["rank"] = rank_state.save(self._model, self._optimizers, self._scaler)
        return own

    def load(self, ranks: int, read: Callable[[int], dict[str, Any]]) -> None:
        """Resumes, after the trainer has: bit-exactly on equally many ranks. On other numbers of ranks, residuals
        become their mean (:func:`hvd_compress.reshard`), and model and optimizers are those of the trainer's
        checkpoint, rank 0's; the saved weights must be equal. ``ranks``: that saved. ``read``: returns the
        :meth:`state` of one of them."""
        rank, size = world.place()
        if ranks != size:
            self.compression.load_state_dict(reshard(read(number)["compression"] for number in range(ranks)))
            return
        state = read(rank)
        if ("rank" in state) != (self.local is not None):
            kinds = "local steps" if "rank" in state else "a compressor of each step's gradients"
            raise ValueError(f"the checkpoint was saved with {kinds}: resume with the method that saved it")
        if self.local is not None:
            rank_state.load(state["rank"], self._model, self._optimizers, self._scaler)
        self.compression.load_state_dict(state["compression"])


class Trained:
    """The part that the classes of all trainers share."""

    training: Training

    @property
    def compression(self) -> Compressor:
        """The compressor. Raises ``RuntimeError`` before the training has begun."""
        return self.training.compression

    def take_weights(self) -> None:
        """Call it on all ranks after the weights were replaced in training (in Lightning, within an epoch), equally on
        all ranks: :meth:`hvd_compress.LocalSteps.take_weights`. Does nothing with a compressor of each step's
        gradients."""
        self.training.weights_replaced()


#: All trainings of this process that have begun.
_begun = weakref.WeakSet[Training]()
