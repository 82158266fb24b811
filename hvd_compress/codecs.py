"""How values are written on the wire."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """Values as plain floats of ``dtype``, which Horovod's ring adds. What the cast loses stays in the residual.

    A value is clamped to ``limit(ranks)`` so that no sum over ``ranks`` can overflow.
    """

    name: str
    dtype: torch.dtype

    def limit(self, ranks: int) -> float:
        """The largest value of this dtype of which ``ranks`` can be added."""
        largest = torch.finfo(self.dtype).max
        limit = torch.tensor(largest / ranks, dtype=torch.float64).to(self.dtype)
        if limit.double().item() * ranks > largest:
            # The cast rounded up.
            limit = torch.nextafter(limit, torch.zeros_like(limit))
        return limit.item()


CODECS = {"fp16": Cast("fp16", torch.float16), "fp32": Cast("fp32", torch.float32)}


def codec(name: str) -> Cast:
    """The codec of that name; raises ``ValueError`` for an unknown one."""
    if name not in CODECS:
        raise ValueError(f"values must be one of {', '.join(sorted(CODECS))}, got {name!r}")
    return CODECS[name]
