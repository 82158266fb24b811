"""Two levels (``nodes=``): a node sums its ranks' gradients, and one of the ranks exchanges a bucket with other nodes.

Each bucket has an owner, the rank with the same place in every node, which alone has the bucket's residual. To the
method there are as many ranks as nodes, each with the mean gradient of its node.
"""

import torch
from torch import Tensor

from ..reference import BLOCK
from .bucket import Bucket, Piece
from .collectives import Nodes, broadcast, reduce
from .exchange import Exchange
from .state import Tree
from .work import Work


class NotOwned(Work):
    """Stands for the method's work, for a bucket that another rank of the node owns: no state, no exchange."""

    def accumulate(self) -> None:
        """Done by the owner."""

    def exchange(self) -> Exchange:
        yield from ()

    def state(self) -> dict[str, Tree]:
        return {}

    def residual_of(self, piece: Piece) -> Tensor:
        return torch.zeros(piece.shape, dtype=torch.float32, device=self.bucket.device)

    def set_residual(self, piece: Piece, entries: Tensor) -> None:
        """Nothing is kept."""

    def scale_residual(self, factor: float) -> None:
        """Nothing is kept."""


def two_level_exchange(work: Work, nodes: Nodes) -> Exchange:
    """The exchange of a bucket whose gradients have arrived: the node's sum goes to the owner, the owners run the
    method's exchange, and its result goes to all ranks of the node. In float32; no rank waits before the first
    collective."""
    bucket = work.bucket
    with bucket.collected():
        flat = _packed(bucket, 1.0 / nodes.ranks)
    flat = yield reduce(flat, bucket.owner, to_all=not nodes.everyone.ordered)
    if bucket.owner == nodes.rank:
        bucket.replace_gradients(flat)
        work.accumulate()
        yield from work.exchange()
    flat = yield broadcast(flat, bucket.owner)
    bucket.replace_gradients(flat)
    bucket.mark_written()


def _packed(bucket: Bucket, factor: float) -> Tensor:
    """The gradients times ``factor`` as a bucket-wide tensor, zero where there is none."""
    flat = torch.empty(bucket.blocks * BLOCK, dtype=torch.float32, device=bucket.device)
    for piece, grad in zip(bucket.pieces, bucket.gradients, strict=True):
        piece.of(flat)[grad.numel() :].zero_()  # all of it, or the padding
        if grad.numel():
            torch.mul(grad.float(), factor, out=piece.shaped(flat))  # not rounded before it is float32
    return flat
