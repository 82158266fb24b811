"""What a sparse method keeps for each bucket from step to step."""

import torch
from torch import Tensor

from ..codecs import Channel
from ..engine.block_means import BlockMeans
from ..engine.bucket import Bucket
from ..selection.base import Scoring, Selection


class Plan:
    """What one bucket's exchanges consist of: the selection, the codec's channel, the block means if they are sent."""

    def __init__(self, bucket: Bucket, channel: Channel, block_means: BlockMeans | None) -> None:
        self.channel, self.block_means = channel, block_means
        self.sizes = [segment.numel for segment in bucket.segments]
        self.invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self.disagree = torch.zeros(1, dtype=torch.bool, device=bucket.device)
        self.selection: Selection
        self.scoring: Scoring
        #: What is sent: the selection's values, then the block means.
        self.payload: Tensor
        self.restart()

    @property
    def sparse(self) -> bool:
        """Whether the last step that began has a density below 1."""
        return self.layout[:1] not in ((), (1.0,))

    def restart(self) -> None:
        """Forgets what was agreed with other ranks."""
        #: Each parameter's share of the slots.
        self.weights = [float(size) for size in self.sizes]
        #: What the selection was built from.
        self.layout: tuple[object, ...] = ()
        #: Whether the values of the last exchange have left the residual: ``payload`` still holds them.
        self.sent = False
        self.unchecked = True
        self.disagree.zero_()
