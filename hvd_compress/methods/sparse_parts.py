"""The parts of a sparse method's bucket: velocities, values on the wire, and the pieces' shares of the slots."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..codecs import Averaged, Channel, Codec
from ..engine.bucket import Bucket, Piece
from ..engine.collectives import Collectives, allreduce
from ..engine.exchange import Exchange
from ..engine.state import Entry, Tree
from ..engine.work import Part, Step
from ..reference import BLOCK
from ..selection.budget import SPREAD, shares
from ..selection.idle import Idle
from .basis import Basis
from .block_means import BlockMeans


class Velocity(Part):
    """The velocity of momentum correction (:mod:`hvd_compress.methods.momentum`) for some pieces of a bucket.
    ``memory``: float32, bucket-wide, or None without momentum. ``momentum``: in [0, 1)."""

    def __init__(self, bucket: Bucket, basis: Basis, means: BlockMeans, idle: Idle) -> None:
        self._bucket, self._basis, self._means, self._idle = bucket, basis, means, idle
        self.memory: Tensor | None = None
        self.set_momentum(0.0, set())

    def set_momentum(self, momentum: float, names: set[str]) -> None:
        """Gives the pieces with these names this momentum, the others none. Called before the first step."""
        self.momentum, self._names = momentum, names
        self.memory = self._bucket.zeros() if momentum else None
        if momentum:
            self._idle.find()
        #: The pieces without momentum, if others have it.
        self.without = [piece for piece in self._bucket.pieces if momentum and piece.name not in names]

    def split(self, grads: list[Tensor]) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
        """The gradients of pieces with momentum, with their velocity, and those of the others, without: two lists by
        piece, where the gradients of the other list are empty. One list if all pieces are alike."""
        if not self.without:
            yield self.memory, grads
            return
        for velocity, has in ((self.memory, True), (None, False)):
            pairs = zip(self._bucket.pieces, self._bucket.nothing(), grads, strict=True)
            yield velocity, [grad if (piece.name in self._names) == has else empty for piece, empty, grad in pairs]

    def rest(self) -> None:
        """Takes the velocity of idle pieces out of the residual again, and restores it."""
        if self.memory is None or (idle := self._idle.blocks) is None:
            return
        for piece, grad in zip(self._bucket.pieces, self._bucket.gradients, strict=True):
            if not grad.numel():  # skipped by accumulate_select
                piece.of_blocks(idle).zero_()
        velocity, idle = self.memory.view(-1, BLOCK), idle[:, None].float()
        self._bucket.residual.view(-1, BLOCK).addcmul_(velocity, idle, value=-1.0)
        velocity.mul_(1.0 + idle * (1.0 / self.momentum - 1.0))

    def get(self, piece: Piece) -> Tensor:
        """The velocity of a piece, in its shape: float32."""
        assert self.memory is not None, "there is no momentum"
        return self._means.added(piece, self._basis.entries(piece, piece.of(self.memory)), self._means.velocity)

    def set(self, piece: Piece, velocity: Tensor) -> None:
        assert self.memory is not None, "there is no momentum"
        self._basis.write(piece, velocity, piece.of(self.memory))
        piece.of_blocks(self._means.velocity).zero_()

    def state(self) -> Tree:
        return {} if self.memory is None else self._basis.saved(self.memory)


class Values(Part):
    """The payload: its codec's channel, and the values of the last exchange. ``groups``: values that share a scale."""

    def __init__(self, bucket: Bucket, codec: Codec, groups: int, collectives: Collectives) -> None:
        self._codec, self._groups, self._collectives, self._device = codec, groups, collectives, bucket.device
        self.invalid = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        #: The picked entries of the residual, then the block means.
        self.payload = torch.empty(0, dtype=torch.float32, device=bucket.device)
        self._sizes: list[int] = []
        self.restart()

    def lay_out(self, sizes: list[int]) -> None:
        if sizes != self._sizes:
            self.payload = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
            self.channel.set_group_sizes(sizes)
            self._sizes = sizes

    def begin(self, step: Step) -> None:
        self.invalid.zero_()
        self.channel.begin_step()
        self.sent = False

    def average(self, values: Tensor, key: int) -> Averaged:
        result = yield from self.channel.average(values, self.invalid, key)
        self.mark_sent()
        return result

    def mark_sent(self) -> None:
        """Notes that the values are subtracted from the residual. ``payload`` keeps them for undo."""
        self.sent = True

    def undo(self) -> None:
        self.channel.undo_step()
        self.sent = False

    def restart(self) -> None:
        c = self._collectives
        self.channel: Channel = self._codec.channel(self._groups, c.size, c.rank, self._device)
        self._sizes = []
        #: Whether the last step's values were subtracted from the residual.
        self.sent = False

    def state(self) -> Tree:
        return self.channel.state()


class Shares(Part):
    """Each piece's share of a bucket's slots."""

    def __init__(self, bucket: Bucket) -> None:
        self._pieces = bucket.pieces
        self.sizes = [piece.numel for piece in bucket.pieces]
        self.weights, self._before = list[float](), list[float]()
        self.restart()

    def begin(self, step: Step) -> None:
        self._before = self.weights

    def undo(self) -> None:
        self.weights = self._before

    def restart(self) -> None:
        self.weights = self._before = [float(size) for size in self.sizes]

    def follow(self, importance: Tensor) -> Exchange:
        """Updates the shares by the importance of each piece on this rank, float64, (pieces,). It is summed over the
        ranks, so that all compute their slots from the same bits."""
        agreed = yield allreduce(importance.nan_to_num_(nan=0.0, posinf=0.0), "budget", "shares")
        self.weights = shares(agreed.tolist(), self.sizes)

    def state(self) -> Tree:
        return {
            piece.name: Entry(self.weights, i, float, piece.numel / SPREAD, piece.numel * SPREAD)
            for i, piece in enumerate(self._pieces)
        }
