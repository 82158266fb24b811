"""The ranks that share sharded parameters."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..engine.collectives import Collectives
from ..engine.shards import is_sharded, shards
from .torch_collectives import TorchCollectives


def shard_group(parameters: Iterable[Tensor]) -> Collectives | None:
    """The ranks that share parameters, row by row; None if none of them is divided. Raises ``ValueError`` for other
    divisions."""
    divided: list[Any] = [p for p in parameters if shards(p) > 1]
    if not divided:
        return None
    mesh = divided[0].device_mesh
    if mesh.ndim > 1 or any(p.device_mesh != mesh or not p.placements[0].is_shard(0) for p in divided):
        raise ValueError("the matrices must be sharded by rows, all on one mesh of one dimension")
    return TorchCollectives(mesh.get_group())


def shard_groups(parameters: Iterable[Tensor]) -> list[Collectives]:
    """The ranks that share parameters: those of each dimension of each of their meshes."""
    meshes: dict[Any, None] = dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p))  # type: ignore[attr-defined]
    return [TorchCollectives(mesh.get_group(dimension)) for mesh in meshes for dimension in range(mesh.ndim)]
