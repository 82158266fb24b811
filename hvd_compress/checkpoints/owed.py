"""The unsent part of a state, by parameter and in the shape of this rank's shard, which fits any layout.

``residual``, and ``velocity`` with momentum: by parameter name a tensor of float32, or float64 as the parameter, or
None where the rank keeps nothing: the parameter is not compressed, or frozen, or another rank of the node has it. The
rest of an exact state, such as quantization scales, shares of the slots and histories, fits one layout only.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import Tensor

from ..engine.engine import Engine
from ..engine.shards import wide_zeros
from ..engine.state import Copies, Leaf, Saved, TensorLeaf, Tree, memory_of, refuse

_Get: TypeAlias = Callable[[], Tensor]
_Put: TypeAlias = Callable[[Tensor], None]


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
