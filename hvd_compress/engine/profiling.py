"""Named ranges, such as ``hvd_compress.select``, in what a user records with ``torch.profiler``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch.autograd import profiler

#: Explained in ``docs/check.md``.
Stage = Literal["accumulate", "select", "encode", "reduce", "apply", "exchange", "wait", "dense"]

_NOTHING = nullcontext()


def stage(name: Stage) -> AbstractContextManager[object]:
    """The range ``hvd_compress.<name>``. Without a running profiler it costs a look-up: record_function alone costs
    microseconds, and this is used for every gradient."""
    if getattr(profiler, "_is_profiler_enabled", True):
        return profiler.record_function(f"hvd_compress.{name}")
    return _NOTHING
