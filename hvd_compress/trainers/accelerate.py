"""Hugging Face Accelerate."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.optim import Optimizer

from . import rank_files
from .training import Build, Trained, Training


class AccelerateLoop(Trained):
    """Local steps, or compressed gradients, in a loop of Accelerate.

    ``accelerator.save_state()`` and ``load_state()`` write and read a file of every rank beside their own files, with
    which a training resumes bit-exactly, also between two exchanges. Several loops, of different models, have files of
    their own, in the order in which they were built. The model in the folder is rank 0's own: call :meth:`finish`
    before saving one for others.

    Example::

        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        loop = hvd_compress.trainers.AccelerateLoop(hvd_compress.recipes.low_bit, accelerator, model, optimizer)
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(inputs), targets))
                optimizer.step()
                loop.step()
                optimizer.zero_grad()
        loop.end()  # on all ranks; within the training, finish() before testing the model

    Args:
        build, options: see :class:`~hvd_compress.trainers.training.Training`, also for errors.
        accelerator: whose ``prepare()`` was called.
        model: as prepared.
        optimizers: the prepared optimizer, or a list of several, of different parameters.
    """

    def __init__(
        self,
        build: Build,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        **options: Any,
    ) -> None:
        self.training, self._accelerator = Training(build, options), accelerator
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        plain = accelerator.unwrap_model(model, keep_torch_compile=False)
        self.training.begin(plain, given, accelerator.scaler, wrapped=model)
        checkpoint, objects = _Checkpoint(self.training, accelerator), accelerator._custom_objects
        accelerator.register_for_checkpointing(checkpoint)
        self.training.ends.extend(
            [
                accelerator.register_save_state_pre_hook(checkpoint.save).remove,
                accelerator.register_load_state_pre_hook(checkpoint.begin_loading).remove,
                lambda: objects.remove(checkpoint),
            ]
        )

    def step(self) -> bool:
        """Call it after each ``optimizer.step()``; with several optimizers, once, after all of them. Does nothing while
        gradients are accumulated. Returns whether a round has ended."""
        return self._accelerator.sync_gradients and self.training.count_step()

    def finish(self) -> None:
        """Gives all ranks the average of their weights, before testing; training may go on. All ranks must call it.
        Does nothing with a compressor of each step's gradients. Raises ``RuntimeError`` with a torchft ``Manager``."""
        self.training.average()

    def end(self) -> None:
        """Call it on all ranks after the last step: as :meth:`finish`, and all ranks get rank 0's optimizer states.
        Then DDP averages gradients again, other optimizers may step the model, and ``save_state()`` writes no file."""
        self.training.end()

    def metrics(self) -> dict[str, float]:
        """:meth:`hvd_compress.Compressor.metrics`, for ``accelerator.log(loop.metrics(), step)``."""
        return self.compression.metrics()


class _Checkpoint:
    """An object of ``register_for_checkpointing()``. Accelerate loads it last, and does not tell it the folder."""

    def __init__(self, training: Training, accelerator: Accelerator) -> None:
        self._training, self._folder, self._accelerator = training, "", accelerator

    @property
    def _number(self) -> int:
        """The place of the loop among those of the accelerator, which loads as many objects as it has saved."""
        return [other for other in self._accelerator._custom_objects if isinstance(other, _Checkpoint)].index(self)

    def save(self, models: Any, weights: Any, folder: str) -> None:
        rank_files.save(self._training, folder, self._number)

    def begin_loading(self, models: Any, folder: str) -> None:
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rank_files.load(self._training, self._folder, self._number)
