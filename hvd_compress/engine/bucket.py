"""Buckets: pieces of the model whose gradients are exchanged together, side by side in flat memory.

Each piece starts at a block boundary of the bucket's flat tensors and lies there in its weights' own memory order
(channels_last stays channels_last), so that gradient, weight and residual are read side by side.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..reference import BLOCK
from .shards import local
from .state import TensorLeaf, Tree
from .streams import stream_order


class Piece:
    """A parameter, or this rank's shard of one, in a bucket: there it has ``blocks`` blocks from ``first_block`` on.

    ``number``: of the parameter in the compressor. ``shape``, ``stride``, ``numel``: of the weights when it was made.
    """

    def __init__(self, name: str, number: int, parameter: torch.nn.Parameter, first_block: int) -> None:
        self.name, self.number, self.parameter, self.first_block = name, number, parameter, first_block
        self._stand_in: Tensor | None = None
        weight = self.weight()
        self.shape, self.stride, self.numel = weight.shape, weight.stride(), weight.numel()
        self.blocks = -(-self.numel // BLOCK)

    def of(self, flat: Tensor) -> Tensor:
        """This piece's part of a bucket-wide tensor, padding included: a view, (blocks * 256,)."""
        return flat[self.first_block * BLOCK : (self.first_block + self.blocks) * BLOCK]

    def of_blocks(self, per_block: Tensor) -> Tensor:
        """This piece's part of a tensor with one entry per block of the bucket: a view."""
        return per_block[self.first_block : self.first_block + self.blocks]

    def shaped(self, flat: Tensor) -> Tensor:
        """This piece's entries of a bucket-wide tensor in its shape and memory order: a view."""
        return self.reshaped(self.of(flat))

    def reshaped(self, part: Tensor) -> Tensor:
        """``part``, (blocks * 256,) or (numel,), in the piece's shape and memory order: a view."""
        return part.as_strided(self.shape, self.stride)

    def weight(self) -> Tensor:
        """The weights: a view without gradient, in the piece's shape."""
        return local(self.parameter).detach() if self._stand_in is None else self._stand_in

    def flat_weight(self) -> Tensor:
        """The weights in memory order: a view without gradient, (numel,)."""
        return self.weight().as_strided((self.numel,), (1,))

    def let_stand_in(self, weights: Tensor | None) -> None:
        """Lets :meth:`weight` return ``weights`` from now on, of the parameter's dtype and in its memory order; None
        ends this. Called by local steps, during whose exchanges the parameter holds weights of this rank only."""
        self._stand_in = None if weights is None else self.reshaped(weights)


class Bucket:
    """Pieces that are exchanged together, their residual, and the current step's gradients.

    ``owner``: the rank of each node that exchanges it (``engine/two_levels.py``). ``residual``: the sum of all
    gradients that has not been sent, float32, (blocks * 256,). ``table``: the operators' table of pieces without slots,
    int64, (pieces, 4), see ``hvd_compress/reference/scatter.py``. ``gradients``: by piece, the gradient in the piece's
    memory order, once all have arrived.
    """

    def __init__(self, index: int, pieces: Sequence[Piece], device: torch.device, owner: int = 0) -> None:
        self.index, self.pieces, self.device, self.owner = index, pieces, device, owner
        self.blocks, self.numel = sum(piece.blocks for piece in pieces), sum(piece.numel for piece in pieces)
        self.order = stream_order(device)
        rows = [(piece.first_block, piece.blocks, 0, 0) for piece in pieces]
        self.table = torch.tensor(rows, dtype=torch.int64, device=device)
        self._empty = torch.empty(0, dtype=torch.float32, device=device)
        self.clear()

    @cached_property
    def residual(self) -> Tensor:
        """Allocated on first use: the owner alone uses it."""
        return self.zeros()

    def zeros(self) -> Tensor:
        """A new bucket-wide tensor: float32, (blocks * 256,)."""
        with self.order:
            return torch.zeros(self.blocks * BLOCK, dtype=torch.float32, device=self.device)

    def saved(self, flat: Tensor, **rules: Any) -> Tree:
        """Describes a bucket-wide tensor in a checkpoint, by piece. ``rules``: the options of
        :class:`~hvd_compress.engine.state.TensorLeaf`."""
        # Codecs without a zero leave errors in the padding, and these are encoded again.
        parts = {p.name: {"entries": p.shaped(flat), "padding": p.of(flat)[p.numel :]} for p in self.pieces}
        return {
            name: {key: TensorLeaf(tensor, **rules) for key, tensor in part.items()} for name, part in parts.items()
        }

    # The current step.

    @property
    def incomplete(self) -> bool:
        """Whether some gradients have arrived and others are missing, so that none is in the state."""
        return self._missing < len(self.pieces) and not self._collected

    def clear(self, shared: bool = False) -> None:
        """Prepares for the next step. ``shared``: gradients are the parameters' own: others may add to them."""
        count, self._shared = len(self.pieces), shared
        self.gradients: list[Tensor] = []
        # By piece, the tensor that the host passed in and gets back.
        self._originals: list[Tensor | None] = [None] * count
        self._arrived, self._missing = bytearray(count), count
        self._versions: list[int | None] = [None] * count
        # Whether the gradients are being added to the state, or have been.
        self._collected = False

    def arrive(self, index: int, grad: Tensor) -> bool:
        """Keeps the gradient of a piece. Returns whether all have arrived. Raises ``RuntimeError`` for a second one."""
        if self._arrived[index]:
            raise RuntimeError(
                f"{self.pieces[index].name}: compressed twice in one step (after a step that failed, call reset())"
            )
        self._originals[index], self._versions[index], self._arrived[index] = grad, grad._version, True
        self._missing -= 1
        self.order.note_input()
        return not self._missing

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A context that takes over what has arrived: ``gradients`` has it, and empty tensors for the other pieces. (A
        copy only where the memory order is not the piece's.) At its end, shared ones become zero, unless it fails."""
        self.gradients = [
            self._empty if grad is None else in_order_of(local(piece.parameter), grad)
            for piece, grad in zip(self.pieces, self._originals, strict=True)
        ]
        self._versions, self._collected = [None] * len(self.pieces), True
        yield
        if self._shared:
            self.zero()
        self.mark_written()

    def replace_gradients(self, flat: Tensor) -> None:
        """Makes the pieces' entries of a bucket-wide tensor the :attr:`gradients` that have arrived, to which averages
        are written. :meth:`result` copies them to what the host passed in."""
        pairs = zip(self.pieces, self.gradients, strict=True)
        self.gradients = [piece.shaped(flat) if grad.numel() else grad for piece, grad in pairs]

    def clear_changed(self) -> None:
        """Drops the shared gradients that others have written to since they arrived, or since :meth:`mark_written`."""
        pairs = zip(self._originals, self._versions, strict=True) if self._shared else ()
        for index, (grad, version) in enumerate(pairs):
            if grad is not None and grad._version != version:
                self._originals[index] = None

    def mark_written(self) -> None:
        """Notes the gradients' versions: what is there belongs to the exchange."""
        self._versions = [None if grad is None else grad._version for grad in self._originals]

    def zero(self, but: Container[int] = ()) -> None:
        """Zeros gradients that are in the state, but those of some pieces: adding on top would count them twice."""
        with self.order:
            for index, grad in enumerate(self._originals):
                if grad is not None and index not in but:
                    grad.zero_()

    def result(self, index: int) -> Tensor:
        """The tensor that the host passed in, now holding the averaged gradient. Drops the bucket's reference to it."""
        original = self._originals[index]
        if original is None or not self.gradients:
            raise RuntimeError(
                f"{self.pieces[index].name}: the step in which this gradient was compressed is gone (it failed and was "
                "reset, or the result was requested twice)"
            )
        ordered, self._originals[index], self.gradients[index] = self.gradients[index], None, self._empty
        with self.order:  # the caller's stream waits for the exchange's
            if ordered.data_ptr() != original.data_ptr():
                original.copy_(ordered)
                self.order.release(ordered)
        return original

    def write_results(self) -> None:
        """Makes all tensors that the host passed in hold their averages."""
        for index, original in enumerate(self._originals):
            if original is not None:
                self.result(index)

    def missing(self) -> Iterator[Piece]:
        """The pieces of which no gradient has arrived."""
        return (piece for index, piece in enumerate(self.pieces) if not self._arrived[index])

    def nothing(self) -> list[Tensor]:
        """Empty tensors, one per piece: an update that reaches no gradient."""
        return [self._empty] * len(self.pieces)


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
    """The strides of the dimensions of more than one entry. They tell the memory order; the others are arbitrary."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def in_order_of(weight: Tensor, grad: Tensor) -> Tensor:
    """``grad`` itself if its memory order is the weight's, else a copy in that order."""
    if grad.stride() == weight.stride() or strides_of(grad) == strides_of(weight):
        return grad
    return torch.empty_strided(weight.shape, weight.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


Parameters = list[tuple[int, str, torch.nn.Parameter]]


def make_buckets(parameters: Parameters, capacity: int, owners: int = 1) -> list[Bucket]:
    """Puts parameters, each with its number and name, into buckets of at most ``capacity`` bytes of float32 (or one
    parameter), last parameter first: backward reaches the last parameters first, so the first buckets fill early. A
    bucket lies on one device.

    Each of several ``owners`` gets about equally many entries, in whole parameters. Their buckets are smaller by the
    same factor, so that a rank has as many exchanges as with one owner."""
    found: list[tuple[int, list[Piece]]] = []
    for owner, part in enumerate(by_owner(parameters, owners)):
        found += ((owner, pieces) for pieces in _packed(part, capacity // owners))
    found.sort(key=lambda item: -item[1][-1].number)  # in the order in which they fill
    return [Bucket(i, tuple(ps), ps[0].parameter.device, owner) for i, (owner, ps) in enumerate(found)]


def by_owner(parameters: Parameters, owners: int) -> list[Parameters]:
    """Each owner's parameters, last one first. The largest are given away first, to the owner with fewest entries."""
    found: list[Parameters] = [[] for _ in range(owners)]
    entries = [0] * owners
    for item in sorted(reversed(parameters), key=lambda item: -item[2].numel()):
        owner = entries.index(min(entries))
        found[owner].append(item)
        entries[owner] += item[2].numel()
    return [sorted(part, key=lambda item: -item[0]) for part in found]


def _packed(parameters: Parameters, capacity: int) -> Iterator[list[Piece]]:
    """Consecutive parameters in lists that fit ``capacity``."""
    pending: list[Piece] = []
    blocks = 0
    for number, name, parameter in parameters:
        piece = Piece(name, number, parameter, blocks)
        size = (blocks + piece.blocks) * BLOCK * 4
        if pending and (size > capacity or parameter.device != pending[0].parameter.device):
            yield pending
            pending, blocks = [], 0
            piece = Piece(name, number, parameter, 0)
        pending.append(piece)
        blocks += piece.blocks
    if pending:
        yield pending
