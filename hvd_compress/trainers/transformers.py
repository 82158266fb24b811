"""Hugging Face transformers."""

import sys
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..carriers import world
from ..engine.arguments import check_flag
from . import rank_files
from .training import Build, Trained, Training


class TransformersCallback(Trained, TrainerCallback):
    """Trains a model of transformers' ``Trainer`` by local steps, or with compressed gradients.

    After each optimizer step (with accumulation, after the last backward pass) it takes a local step. At the end of the
    training all ranks have the average of their weights, unless the Trainer loads its best model, and DDP averages the
    gradients again. With ``load_best_model_at_end``, save when you evaluate, so that the saved model is the evaluated
    one.

    The checkpoint folders of the Trainer get a file of every rank, with which ``resume_from_checkpoint`` resumes
    bit-exactly, also between two exchanges. The model in these folders is rank 0's own, unless it was averaged in the
    same step. With ``save_only_model`` nothing is added. The Trainer logs :meth:`hvd_compress.Compressor.metrics` with
    the loss.

    Example::

        callback = hvd_compress.trainers.TransformersCallback(hvd_compress.recipes.low_bit, period=3)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()

    Args:
        build, options: see :class:`~hvd_compress.trainers.training.Training`, also for errors. The Trainer has one
            optimizer: :class:`~hvd_compress.trainers.CombinedOptimizer` makes one of several.
        average: whether local steps average the weights before each evaluation, which sends as much as one step of
            dense training. False: each rank evaluates its own weights, on its part of the data.
        checkpoint: the folder that the Trainer resumes from, if it is not in its ``output_dir``.
    """

    def __init__(
        self, build: Build, *, average: bool = True, checkpoint: str | Path | None = None, **options: Any
    ) -> None:
        self.training = Training(build, options)
        self._average, self._checkpoint = check_flag("average", average), checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = _calling_trainer()
        handler = trainer.callback_handler
        _move_before_loggers(handler.callbacks, self)
        model: torch.nn.Module = others["model"]
        optimizer = others["optimizer"]
        self.training.begin(
            model,
            [optimizer],
            getattr(optimizer, "scaler", None),
            lambda: any(callback is self for callback in handler.callbacks),
            trainer.model_wrapped,
        )
        if self._average:
            self._average_before_evaluations(trainer)
        if state.global_step:
            rank_files.load(self.training, self._checkpoint or _folder(args, state))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.training.count_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if control.should_training_stop:
            self.training.average()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.on_step_end(args, state, control, **others)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = others["logs"]
        if "loss" in logs and self.training.begun and world.place()[0] == 0:
            metrics = self.compression.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not args.save_only_model:
            rank_files.save(self.training, _folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.training.weights_replaced()
        self.training.end()

    def _average_before_evaluations(self, trainer: Any) -> None:
        """Averages the weights before each evaluation or prediction of the training, on all ranks."""
        evaluate = trainer.evaluation_loop

        def evaluation_loop(*args: Any, **options: Any) -> Any:
            self.training.average()
            return evaluate(*args, **options)

        trainer.evaluation_loop = evaluation_loop
        self.training.ends.append(lambda: vars(trainer).pop("evaluation_loop"))


def _move_before_loggers(callbacks: list[Any], own: TransformersCallback) -> None:
    """Moves ``own`` before the loggers, which log its metrics, and after the Trainer's own callback, which may stop."""
    if sum(isinstance(callback, TransformersCallback) for callback in callbacks) > 1:
        raise ValueError("the Trainer has two TransformersCallbacks: remove one, trainer.remove_callback(callback)")
    callbacks.remove(own)
    callbacks.insert(1, own)


def _calling_trainer() -> Any:
    """The Trainer that calls its callbacks, to which it gives everything but itself."""
    for frame, _ in walk_stack(sys._getframe()):
        if isinstance(caller := frame.f_locals.get("self"), Trainer):
            return caller
    raise TypeError("TransformersCallback is for transformers.Trainer: for other loops there is AccelerateLoop")


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
