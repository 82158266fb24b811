"""Moments of values."""

import torch
from torch import Tensor

from .. import ops
from ..reference.scales import kind_of, root_mean_square


class Moments:
    """Per group of values: count, root mean square, kind of distribution and largest magnitude."""

    def __init__(self, values: Tensor, edges: Tensor) -> None:
        table = torch.empty(len(edges) - 1, 3, dtype=torch.float64, device=values.device)
        ops.moments(values, edges, table)
        self.count = edges.diff()
        self.square, fourth, self.peak = table.unbind(1)
        self.rms = root_mean_square(self.square, self.count)
        #: 0 if the values look Gaussian, 1 if Laplacian: int64, a row of a codebook.
        self.kind = kind_of(self.square, fourth, self.count)
