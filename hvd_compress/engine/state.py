"""Descriptions of saved state: nested dicts of leaves, from which saving, checking and loading follow.

A description is built when it is needed and refers to the objects that hold the state::

    {"count": Entry(vars(self), "count", int, low=0), "floors": {"conv.weight": TensorLeaf(floor, low=0.0)}}

A leaf with ``per_rank`` differs between ranks; the others are the same on all ranks.
"""

import abc
import copy
import math
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

#: A value of a saved state: of any type until it was checked.
Saved: TypeAlias = Any
#: A state as the user holds it.
State: TypeAlias = dict[str, Saved]


class Leaf(abc.ABC):
    """One value of a state. A saved value is a copy, and consists of what ``torch.load(weights_only=True)`` accepts."""

    per_rank = False

    @abc.abstractmethod
    def save(self, copies: "Copies") -> Saved: ...

    @abc.abstractmethod
    def check(self, value: Saved, path: str) -> None:
        """Raises ``ValueError``, with ``path``, if :meth:`load` would not take ``value``. Changes nothing."""

    def load(self, value: Saved) -> None:
        """Does nothing if there is nothing to load."""


Tree: TypeAlias = Leaf | dict[str, "Tree"]
#: The saved copies of tensors, by :func:`memory_of` the tensor.
Copies: TypeAlias = dict[Any, Tensor]


def save(tree: Tree, copies: Copies | None = None) -> Saved:
    """The values of a description, in nested dicts. ``copies``: those made so far."""
    copies = {} if copies is None else copies
    return tree.save(copies) if isinstance(tree, Leaf) else {key: save(part, copies) for key, part in tree.items()}


def check(tree: Tree, value: Saved, path: str = "") -> None:
    """Raises ``ValueError``, with the path of the first bad item, unless ``value`` fits the description completely."""
    if isinstance(tree, Leaf):
        tree.check(value, path)
        return
    if not isinstance(value, dict):
        refuse(path, f"must be a dict, got {described(value)}")
    # What is there comes first: where an option differs, other items are missing.
    for key in filter(value.__contains__, tree):
        check(tree[key], value[key], joined(path, key))
    missing, unknown = (_paths(path, keys) for keys in (tree.keys() - value.keys(), value.keys() - tree.keys()))
    if missing or unknown:
        parts = [missing and f"{missing}: missing from the state", unknown and f"{unknown}: not of this compressor"]
        raise ValueError(
            "; ".join(filter(None, parts)) + " (is it of another version of hvd_compress, or of other arguments?)"
        )


def load(tree: Tree, value: Saved) -> None:
    """Loads a ``value`` that :func:`check` has accepted."""
    if isinstance(tree, Leaf):
        tree.load(value)
    else:
        for key, part in tree.items():
            load(part, value[key])


def part_of(tree: Tree, per_rank: bool) -> Tree:
    """The leaves of a description that are, or are not, ``per_rank``. Dicts without such leaves are left out."""
    if isinstance(tree, Leaf):
        return tree if tree.per_rank == per_rank else {}
    parts = {key: part_of(part, per_rank) for key, part in tree.items()}
    return {key: part for key, part in parts.items() if part != {}}


class TensorLeaf(Leaf):
    """A finite tensor that is loaded in place, from any device.

    Args:
        tensor: the memory of the state, of which shape and dtype are required.
        low, high: the range of its entries.
    """

    def __init__(
        self, tensor: Tensor, low: float = -math.inf, high: float = math.inf, *, per_rank: bool = False
    ) -> None:
        self._tensor, self._low, self._high, self.per_rank = tensor, low, high, per_rank

    def save(self, copies: Copies) -> Tensor:
        return copies.setdefault(memory_of(self._tensor), self._tensor.detach().clone())

    def check(self, value: Saved, path: str) -> None:
        strided = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
        if not strided or value.shape != self._tensor.shape or value.dtype != self._tensor.dtype:
            refuse(path, f"must be {described(self._tensor)}, got {described(value)}")
        if not bool(value.isfinite().all()):
            refuse(path, "must be finite, has NaN or infinity")
        if not bool(((value >= self._low) & (value <= self._high)).all()):
            low, high = value.aminmax()
            refuse(path, f"must lie in {self._low:g} to {self._high:g}, has {low:g} to {high:g}")

    def load(self, value: Tensor) -> None:
        self._tensor.copy_(value)


class OptionalTensor(Leaf):
    """``container[key]``, a tensor of the shape and dtype of ``like``; None where there is none."""

    def __init__(self, container: MutableMapping[str, Tensor], key: str, like: Tensor) -> None:
        self._container, self._key, self._like = container, key, like

    def save(self, copies: Copies) -> Tensor | None:
        return None if self._key not in self._container else self._container[self._key].clone()

    def check(self, value: Saved, path: str) -> None:
        if value is not None:
            TensorLeaf(self._like).check(value, path)

    def load(self, value: Tensor | None) -> None:
        self._container.pop(self._key, None)
        if value is not None:
            self._container[self._key] = torch.empty_like(self._like).copy_(value)


@dataclass(eq=False)
class Entry(Leaf):
    """``container[key]``: a bool, an int or a finite float in a range. An attribute is an entry of ``vars(owner)``."""

    container: Saved
    key: Saved
    kind: type
    low: float = -math.inf
    high: float = math.inf
    per_rank: bool = field(default=False, kw_only=True)

    def save(self, copies: Copies) -> Saved:
        return self.container[self.key]

    def check(self, value: Saved, path: str) -> None:
        allowed = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in allowed or not math.isfinite(value):
            refuse(path, f"must be a finite {self.kind.__name__}, got {described(value)}")
        if not self.low <= value <= self.high:
            refuse(path, f"must lie in {self.low:g} to {self.high:g}, got {value}")

    def load(self, value: Saved) -> None:
        self.container[self.key] = self.kind(value)


class Fixed(Leaf):
    """An option that a state depends on, of numbers, strings, lists and dicts: saved, and on loading required to be the
    same. ``hint``: what to do if it is not."""

    def __init__(self, value: Saved, hint: str = "") -> None:
        self._value, self._hint = value, hint

    def save(self, copies: Copies) -> Saved:
        return copy.deepcopy(self._value)

    def check(self, value: Saved, path: str) -> None:
        if not same(value, self._value):
            hint = f" ({self._hint})" if self._hint else ""
            refuse(path, f"the state was made with {described(value)}, this compressor has {self._value!r:.200}{hint}")


class Recorded(Leaf):
    """A hash of tensors that are saved elsewhere. :func:`hvd_compress.reshard` compares it between ranks; loading calls
    ``loaded`` with it, or with 0 if the shards are others than those that were saved."""

    def __init__(self, compute: Callable[[], int], loaded: Callable[[int], None]) -> None:
        self._compute, self._loaded = compute, loaded

    def save(self, copies: Copies) -> int:
        return self._compute()

    def check(self, value: Saved, path: str) -> None:
        if type(value) is not int or value < 0:
            refuse(path, f"must be an int of 0 or more, got {described(value)}")

    def load(self, value: int) -> None:
        self._loaded(value)


def same(one: Saved, other: Saved) -> bool:
    """Whether two values are of the same types and bit-equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(_bits(one), _bits(other.to(one.device)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def memory_of(tensor: Tensor) -> Saved:
    """Equal for tensors that are one view of one memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def described(value: Saved) -> str:
    """Describes a value, for an error message."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{value!r:.200}"


def refuse(path: str, text: str) -> NoReturn:
    raise ValueError(f"{path or 'the state'}: {text}")


def joined(path: str, key: Saved) -> str:
    return f"{path}.{key}" if path else str(key)


def _paths(path: str, keys: Iterable[Saved]) -> str:
    names = sorted(joined(path, key) for key in keys)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
