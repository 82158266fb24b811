"""Weights of each rank that another callback has put into a model, such as averages over time (EMA, SWA)."""

import torch

from ..carriers import world
from ..engine.dense import as_real
from ..engine.engine import Engine
from ..engine.hashes import hash_of
from ..engine.modes import modes_off
from ..engine.shards import local, place_in_mesh
from ..local.buffers import Buffers, average_in_place


@modes_off
def hash_of_weights(model: torch.nn.Module) -> int:
    """A hash of this rank's parameters."""
    return hash_of(local(p.detach()) for p in model.parameters())


@modes_off
def average_replaced(model: torch.nn.Module, engine: Engine) -> None:
    """Averages parameters and buffers, unless equal on all ranks, unnoticed by local steps. All ranks must call it."""
    parameters = list(model.parameters())
    shard = tuple(tuple(place_in_mesh(p)) for p in parameters)
    seen = set(world.gather((shard, hash_of_weights(model), hash_of(map(local, model.buffers())))))
    if len(seen) == len({shard for shard, *_ in seen}):
        return
    with engine.entered:
        floating = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        label = f"{engine.exchanges.label}.replaced"
        average_in_place((as_real(local(p.detach())) for p in floating), engine.collectives, label)
        Buffers(model, engine, "replaced").exchange()
