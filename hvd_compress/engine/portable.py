"""The part of a state that fits any division of the model into shards: by parameter, in the shape of this rank's shard.

It has what ranks still owe (residuals, velocities), the step, and the common weights of local steps. The rest, such as
quantization scales and shares of the slots, belongs to the buckets of one division and is measured again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import state as states_of
from .engine import Engine
from .modes import modes_off
from .shards import local
from .state import Fixed, Tree, joined, refuse

_FORMAT = 2

#: Kind ("residual", "velocity") and name of a parameter: a tensor in the shape of this rank's shard.
Owed = dict[str, dict[str, Tensor]]
_Kind: TypeAlias = tuple[str, list[tuple[int, str]], Callable[[int], Tensor | None], Callable[[int, Tensor], None]]


@modes_off
def owed(engine: Engine) -> Owed:
    """What this replica owes: copies, for all trained parameters that a rank may compress, or have a velocity of."""
    return {
        kind: {name: _zeros(engine, number) if (held := get(number)) is None else held for number, name in numbers}
        for kind, numbers, get, _ in _kinds(engine)
    }


def shared(engine: Engine) -> Tree:
    """Describes what all replicas have in common. The tensors in it are by parameter name."""
    method: Tree = Fixed(type(engine.method).__name__)
    tree = {"format": Fixed(_FORMAT), "method": method, "step": engine.state()}
    tree |= {key: part for key, part in engine.method.state().items() if key == "density"}
    return {**tree, **engine.driver.state()}


@modes_off
def load(engine: Engine, replicas: Sequence[Owed], common: Any) -> None:
    """Loads what all old replicas owed, of which each new one gets the mean, and what they had in common. Raises
    ``ValueError``, and changes nothing, if anything does not fit."""
    description = shared(engine)
    states_of.check(description, common)
    means = {kind: _means(engine, replicas, kind, numbers) for kind, numbers, *_ in _kinds(engine)}
    engine.check_generation()  # or the next gradient would undo the loading
    engine.driver.restart(same_ranks=True)
    engine.restart()
    states_of.load(description, common)
    for kind, numbers, _, put in _kinds(engine):
        for number, name in numbers:
            put(number, means[kind][name])
    engine.peer.changed()


def _kinds(engine: Engine) -> Iterator[_Kind]:
    """What a replica owes: its name, the parameters, numbered, and how to read and to write it. The parameters are the
    same on all ranks, whatever part of them a rank has."""
    named = enumerate(zip(engine.names, engine.parameters, strict=True))
    trained = [(number, name) for number, (name, p) in named if p.requires_grad and p.is_floating_point()]
    matrix = [p.dim() >= 2 for p in engine.parameters]  # which may be compressed
    numbers = [item for item in trained if matrix[item[0]]]
    yield "residual", numbers, partial(_held, engine), partial(_hold, engine)
    if (velocities := engine.method.velocities) is not None:
        numbers = [item for item in trained if velocities.of_compressed or not matrix[item[0]]]
        yield "velocity", numbers, lambda number: velocities.get(number).clone(), velocities.set


def _held(engine: Engine, number: int) -> Tensor | None:
    if (place := engine.place_of[number]) is None:
        return None
    with place.work.bucket.order:
        return place.work.held(place.piece).clone()


def _hold(engine: Engine, number: int, residual: Tensor) -> None:
    if (place := engine.place_of[number]) is not None:
        with place.work.bucket.order:
            place.work.hold(place.piece, residual)


def _means(engine: Engine, replicas: Sequence[Owed], kind: str, numbers: list[tuple[int, str]]) -> dict[str, Tensor]:
    found = {}
    for number, name in numbers:
        zeros = _zeros(engine, number)
        mean = zeros.double()
        for replica in replicas:
            mean += replica[kind][name]
        mean /= len(replicas)
        if not bool(mean.isfinite().all()):
            refuse(joined(kind, name), "must be finite, has NaN or infinity")
        if kind == "residual" and engine.place_of[number] is None and bool(mean.any()):
            refuse(joined(kind, name), "is not compressed here, and its residual would be lost: give a lower min_numel")
        found[name] = mean.to(zeros.dtype)
    return found


def _zeros(engine: Engine, number: int) -> Tensor:
    parameter = engine.parameters[number]
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(local(parameter), dtype=wide, requires_grad=False)
