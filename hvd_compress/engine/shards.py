"""Sharded parameters (DTensors): what a rank keeps of them. Recognised without importing torch.distributed."""

from typing import Any, cast

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, also on a mesh of one rank."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, a view; any other tensor itself."""
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def shards(tensor: Tensor) -> int:
    """Into how many shards a DTensor is divided; 1 for any other tensor."""
    return int(cast(Any, tensor).device_mesh.size()) if is_sharded(tensor) else 1


def place_in_mesh(tensor: Tensor) -> list[int]:
    """The coordinates of this rank's shard in the mesh of a DTensor; of any other tensor []."""
    return list(cast(Any, tensor).device_mesh.get_coordinate()) if is_sharded(tensor) else []
