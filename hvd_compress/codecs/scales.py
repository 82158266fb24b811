"""Moments of values, and scales that are the same on all ranks and follow the values from step to step."""

from collections.abc import Generator

import torch
from torch import Tensor

from .. import ops
from ..engine.collectives import Request, allreduce
from ..engine.state import Entry, TensorLeaf, Tree
from ..reference.scales import LARGEST, SMALLEST, bounded, divided, kind_of, root_mean_square


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


class Scales:
    """The scales of a channel's groups, with the same bits on every rank.

    ``sent``: moving averages of the root mean squares of the ranks' values, float64, (groups,). ``kind``: int64,
    (groups,), 0 if the averages look Gaussian, 1 if Laplacian. ``known``: false before the first step.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self.known = False
        self.sent = torch.ones(groups, dtype=torch.float64, device=device)
        self.kind = torch.zeros(groups, dtype=torch.int64, device=device)
        self.begin_step()

    def first(self, moments: Moments, ranks: int) -> Generator[Request, Tensor, None]:
        """Gets the scales of the first step, by an allreduce."""
        mine = moments.square / moments.count.clamp(min=1)
        total = yield allreduce(torch.where(moments.count > 0, mine, 0.0), "budget", "scales")
        self.sent = bounded(divided(total, ranks).sqrt())
        self.known = True

    def begin_step(self) -> None:
        self._saved = self.known, self.sent, self.kind

    def undo_step(self) -> None:
        """Restores the scales before the step. If it has failed on some ranks only, they would differ."""
        self.known, self.sent, self.kind = self._saved

    def update_from_lanes(self, average: Tensor, edges: Tensor, header: Tensor, ranks: int) -> None:
        """Updates the scales after a step of lanes (:func:`hvd_compress.reference.lanes_update`)."""
        # New tensors, because undo_step restores the old ones.
        sent, kind = torch.empty_like(self.sent), torch.empty_like(self.kind)
        ops.lanes_update(average, edges, self.sent, self.kind, header, sent, kind, ranks)
        self.sent, self.kind = sent, kind

    def state(self) -> Tree:
        """The saved state, with ranges, since the operators do not check scales."""
        return {
            "known": Entry(vars(self), "known", bool),
            "sent": TensorLeaf(self.sent, SMALLEST, LARGEST),
            "kind": TensorLeaf(self.kind, 0, 1),
        }
