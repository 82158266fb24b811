"""Trains by local steps, or by a compressor of each step's gradients, in Hugging Face Transformers, Lightning and
Accelerate. The first two take a callback. For Accelerate, where you write the loop, an object whose methods you call in
it::

    TransformersCallback(hvd_compress.recipes.low_bit, period=3)    # callbacks=[...] of transformers' Trainer
    LightningCallback(hvd_compress.recipes.low_bit, period=3)       # callbacks=[...] of Lightning's Trainer
    AccelerateLoop(hvd_compress.recipes.low_bit, accelerator, model, optimizer, period=3)

The first argument builds the method, from the other arguments (:class:`~hvd_compress.trainers.training.Training`). The
trainers' packages are imported with the first use of these names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..hosts.gradient_hook import local_gradients
from .combined import CombinedOptimizer

if TYPE_CHECKING:
    from .accelerate import AccelerateLoop
    from .lightning import LightningCallback
    from .transformers import TransformersCallback

__all__ = ["AccelerateLoop", "CombinedOptimizer", "LightningCallback", "TransformersCallback", "local_gradients"]

_MODULES = {"AccelerateLoop": "accelerate", "LightningCallback": "lightning", "TransformersCallback": "transformers"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
