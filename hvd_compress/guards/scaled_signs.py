"""Signs or orthogonal matrices that somebody clips or scales between the exchange and the optimizer's step.

People: clip DeMo's gradients by their norm, or use a `GradScaler` that the compressor does not have.
Cost: the learning rate is another one; what is applied has one size in every step, so nothing else is clipped.
Noticed: the largest entry that the optimizer receives in its first step is compared with that after the exchange.
Message: `the gradients were … after the exchange` …
Cure: no clipping with DeMo; `grad_scaler=` of the compressor
"""

import math

from torch import Tensor

from ..engine.engine import Engine
from ..engine.shards import local


class ScaledSigns:
    """Compares what the optimizer receives with what was written.

    Args:
        what: was written, for the warning.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # By name, the largest entry of each gradient that was written; None once a step has shown that the optimizer
        # receives what was written.
        self._largest: dict[str, Tensor] | None = {}

    def written(self, name: str, grad: Tensor) -> None:
        """Called with a gradient of which the size may not be 1."""
        if self._largest is not None:
            self._largest[name] = grad.abs().amax()

    def check(self, engine: Engine) -> None:
        """Called before an optimizer's step. Warns if somebody has scaled the gradients since the exchange. Waits for a
        GPU, until one step has shown what the optimizer receives."""
        if self._largest is None:
            return
        scale = engine.dense.scale
        own = (work.bucket for work in engine.works if work.bucket.owner == engine.nodes.rank)
        pieces = (piece for bucket in own for piece in bucket.pieces)
        grads = [grad for piece in pieces if (grad := piece.parameter.grad) is not None]
        # Horovod makes gradients sparse again that were with sparse_as_dense.
        dense = (grad.to_dense() if grad.is_sparse else local(grad) for grad in grads)
        largest = max((float(grad.abs().max()) for grad in dense), default=0.0)
        if not math.isfinite(largest) or not largest:
            return
        written, self._largest = max(map(float, self._largest.values()), default=scale), None
        # A GradScaler may have divided them by its scale.
        if not any(math.isclose(largest, written / factor, rel_tol=1e-3) for factor in (1.0, scale)):
            engine.warn(
                f"the gradients were {self._what} after the exchange, and their largest entry is {largest:.3g} now, "
                f"not {written / scale:.3g}: do not clip or scale them, which only changes the learning rate, and "
                "give a GradScaler to the compressor (grad_scaler=)"
            )
