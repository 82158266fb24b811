"""Orthogonal averages of matrices whose rows are sharded (FSDP2).

Each matrix has an owner in the shard group, to which the other ranks send their rows. The owner replaces the whole
matrix and sends the rows back: two all-to-alls a step inside the group, and each matrix is computed once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.bucket import Parameters, by_owner
from ..engine.collectives import Collectives, Request
from ..engine.wire_stats import WireStats
from .orthogonal import orthogonalize


@dataclass(frozen=True)
class _Matrix:
    """``offset``: where a rank's rows begin in the part of a buffer for the owner. ``chunk``: the entries of these
    rows; the last ranks may have fewer."""

    owner: int
    offset: int
    rows: int
    chunk: int

    def of(self, buffer: Tensor) -> Tensor:
        """The matrix' entries in a buffer of (..., width): a view, (..., chunk)."""
        return buffer[..., self.offset : self.offset + self.chunk]


class ShardedMatrices:
    """The matrices of one model.

    Args:
        group: the ranks that share the matrices, in the order of their rows.
        matrices: with their numbers and names, the same on all ranks of the group.
        stats: counts the bytes, as inside a node.
        label: of the collectives' names.
    """

    def __init__(self, group: Collectives, matrices: Parameters, stats: WireStats, label: str) -> None:
        self._group, self._stats, self._label = group, stats, label
        self._matrices = dict[str, _Matrix]()
        #: The entries that a rank has for an owner, at most.
        self._width = 0
        for owner, part in enumerate(by_owner(matrices, group.size)):
            offset = 0
            for _, name, p in part:
                rows = p.shape[0]
                chunk = -(-rows // group.size) * (p.numel() // rows)  # FSDP2 shards rows as torch.chunk() does
                self._matrices[name] = _Matrix(owner, offset, rows, chunk)
                offset += chunk
            self._width = max(self._width, offset)

    def orthogonalize(self, averages: dict[str, Tensor], scale: float, device: torch.device) -> dict[str, Tensor]:
        """What replaces this rank's rows of the averages (:func:`hvd_compress.methods.orthogonal.orthogonalize`), by
        name: float32, in their shapes. All ranks of the group call it. Averages that are missing count as 0."""
        ranks, rank = self._group.size, self._group.rank
        buffer = torch.zeros(ranks, self._width, dtype=torch.float32, device=device)
        for name, average in averages.items():
            matrix = self._matrices[name]
            matrix.of(buffer[matrix.owner])[: average.numel()] = average.reshape(-1)
        buffer = self._exchange(buffer)
        for matrix in self._matrices.values():
            if matrix.owner == rank:
                part = matrix.of(buffer)
                whole = part.reshape(-(-matrix.rows // ranks) * ranks, -1)
                orthogonalize(whole[: matrix.rows], scale)
                part.copy_(whole.view(part.shape))
        buffer = self._exchange(buffer)
        found = {}
        for name, average in averages.items():
            matrix = self._matrices[name]
            found[name] = matrix.of(buffer[matrix.owner])[: average.numel()].view(average.shape)
        return found

    def _exchange(self, buffer: Tensor) -> Tensor:
        request = Request("alltoall", buffer.flatten(), "dense_tensor", level="inside")
        self._stats.count_request(request, self._group.size)
        return self._group.start(request, f"{self._label}.matrices").result().view(buffer.shape)
