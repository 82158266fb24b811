"""Flat memory: a bucket is a run of parameters whose gradients travel together.

Every parameter begins at a block boundary of the bucket's flat residual and lies there in the parameter's own memory
order (channels_last stays channels_last), so that gradient, weight and residual are read side by side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .deferred import Due
from ..reference import BLOCK
from .streams import StreamOrder


@dataclass(frozen=True)
class Segment:
    """One parameter's place in its bucket: blocks ``first_block`` to ``first_block + blocks``."""

    name: str
    parameter: torch.nn.Parameter
    first_block: int

    @property
    def numel(self) -> int:
        return self.parameter.numel()

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK)

    def of(self, flat: Tensor) -> Tensor:
        """This segment's part of a bucket-wide tensor (padding included)."""
        return flat[self.first_block * BLOCK : (self.first_block + self.blocks) * BLOCK]

    def padding(self, flat: Tensor) -> Tensor:
        """What of this segment's part of a bucket-wide tensor is no entry of the parameter's."""
        return self.of(flat)[self.numel :]

    def of_blocks(self, each: Tensor) -> Tensor:
        """This segment's part of a tensor with one entry for each of the bucket's blocks."""
        return each[self.first_block : self.first_block + self.blocks]

    def shaped(self, flat: Tensor) -> Tensor:
        """A bucket-wide tensor's part without the padding, in the parameter's shape and memory order: a view."""
        return self.reshaped(self.of(flat))

    def reshaped(self, part: Tensor) -> Tensor:
        """The same, of the part."""
        return part.as_strided(self.parameter.shape, self.parameter.stride())


@dataclass
class Bucket:
    """Parameters that travel together, their residual, and this step's gradients as they come.

    ``state`` holds what must survive a checkpoint, by name: bucket-wide float32 tensors of ``blocks * 256`` entries,
    ``residual`` always among them; :meth:`catch_up` first. ``gradients`` holds, per segment, the gradient
    in canonical memory order, or None until it came; ``owners`` the tensor that Horovod handed in and gets back.
    """

    index: int
    segments: Sequence[Segment]
    device: torch.device
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = sum(segment.blocks for segment in self.segments)
        self.order = StreamOrder(self.device)
        #: What the last exchange has left to do in ``state``.
        self.due: Due | None = None
        self.add_state("residual")
        self.clear()

    def add_state(self, name: str) -> Tensor:
        """A new bucket-wide tensor of zeros that checkpoints carry."""
        self.state[name] = torch.zeros(self.blocks * BLOCK, device=self.device)
        return self.state[name]

    @property
    def residual(self) -> Tensor:
        """Of all gradients so far, what has not been sent: float32, (blocks * 256,). For the thread that trains: it may
        have to write."""
        self.catch_up()
        return self.state["residual"]

    def catch_up(self) -> None:
        """``state`` becomes what it is to be after the last exchange."""
        if self.due is not None and self.due.waits:
            self.order.enter()
            self.due.finish(self.state["residual"], self.state.get("velocity"))
            self.order.leave()

    def forget_due(self) -> None:
        """An exchange begins, and its predecessor's memory is let go."""
        self.catch_up()
        if self.due is not None:
            self.order.enter()
            self.order.let_go(self.due.picks, self.due.segments, self.due.mean, self.due.lost)
            self.due = None

    def peek(self, segment: Segment) -> Tensor:
        """A segment's part of the residual, padding included, for whoever only looks: nothing is written, whatever is
        due, so that any thread may."""
        part, due = segment.of(self.state["residual"]), self.due
        return part if due is None else due.seen(self.segments.index(segment), part)

    @property
    def full(self) -> bool:
        """Whether every segment's gradient of this step is here."""
        return all(self.arrived)

    def clear(self) -> None:
        """Ready for the next step."""
        self.gradients: list[Tensor | None] = [None] * len(self.segments)
        self.owners: list[Tensor | None] = [None] * len(self.segments)
        self.arrived = [False] * len(self.segments)
        self._taken: list[int | None] = [None] * len(self.segments)

    def taken(self, position: int) -> None:
        """What the segment's gradient brought is in the bucket's state now."""
        owner = self.owners[position]
        assert owner is not None
        self._taken[position] = owner._version

    def assigned(self) -> None:
        """The exchange has written the averages into the gradients that were taken in."""
        for position, version in enumerate(self._taken):
            if version is not None:
                self.taken(position)

    def use_up(self) -> None:
        """Gradients that were taken in become zero, or what is added to them later would bring it once more; but not
        those that somebody has written to since."""
        self.order.enter()
        for owner, version in zip(self.owners, self._taken, strict=True):
            if owner is not None and owner._version == version:
                owner.zero_()
        self.order.leave()

    def receive(self, position: int, grad: Tensor) -> Tensor:
        """Takes note of a segment's gradient and returns it in canonical memory order (a copy only if it is laid out
        otherwise)."""
        canonical = in_order_of(self.segments[position].parameter, grad)
        self.gradients[position], self.owners[position] = canonical, grad
        self.arrived[position] = True
        return canonical

    def give_back(self, position: int) -> Tensor:
        """The very tensor that Horovod handed in, holding the result; the bucket holds on to it no longer."""
        owner, canonical = self.owners[position], self.gradients[position]
        if owner is None or canonical is None:
            raise RuntimeError(
                f"{self.segments[position].name}: the step in which this gradient was compressed is no more (it failed "
                "and was reset, or its result was asked for twice)"
            )
        self.order.enter()
        self.gradients[position] = self.owners[position] = None
        if canonical.data_ptr() != owner.data_ptr():
            with torch.no_grad():  # Horovod calls from where autograd may be on
                owner.copy_(canonical)
        return owner


def is_dense(tensor: Tensor) -> bool:
    """Whether the entries fill their memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def in_order_of(parameter: Tensor, grad: Tensor) -> Tensor:
    """``grad`` itself if its memory order is the parameter's, else a copy in that order."""
    if grad.stride() == parameter.stride() or _same_order(parameter, grad):
        return grad
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def _same_order(one: Tensor, other: Tensor) -> bool:
    # Strides of dimensions of length 1 mean nothing: torch sets them differently for the same order.
    kept = [d for d, size in enumerate(one.shape) if size > 1]
    return one.shape == other.shape and all(one.stride(d) == other.stride(d) for d in kept)


def fill(parameters: Iterable[tuple[str, torch.nn.Parameter]], capacity: int) -> list[Bucket]:
    """Deals parameters into buckets of at most ``capacity`` bytes of float32 (or one parameter), last parameter first.

    Backward reaches the last parameters first, so the first bucket is full early and its exchange overlaps the rest.
    Buckets never mix devices.
    """
    buckets: list[Bucket] = []
    pending: list[Segment] = []
    blocks = 0

    def close() -> None:
        nonlocal pending, blocks
        if pending:
            buckets.append(Bucket(len(buckets), tuple(pending), pending[0].parameter.device))
        pending, blocks = [], 0

    for name, parameter in reversed(list(parameters)):
        segment = Segment(name, parameter, blocks)
        if pending and (
            (blocks + segment.blocks) * BLOCK * 4 > capacity or parameter.device != pending[0].parameter.device
        ):
            close()
            segment = Segment(name, parameter, 0)
        pending.append(segment)
        blocks += segment.blocks
    close()
    return buckets
