"""The replacement of DeMo's averages of compressed parameters: their signs, or the nearest orthogonal matrices."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..engine.arguments import NamedParameters, find_name, named_pairs
from ..engine.bucket import Bucket
from ..engine.engine import Engine
from ..engine.shards import local
from ..engine.two_levels import owned
from ..selection.base import signs
from .matrices import embeddings
from .orthogonal import orthogonalize


class Replacement:
    """Replaces the averages of one compressor.

    ``names``: of the parameters whose averages become orthogonal; the others become signs.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        # By name, the largest entry of each gradient that was written here; None once a step has shown that the
        # optimizer receives what was written.
        self._largest: dict[str, Tensor] | None = {}

    def any_orthogonal(self, bucket: Bucket) -> bool:
        """Whether some averages of a bucket become orthogonal. Otherwise the operators write signs."""
        return any(piece.name in self.names for piece in bucket.pieces)

    def write(self, bucket: Bucket, averages: list[Tensor], scale: float) -> None:
        """Writes what replaces a bucket's averages, by piece, to its gradients, times the loss scale."""
        for piece, average, grad in zip(bucket.pieces, averages, bucket.gradients, strict=True):
            if not grad.numel():  # none arrived
                continue
            if piece.name in self.names:
                orthogonalize(average, scale)
            else:
                average.copy_(signs(average) * scale)
            if grad is not average:
                grad.copy_(average)
            if self._largest is not None:
                self._largest[piece.name] = grad.abs().amax()

    def check_received(self, engine: Engine) -> None:
        """Called before an optimizer's step. Warns if somebody has scaled the gradients since the exchange. Waits for a
        GPU, until one step has shown what the optimizer receives."""
        if self._largest is None:
            return
        scale = engine.dense.scale
        pieces = (piece for work in owned(engine.works) for piece in work.bucket.pieces)
        grads = [grad for piece in pieces if (grad := piece.parameter.grad) is not None]
        # Horovod makes gradients sparse again that were with sparse_as_dense.
        dense = (grad.to_dense() if grad.is_sparse else local(grad) for grad in grads)
        largest = max((float(grad.abs().max()) for grad in dense), default=0.0)
        if not math.isfinite(largest) or not largest:
            return
        written, self._largest = max(map(float, self._largest.values()), default=scale), None
        # A GradScaler may have divided them by its scale.
        if not any(math.isclose(largest, written / factor, rel_tol=1e-3) for factor in (1.0, scale)):
            what = "signs or orthogonal matrices" if self.names else "signs"
            engine.warn(
                f"the gradients were {what} after the exchange, and their largest entry is {largest:.3g} now, not "
                f"{written / scale:.3g}: do not clip or scale them, which only changes the learning rate, and "
                "give a GradScaler to the compressor (grad_scaler=)"
            )


def orthogonal_names(
    orthogonal: bool | str | Iterable[str], named_parameters: NamedParameters
) -> tuple[frozenset[str], list[tuple[str, torch.nn.Parameter]]]:
    """The names of the parameters with orthogonal averages, and all named parameters."""
    named = named_pairs(named_parameters, "DeMo(model)")
    names = frozenset(name for name, _ in named)
    if isinstance(orthogonal, bool):
        return names if orthogonal else frozenset(), named
    if orthogonal == "matrices":
        if not isinstance(named_parameters, torch.nn.Module):
            raise ValueError(
                'orthogonal="matrices" needs the model, to tell embeddings: give it in place of its named parameters'
            )
        tables = embeddings(named_parameters)
        return frozenset(name for name, p in named if id(p) not in tables), named
    known = isinstance(orthogonal, Iterable) and not isinstance(orthogonal, str)
    listed: list[Any] = list(orthogonal) if known else [orthogonal]
    if not known or not all(isinstance(name, str) for name in listed):
        raise TypeError(f'orthogonal must be a bool, "matrices" or a list of names, got {orthogonal!r:.80}')
    chosen = {name: find_name(name, names) for name in listed}
    if unknown := [name for name, found in chosen.items() if found is None]:
        raise ValueError(f"orthogonal names parameters that do not exist: {', '.join(sorted(unknown))}")
    return frozenset(filter(None, chosen.values())), named
