"""The unsent part of a state, by parameter and in the shape of this rank's shard, which fits any layout.

``residual``, and ``velocity`` with momentum: by parameter name a tensor of float32, or float64 as the parameter, or
None where the rank keeps nothing: the parameter is not compressed, or frozen, or another rank of the node has it. The
rest of an exact state, such as quantization scales, shares of the slots and histories, fits one layout only.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.shards import wide_zeros
from ..engine.state import Copies, Leaf, Saved, State, TensorLeaf, Tree, described, memory_of, refuse

_Get: TypeAlias = Callable[[], Tensor]
_Put: TypeAlias = Callable[[Tensor], None]
#: A sum in float64, the number of its tensors, and the dtype of the first.
_Sum: TypeAlias = tuple[Tensor, int, torch.dtype]


def owed(engine: Engine) -> dict[str, Tree]:
    """Describes this rank's unsent part, for all parameters that some rank may compress, or have a velocity of: every
    rank has the same names, also those of frozen parameters."""
    velocities = engine.method.velocities
    residual, velocity = dict[str, Tree](), dict[str, Tree]()
    for number, (name, p) in enumerate(zip(engine.names, engine.parameters, strict=True)):
        if not p.is_floating_point():
            continue
        matrix, place = p.dim() >= 2, engine.place_of[number]
        here = p.requires_grad if place is None else place.work.bucket.owner == engine.nodes.rank
        if place is not None:
            held, hold = partial(place.work.residual_of, place.piece), partial(place.work.set_residual, place.piece)
            residual[name] = _Owed(p, held, hold, here)
        elif matrix:
            residual[name] = _Owed(p, None, None, here)
        if velocities is not None and (velocities.of_compressed or not matrix):
            get, put = partial(velocities.get, number), partial(velocities.set, number)
            velocity[name] = _Owed(p, get, put, here)
    return {"residual": residual} if velocities is None else {"residual": residual, "velocity": velocity}


def mean_of(ranks: Iterable[Saved]) -> dict[str, dict[str, Tensor | None]]:
    """The mean of the ranks' unsent parts, over the ranks that have one, in float64. An iterator is read one rank at a
    time. Raises ``ValueError`` if the ranks differ in names or shapes."""
    found: dict[str, dict[str, _Sum | None]] = {}
    for count, each in enumerate(ranks):
        if not isinstance(each, dict) or not all(isinstance(tensors, dict) for tensors in each.values()):
            refuse("owed", f"must be dicts of tensors, got {described(each)}")
        if not count:
            found = {kind: dict.fromkeys(tensors) for kind, tensors in each.items()}
        if different := _names(found) ^ _names(each):
            refuse("owed", f"the states have different items: {sorted(different)!r:.200}")
        for kind, tensors in each.items():
            for name, tensor in tensors.items():
                found[kind][name] = _added(found[kind][name], tensor, f"owed.{kind}.{name}")
    return {
        kind: {name: each and (each[0] / each[1]).to(each[2]) for name, each in sums.items()}
        for kind, sums in found.items()
    }


def _added(total: _Sum | None, tensor: Saved, path: str) -> _Sum | None:
    if tensor is None:
        return total
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        refuse(path, f"must be a float tensor or None, got {described(tensor)}")
    if total is None:
        return tensor.double().clone(), 1, tensor.dtype
    if total[0].shape != tensor.shape:
        refuse(path, f"must have one shape on all ranks, got {tuple(total[0].shape)} and {tuple(tensor.shape)}")
    return total[0].add_(tensor.to(total[0].device)), total[1] + 1, total[2]


class _Owed(Leaf):
    """The unsent part of one parameter. ``get`` returns the memory of the state, or a copy; ``put`` replaces it; both
    are None if no rank compresses the parameter. ``here``: whether this rank keeps it."""

    per_rank = True

    def __init__(self, parameter: Tensor, get: _Get | None, put: _Put | None, here: bool) -> None:
        self._parameter, self._get, self._put, self._here = parameter, get, put, here

    def save(self, copies: Copies) -> Tensor | None:
        if self._get is None or not self._here:
            return None
        held, dtype = self._get(), wide_zeros(self._parameter).dtype
        # Often the residual itself, which the exact state has copied already.
        copy = copies.get(memory_of(held)) if held.dtype == dtype else None
        return held.to(dtype, copy=True) if copy is None else copy

    def check(self, value: Saved, path: str) -> None:
        if value is None:
            return
        TensorLeaf(wide_zeros(self._parameter)).check(value, path)
        if self._get is None and bool(value.any()):
            refuse(path, "is not compressed here, and its residual would be lost: give a lower min_numel")

    def load(self, value: Tensor | None) -> None:
        mine = wide_zeros(self._parameter)
        if self._put is not None:
            self._put(mine if value is None else mine.copy_(value))


def _names(owed: State) -> set[str]:
    """The names of the kinds, and of the tensors of each kind."""
    return {*owed, *(f"{kind}.{name}" for kind, tensors in owed.items() for name in tensors)}
