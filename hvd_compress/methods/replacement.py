"""DeMo's replacement of the averages of compressed parameters: their signs, or the nearest orthogonal matrices."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..engine.arguments import NamedParameters, find_name, named_pairs
from ..engine.bucket import Bucket
from ..guards.scaled_signs import ScaledSigns
from ..selection.base import signs
from .matrices import embeddings
from .orthogonal import orthogonalize


class Replacement:
    """Replaces one compressor's averages by signs; of the parameters with these ``names``, by orthogonal matrices."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.received = ScaledSigns("signs or orthogonal matrices" if names else "signs")

    def write(self, bucket: Bucket, averages: list[Tensor], scale: float) -> None:
        """Writes the replaced averages of a bucket, by piece, to its gradients, times the loss scale."""
        for piece, average, grad in zip(bucket.pieces, averages, bucket.gradients, strict=True):
            if not grad.numel():  # none arrived
                continue
            if piece.name in self.names:
                orthogonalize(average, scale)
            else:
                average.copy_(signs(average) * scale)
            if grad is not average:
                grad.copy_(average)
            self.received.written(piece.name, grad)


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
