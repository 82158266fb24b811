"""Buckets: parameters whose gradients are exchanged together, with their state in flat memory.

Each parameter starts at a block boundary of the bucket's flat tensors and lies there in the parameter's own memory
order (channels_last stays channels_last), so that gradient, weight and residual are read side by side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..reference import BLOCK
from .deferred import DeferredUpdate
from .streams import StreamOrder


@dataclass(frozen=True)
class Segment:
    """One parameter's place in its bucket: blocks ``first_block`` to ``first_block + blocks``.

    ``shape``, ``stride``: the parameter's when the bucket was made.
    """

    name: str
    parameter: torch.nn.Parameter
    first_block: int
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.parameter.shape)
        object.__setattr__(self, "stride", self.parameter.stride())

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK)

    def of(self, flat: Tensor) -> Tensor:
        """This segment's part of a bucket-wide tensor, padding included: a view, (blocks * 256,)."""
        return flat[self.first_block * BLOCK : (self.first_block + self.blocks) * BLOCK]

    def padding(self, flat: Tensor) -> Tensor:
        """The padding behind this segment's entries in a bucket-wide tensor: a view."""
        return self.of(flat)[self.numel :]

    def of_blocks(self, per_block: Tensor) -> Tensor:
        """This segment's part of a tensor with one entry per block of the bucket: a view."""
        return per_block[self.first_block : self.first_block + self.blocks]

    def shaped(self, flat: Tensor) -> Tensor:
        """This segment's entries of a bucket-wide tensor in the parameter's shape and memory order: a view."""
        return self.reshaped(self.of(flat))

    def reshaped(self, part: Tensor) -> Tensor:
        """``part``, (blocks * 256,) or (numel,), in the parameter's shape and memory order: a view."""
        return part.as_strided(self.shape, self.stride)

    def flat_weight(self) -> Tensor:
        """The parameter's entries in memory order: a view without gradient, (numel,)."""
        return self.parameter.detach().as_strided((self.numel,), (1,))


@dataclass
class Bucket:
    """Parameters that are exchanged together, their state, and the current step's gradients.

    ``state``: bucket-wide float32 tensors of ``blocks * 256`` entries by name, saved in checkpoints; ``residual`` is
    always among them. ``rules``: see :meth:`add_state`. ``gradients``: per segment, the gradient in the parameter's
    memory order, or None before it arrives. ``originals``: per segment, the tensor that the host passed in and gets
    back.
    """

    index: int
    segments: Sequence[Segment]
    device: torch.device
    state: dict[str, Tensor] = field(default_factory=dict)
    rules: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = sum(segment.blocks for segment in self.segments)
        self.order = StreamOrder(self.device)
        #: The last exchange's update of ``state`` that is not applied yet.
        self.deferred: DeferredUpdate | None = None
        self.add_state("residual", per_rank=True)
        self.clear()

    def add_state(self, name: str, **rules: Any) -> Tensor:
        """Adds a bucket-wide tensor of zeros to ``state``.

        ``rules``: what a checkpoint of it must fulfil, the options of :class:`~hvd_compress.engine.state.TensorLeaf`.
        With ``per_rank=True`` it is a sum of gradients; otherwise it must be the same on all ranks.
        """
        self.rules[name] = rules
        with self.order:
            self.state[name] = torch.zeros(self.blocks * BLOCK, dtype=torch.float32, device=self.device)
        return self.state[name]

    @property
    def residual(self) -> Tensor:
        """The sum of all gradients that has not been sent: float32, (blocks * 256,). Applies a deferred update, so only
        the training thread may ask."""
        self.apply_deferred()
        return self.state["residual"]

    def apply_deferred(self) -> None:
        """Brings ``state`` up to date with the last exchange."""
        if self.deferred is not None and self.deferred.pending:
            with self.order:
                self.deferred.apply(self.state["residual"], self.state.get("velocity"))

    def drop_deferred(self) -> None:
        """Applies the last exchange's deferred update and frees its memory. Called before a new exchange."""
        self.apply_deferred()
        if self.deferred is not None:
            d = self.deferred
            with self.order:
                self.order.release(d.indices, d.segments, d.mean, d.error)
            self.deferred = None

    def residual_of(self, segment: Segment) -> Tensor:
        """A segment's part of the residual, padding included, without writing to it: safe from any thread."""
        part = segment.of(self.state["residual"])
        return part if self.deferred is None else self.deferred.preview(self.segments.index(segment), part)

    @property
    def full(self) -> bool:
        """Whether every segment's gradient of this step has arrived."""
        return all(self.arrived)

    def clear(self) -> None:
        """Prepares for the next step."""
        self.gradients: list[Tensor | None] = [None] * len(self.segments)
        self.originals: list[Tensor | None] = [None] * len(self.segments)
        self.arrived = [False] * len(self.segments)
        self._versions: list[int | None] = [None] * len(self.segments)

    def add_gradient(self, position: int, grad: Tensor) -> Tensor:
        """Registers a segment's gradient and returns it in the parameter's memory order (a copy only if its own order
        differs)."""
        ordered = in_order_of(self.segments[position].parameter, grad)
        self.gradients[position], self.originals[position] = ordered, grad
        self.arrived[position] = True
        return ordered

    def mark_accumulated(self, position: int) -> None:
        """The segment's gradient is now part of the bucket's state."""
        original = self.originals[position]
        assert original is not None
        self._versions[position] = original._version

    def mark_averaged(self) -> None:
        """The exchange has written averages into the accumulated gradients."""
        for position, version in enumerate(self._versions):
            if version is not None:
                self.mark_accumulated(position)

    def zero_accumulated(self) -> None:
        """Zeros the gradients that are part of the state, except those that somebody else has written to since:
        accumulating on top of them would count them twice."""
        with self.order:
            for original, version in zip(self.originals, self._versions, strict=True):
                if original is not None and original._version == version:
                    original.zero_()

    def result(self, position: int) -> Tensor:
        """The tensor that the host passed in, now holding the averaged gradient. Drops the bucket's reference to it."""
        original, ordered = self.originals[position], self.gradients[position]
        if original is None or ordered is None:
            raise RuntimeError(
                f"{self.segments[position].name}: the step in which this gradient was compressed is gone (it failed "
                "and was reset, or the result was requested twice)"
            )
        self.gradients[position] = self.originals[position] = None
        with self.order:
            if ordered.data_ptr() != original.data_ptr():
                original.copy_(ordered)
                self.order.release(ordered)
        return original

    def targets(self) -> list[Tensor]:
        """The gradients to which averages are assigned, one per segment; empty where none arrived."""
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        return [empty if grad is None else grad for grad in self.gradients]

    def no_targets(self) -> list[Tensor]:
        """Empty tensors, one per segment: an update that reaches no gradient."""
        return [torch.empty(0, dtype=torch.float32, device=self.device)] * len(self.segments)


def is_dense(tensor: Tensor) -> bool:
    """Whether the entries fill their memory without gaps or overlaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """The strides of the dimensions of more than one entry, which tell the memory order: those of others are
    arbitrary."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def in_order_of(parameter: Tensor, grad: Tensor) -> Tensor:
    """``grad`` itself if its memory order is the parameter's, else a copy in that order."""
    if grad.stride() == parameter.stride() or strides_of(grad) == strides_of(parameter):
        return grad
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def make_buckets(parameters: Iterable[tuple[str, torch.nn.Parameter]], capacity: int) -> list[Bucket]:
    """Divides parameters into buckets of at most ``capacity`` bytes of float32 (or one parameter), last parameter
    first: backward reaches the last parameters first, so the first buckets fill early. A bucket lies on one device."""
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
        size = (blocks + segment.blocks) * BLOCK * 4
        if pending and (size > capacity or parameter.device != pending[0].parameter.device):
            close()
            segment = Segment(name, parameter, 0)
        pending.append(segment)
        blocks += segment.blocks
    close()
    return buckets
