"""Selection by leaders: the slots are divided among all ranks in runs, in an order of ranks drawn anew in each step, so
that every rank selects equally many entries and the leader of each slot is random. One allgather of indices follows."""

import math

import torch
from torch import Tensor

from .. import ops, reference
from ..engine.agreement import disagreement
from ..engine.bucket import Bucket
from ..engine.collectives import allgather
from ..engine.deferred import DeferredUpdate
from ..reference import BLOCK
from .base import Agreement, Average, Scoring, Selection, StepSeed, segment_table, whole

#: The most entries of a bucket whose positions fit in int32.
INT32_ENTRIES = 2**31


class LeaderSelection(Selection):
    """``run``: how many consecutive slots one leader selects."""

    #: dtype of an index on the wire.
    dtype: torch.dtype

    def __init__(
        self, bucket: Bucket, slots: list[int], run: int, ranks: int, rank: int, finds_idle: bool = False
    ) -> None:
        super().__init__(bucket, slots)
        self.finds_idle = finds_idle
        self.run, self.ranks, self.rank = run, ranks, rank
        self.segments = segment_table([whole(s) for s in bucket.segments], slots, self.first, bucket.device)
        count = -(-self.total // (run * ranks)) * run
        self.digest_length = max(1, 4 // self.dtype.itemsize)
        self.head = self.digest_length + (len(slots) if finds_idle else 0)
        #: This rank's part of the allgather: a digest of at least four bytes, ``touched`` if ``finds_idle``, then the
        #: indices that it selects.
        self.message = torch.zeros(self.head + count, dtype=self.dtype, device=bucket.device)
        self.own_indices = self.message[self.head :]

    def begin_step(self, seed: StepSeed, check: bool) -> None:
        super().begin_step(seed, check)
        self.position = seed.order.index(self.rank)
        # In every step: other ranks may check in steps in which this one does not.
        self.message[: self.digest_length].view(torch.int32).fill_(self.digest() & 0x7FFFFFFF)

    def select(self, scoring: Scoring) -> None:
        """Completes ``own_indices`` once all gradients have arrived."""

    def complete(self, scoring: Scoring) -> None:
        """Completes ``message``."""
        self.select(scoring)
        if self.finds_idle:
            self.message[self.digest_length : self.head] = self.touched

    def agree(self, scoring: Scoring) -> Agreement:
        self.complete(scoring)
        gathered = yield allgather(self.message, "indices")
        by_rank = self.indices_by_rank(gathered, self.ranks, scoring).view(self.ranks, -1, self.run)
        # In slot order. Not by an index tensor, whose copy to a GPU would synchronise it.
        self.indices = torch.stack([by_rank[rank] for rank in self.seed.order], dim=1).view(-1)[: self.total]

    def indices_by_rank(self, gathered: Tensor, ranks: int, scoring: Scoring) -> Tensor:
        """The gathered messages without digests: (ranks, indices).

        Raises ``RuntimeError``, on every rank, if the ranks' digests differ.
        """
        if gathered.numel() % ranks:
            raise disagreement()
        messages = gathered.view(ranks, -1)
        digests = messages[:, : self.digest_length]
        scoring.disagree.logical_or_((digests != digests[0]).any())
        if self.check and bool(scoring.disagree):
            raise disagreement()
        if self.finds_idle:
            self.find_idle((messages[:, self.digest_length : self.head] != 0).any(0))
        return messages[:, self.head :]


class BlockLeaders(LeaderSelection):
    """m of every 256 entries. An index is one byte, written while the gradient is in the cache."""

    dtype = torch.uint8
    selects_early = True

    def gather(self, memory: Tensor) -> Tensor:
        ops.gather(memory, self.indices, self.segments, self.values, self.phase)
        return self.values

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        bucket, a = self.bucket, average
        bucket.drop_deferred()
        residual, rows, out = bucket.state["residual"], self.segments, a.output
        arguments = (targets, residual, None, self.indices, rows, a.mean, None, self.phase, out.scale, a.block_means)
        ops.scatter(*arguments, out.transform, out.sign)
        spans = [self.span(position) for position in range(len(self.slots))]
        bucket.deferred = DeferredUpdate(self.indices, rows, spans, self.phase, a.mean, a.error)


class TopkLeaders(LeaderSelection):
    """Exact top-k: each leader selects its share of a parameter's entries by the largest scores. Four bytes an index,
    eight in a bucket of more than 2**31 entries.

    A specification for :class:`BlockLeaders`, in PyTorch: slow, and an entry may wait without bound.
    """

    def __init__(
        self, bucket: Bucket, slots: list[int], run: int, ranks: int, rank: int, finds_idle: bool = False
    ) -> None:
        self.dtype = torch.int32 if bucket.blocks * BLOCK <= INT32_ENTRIES else torch.int64
        super().__init__(bucket, slots, run, ranks, rank, finds_idle)
        self.segments = self.segments.cpu()  # read by the host in every step: on a GPU it would synchronise

    def select(self, scoring: Scoring) -> None:
        for position, segment in enumerate(self.bucket.segments):
            span = self.span(position)
            edges = torch.tensor([span.start, span.stop], dtype=torch.int64, device="cpu")
            low, high = reference.slots_before(edges, self.run, self.ranks, self.position).tolist()
            score = scoring.score(self.bucket, position)
            random = round((high - low) * scoring.explore)
            best = self.largest(position, score, high - low - random)
            if random:
                score[best] = -1.0
                entry = torch.arange(segment.numel, dtype=torch.int64, device=score.device)
                noise = reference.mix(entry, self.key(position))
                assert isinstance(noise, Tensor)
                best = torch.cat([best, (score / reference.exponential(noise)).topk(random).indices])
            self.own_indices[low:high] = (best.sort().values + segment.first_block * BLOCK).to(self.dtype)

    def largest(self, position: int, score: Tensor, count: int) -> Tensor:
        """The indices of a segment's ``count`` largest scores: int64, (count,)."""
        return score.topk(count).indices

    def gather(self, memory: Tensor) -> Tensor:
        return torch.index_select(memory, 0, self.indices, out=self.values)

    def scatter(self, targets: list[Tensor], velocity: Tensor | None, average: Average) -> None:
        a, residual, where, scale = average, self.bucket.residual, self.indices.long(), average.output.scale
        reference.scatter_at(targets, residual, velocity, where, self.segments, a.mean, a.error, scale, a.block_means)


#: By the name in ``selection=``.
LEADER_SELECTIONS: dict[str, type[LeaderSelection]] = {"block": BlockLeaders, "topk": TopkLeaders}


def run_length(leaders: int | None, density: float, ranks: int) -> int:
    """How many consecutive slots a leader selects so that ``leaders`` ranks (None: all) share a block on average."""
    return 1 if leaders is None else max(1, math.ceil(density * BLOCK / min(leaders, ranks)))


def check_leaders(leaders: int | None) -> None:
    """Raises ``ValueError``."""
    if leaders is not None and leaders < 1:
        raise ValueError(f"leaders must be at least 1, or None for all ranks, got {leaders}")
