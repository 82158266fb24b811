"""Dense averages, in the place of a method."""

from typing import Any, NoReturn

from torch import Tensor

from ..engine.arguments import NamedParameters
from ..engine.bucket import Bucket
from .base import Compressor


class NoCompression(Compressor):
    r"""No compression: every gradient is averaged whole.

    A baseline with the statistics, checks and checkpoints of the other methods; a switch for compression in a script;
    with :class:`~hvd_compress.LocalSteps`, plain local SGD and DiLoCo. On rank i of N, with gradient g_i::

        g = 1/N sum_i g_i                         values="fp32"
        g = s/N sum_i float16(g_i / s)            values="fp16"; s: the loss scale with grad_scaler=, otherwise 1

    Each gradient is an allreduce of Horovod's optimizer, which fuses them; under DistributedDataParallel, each of its
    buckets is one, or on Gloo a reduce-scatter and an allgather. Nothing is kept from step to step. A gradient that is
    not finite reaches all ranks; with float16, so does one of which an entry, or the sum of an entry over the ranks,
    exceeds 65504.

    Example::

        compression = hvd_compress.NoCompression(model)
        local = hvd_compress.LocalSteps(compression, optimizer, period=8)  # local SGD
        local.step()  # after each optimizer.step()
        local.finish(model)  # on all ranks, before testing

    Args:
        values: ``"fp32"``, or ``"fp16"`` to send float32 and bfloat16 gradients in float16, rounded. Gradients of
            other dtypes are sent as they are, with ``"fp32"`` bfloat16 ones in float32, complex ones as pairs.

    Other arguments, and errors: see :class:`~hvd_compress.Compressor`. ``seed``, ``min_numel`` and ``bucket_mb`` have
    no effect; ``dense_values`` raises ``TypeError``.
    """

    def __init__(self, named_parameters: NamedParameters, *, values: str = "fp32", **common: Any) -> None:
        if values not in ("fp16", "fp32"):
            raise ValueError(f"values must be fp16 or fp32, got {values!r}")
        if "dense_values" in common:
            raise TypeError("all tensors of NoCompression are sent as values= says: it has no dense_values=")
        super().__init__(named_parameters, dense_values=values, **common)
        self._values = values

    def compresses(self, parameter: Tensor) -> bool:
        return False

    def options(self) -> dict[str, object]:
        """The arguments that have an effect."""
        return {"values": self._values}

    def work(self, bucket: Bucket) -> NoReturn:
        raise NotImplementedError("no tensor is compressed")
