from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..engine.collectives import Collectives
from ..engine.shards import is_sharded
from .torch_collectives import TorchCollectives


def shard_groups(parameters: Iterable[Tensor]) -> list[Collectives]:
    """The ranks that share parameters: those of each dimension of each of their meshes."""
    meshes: dict[Any, None] = dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p))  # type: ignore[attr-defined]
    return [TorchCollectives(mesh.get_group(dimension)) for mesh in meshes for dimension in range(mesh.ndim)]
