"""Moments of values."""

import torch
from torch import Tensor

from .. import ops
from ..reference.scales import kind_of, root_mean_square


def moments_table(edges: Tensor) -> Tensor:
    """A table for operators that write moments of these groups: float64, (groups, 3), not initialised."""
    return torch.empty(len(edges) - 1, 3, dtype=torch.float64, device=edges.device)


class Moments:
    """Per group of values: count, root mean square, kind of distribution and largest magnitude. ``table``: of the
    values, if an operator has written it."""

    def __init__(self, values: Tensor, edges: Tensor, table: Tensor | None = None) -> None:
        if table is None:
            table = moments_table(edges)
            ops.moments(values, edges, table)
        self.count = edges.diff()
        self.square, fourth, self.peak = table.unbind(1)
        self.rms = root_mean_square(self.square, self.count)
        #: 0 if the values look Gaussian, 1 if Laplacian: int64, a row of a codebook.
        self.kind = kind_of(self.square, fourth, self.count)
