"""Hugging Face transformers."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..carriers import world
from ..engine.arguments import check_flag
from ..methods.base import Compressor
from . import rank_files
from .training import Build, Training


class TransformersCallback(TrainerCallback):
    """Trains a model of transformers' ``Trainer`` by local steps, or with compressed gradients.

    After each optimizer step, with accumulation after its last backward pass, it takes a local step. At the end of the
    training all ranks have the average of their weights, unless the Trainer loads its best model, and DDP averages the
    gradients again. With ``load_best_model_at_end``, save when you evaluate, so that the saved model is the evaluated
    one.

    The checkpoint folders of the Trainer get a file of every rank, with which ``resume_from_checkpoint`` resumes
    bit-exactly, also between two exchanges. The model in these folders is rank 0's own, unless it was averaged in the
    same step. With ``save_only_model`` nothing is added. :meth:`hvd_compress.Compressor.metrics` is in what the Trainer
    logs with the loss.

    Example::

        callback = hvd_compress.trainers.TransformersCallback(hvd_compress.recipes.low_bit, period=3)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()

    Args:
        build: a recipe of :mod:`hvd_compress.recipes`, a compressor class such as :class:`hvd_compress.DeMo`, or a
            function ``build(model, optimizers, **options)`` that returns :class:`~hvd_compress.LocalSteps` or a
            compressor. The Trainer has one optimizer: :class:`~hvd_compress.trainers.CombinedOptimizer` makes one of
            several.
        average: whether local steps average the weights before each evaluation, which sends what one step of dense
            training sends. False: each rank evaluates its own weights, on its part of the data.
        checkpoint: the folder that the Trainer resumes from, if it is not in its ``output_dir``.
        options: of ``build``.

    Raises:
        TypeError: see ``build``.
        FileNotFoundError: on resuming, on all ranks, the checkpoint has no files of the ranks.
        ValueError: on resuming, they do not fit.
        RuntimeError: the model of a compressor is in neither DDP nor FSDP2.
    """

    def __init__(
        self, build: Build, *, average: bool = True, checkpoint: str | Path | None = None, **options: Any
    ) -> None:
        self.training = Training(build, options)
        self._average, self._checkpoint = check_flag("average", average), checkpoint

    @property
    def compression(self) -> Compressor:
        """The compressor. Raises ``RuntimeError`` before the training has begun."""
        return self.training.compression

    def take_weights(self) -> None:
        """Call it on all ranks after the weights were replaced in training: see
        :meth:`hvd_compress.LocalSteps.take_weights`. With a compressor of each step's gradients it does nothing."""
        self.training.weights_replaced()

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
        self.on_step_end(args, state, control)

    def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        logs = others["logs"]
        if "loss" in logs and self.training.begun and world.place()[0] == 0:
            metrics = self.training.metrics()
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
        """Until the training ends: whoever asks for an evaluation or a prediction, all ranks take part in it."""
        evaluate = trainer.evaluation_loop

        def evaluation_loop(*args: Any, **options: Any) -> Any:
            self.training.average()
            return evaluate(*args, **options)

        trainer.evaluation_loop = evaluation_loop
        self.training.ends.append(lambda: vars(trainer).pop("evaluation_loop"))


def _move_before_loggers(callbacks: list[Any], own: TransformersCallback) -> None:
    """The Trainer calls its loggers before the callbacks that it is given, which have something to log; and its own
    first callback decides whether to stop."""
    if sum(isinstance(callback, TransformersCallback) for callback in callbacks) > 1:
        raise ValueError("the Trainer has two TransformersCallbacks: remove one, trainer.remove_callback(callback)")
    callbacks.remove(own)
    callbacks.insert(1, own)


def _calling_trainer() -> Any:
    """The Trainer that calls its callbacks, to which it gives everything but itself."""
    frame = sys._getframe()
    while not isinstance(caller := frame.f_locals.get("self"), Trainer):
        if frame.f_back is None:
            raise TypeError("TransformersCallback is for transformers.Trainer: for other loops there is AccelerateLoop")
        frame = frame.f_back
    return caller


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")
