"""Sharded parameters (DTensors), recognised without importing torch.distributed."""

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, also on a mesh of one rank."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, a view; any other tensor itself."""
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def any_in_shards(tensor: Tensor) -> bool:
    """Whether an entry is not 0; of a DTensor, on any of its ranks, which all call it. Synchronises a GPU."""
    return bool(cast(Any, tensor).norm().full_tensor() if is_sharded(tensor) else tensor.any())


def wide_zeros(tensor: Tensor) -> Tensor:
    """Zeros in the shape and memory order of this rank's shard, in float32 or a wider dtype."""
    own = local(tensor).detach()
    return torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))


def mesh_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the mesh of a DTensor; of any other tensor ()."""
    return tuple(cast(Any, tensor).device_mesh.shape) if is_sharded(tensor) else ()


def shards(tensor: Tensor) -> int:
    """The number of shards of a DTensor; 1 for any other tensor."""
    return math.prod(mesh_of(tensor))


def place_in_mesh(tensor: Tensor) -> list[int]:
    """The coordinates of this rank's shard in the mesh of a DTensor; of any other tensor []."""
    return list(cast(Any, tensor).device_mesh.get_coordinate()) if is_sharded(tensor) else []


def meshes(tensors: Iterable[Tensor]) -> list[Any]:
    """The meshes of DTensors, each once."""
    return list(dict.fromkeys(cast(Any, tensor).device_mesh for tensor in tensors if is_sharded(tensor)))
