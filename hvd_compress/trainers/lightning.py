"""Lightning."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from ..carriers import world
from ..engine.arguments import check_flag
from .replaced import average_replaced, hash_of_weights
from .training import Build, Trained, Training


class LightningCallback(Trained, Callback):
    """Trains any ``LightningModule`` by local steps, or with compressed gradients, under ``DDPStrategy`` or
    ``ModelParallelStrategy`` (FSDP2).

    After each batch in which an optimizer has stepped, it takes a local step, also with manual optimization. When the
    fit ends, all ranks have the average of their weights, and DDP or FSDP2 averages the gradients again. If another
    callback, such as Lightning's ``EMAWeightAveraging``, replaces the weights for a validation, between epochs or at
    the end, they are averaged over the ranks; within an epoch, call :meth:`take_weights`.

    Lightning's checkpoints contain the states of all ranks, with which ``fit(ckpt_path=...)`` resumes bit-exactly, also
    between two exchanges, except for random numbers (dropout), which Lightning does not save. Rank 0 gathers the
    states, with local steps a model and its optimizers of every rank; with NCCL they pass through its GPU memory. The
    model itself is the average if it is saved after a validation (``every_n_epochs``), and rank 0's own if it is saved
    within an epoch: ``every_n_train_steps`` saves before Lightning validates. :meth:`hvd_compress.Compressor.metrics`
    is logged every ``log_every_n_steps``.

    With ``ModelParallelStrategy`` the compressor needs the group of the replicas, which exists when it is built::

        def build(module, optimizers):
            return hvd_compress.recipes.low_bit(module, optimizers, process_group=module.mesh.get_group("replicate"))

    Example::

        callback = hvd_compress.trainers.LightningCallback(hvd_compress.recipes.low_bit, period=3)
        trainer = lightning.Trainer(strategy="ddp", callbacks=[callback])
        trainer.fit(module, batches)

    Args:
        build, options: see :class:`~hvd_compress.trainers.training.Training`, also for errors. With automatic
            optimization a module has one optimizer: :class:`~hvd_compress.trainers.CombinedOptimizer` makes one of
            several.
        average: whether local steps average the weights before each validation, which sends as much as one step of
            dense training. False: each rank validates its own weights, on its part of the data.
    """

    def __init__(self, build: Build, *, average: bool = True, **options: Any) -> None:
        self.training = Training(build, options)
        self._average = check_flag("average", average)
        self._states: list[dict[str, Any]] = []
        self._step = 0
        self._fitting = False
        #: Whether the first batch of a validation is still to come.
        self._validating = False
        #: A hash of the weights at the end of an epoch, until the next one has begun.
        self._weights: int | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called before a checkpoint is loaded. Moves this callback before those that replace the weights (EMA), and
        after those that train on trial."""
        self._states, self._fitting = [], stage == "fit"
        if trainer is not None and self in trainer.callbacks:
            trainer.callbacks.remove(self)
            tuners = sum(isinstance(callback, BatchSizeFinder | LearningRateFinder) for callback in trainer.callbacks)
            trainer.callbacks.insert(tuners, self)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.training.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.training.close()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.training.begin(pl_module, trainer.optimizers, scaler, wrapped=trainer.model)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called after Lightning has loaded the optimizers: ModelParallelStrategy does that after ``on_fit_start``."""
        if self._states:
            self.training.load(len(self._states), self._states.__getitem__)
        self._states, self._step, self._weights = [], trainer.global_step, None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._count(trainer)  # the module's own on_train_batch_end() comes after this callback's
        self._take_replaced(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validating = self._average and trainer.state.fn == "fit" and not trainer.sanity_checking
        if self._validating:
            self._count(trainer)
            self.training.average()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Called after the callbacks that replace the weights for a validation."""
        if self._validating and self.training.local is not None:
            average_replaced(pl_module, self.compression.engine)
        self._validating = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Averages the weights before checkpoints are saved: the last one should have the averaged model."""
        self._count(trainer)
        steps, epochs = trainer.max_steps, trainer.max_epochs
        last = 0 <= steps <= trainer.global_step or (epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
        if last or trainer.should_stop:
            self.training.average()
        if self.training.local is not None:
            self._weights = hash_of_weights(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._take_replaced(pl_module)
        self.training.end(optimizers=False)  # the next fit makes new ones

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self.training.local is not None:
            average_replaced(pl_module, self.compression.engine)

    def _take_replaced(self, pl_module: Any) -> None:
        """Takes weights that others replaced between two epochs, as StochasticWeightAveraging does with BatchNorm."""
        before, self._weights = self._weights, None
        if before is not None and any(world.gather(hash_of_weights(pl_module) != before)):
            average_replaced(pl_module, self.compression.engine)
            self.training.weights_replaced()

    def _count(self, trainer: Any) -> None:
        """Takes a local step if an optimizer has stepped, or a scaler has skipped its step."""
        step, self._step = self._step, trainer.global_step
        if self._step == step and not self.training.stepped:  # gradients are accumulated
            return
        self.training.count_step()
        self._weights = None  # of another step
        if trainer.loggers and self._step != step and self._step % trainer.log_every_n_steps == 0:
            metrics = self.compression.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(metrics, self._step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all ranks, on rank 0. All ranks must call it."""
        if not self.training.begun or self._states:  # a fit without a step left
            return {"states": self._states}
        return {"states": world.gather_to_first(self.training.state())}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._fitting and self.state_key not in checkpoint.get("callbacks", {}):
            raise ValueError(
                f"the checkpoint has no states of {self.state_key}, and was saved by a training without it: load its "
                "weights into the module, and call fit() without ckpt_path"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the states until the training begins. ``validate()``, ``test()`` and ``predict()`` need none."""
        if self._fitting:
            self._states = state_dict.get("states", [])
