"""Callbacks for trainers: local steps, or a compressor of each step's gradients. With Accelerate, whose loop is the
user's, an object with calls for that loop.

Each takes what builds the method, and its options::

    TransformersCallback(hvd_compress.recipes.low_bit, period=3)    # callbacks=[...] of transformers' Trainer
    LightningCallback(hvd_compress.recipes.low_bit, period=3)       # callbacks=[...] of Lightning's Trainer
    AccelerateLoop(hvd_compress.recipes.low_bit, accelerator, model, optimizer, period=3)

The first argument is a recipe of :mod:`hvd_compress.recipes`, a compressor class such as :class:`hvd_compress.DeMo`,
or a function ``build(model, optimizers, **options)`` that returns :class:`~hvd_compress.LocalSteps` or a compressor.

The trainers' packages are imported with the first use of these names.
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
