"""Python objects of all ranks of torch's default process group. Without one, this process is rank 0 of 1."""

from typing import Any

from torch import distributed


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (distributed.get_rank(), distributed.get_world_size()) if _initialized() else (0, 1)


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in their order. All ranks must call it."""
    values = [value]
    if _initialized():
        values = [None] * distributed.get_world_size()
        distributed.all_gather_object(values, value)
    return values


def gather_to_first(value: Any) -> list[Any]:
    """:func:`gather` on rank 0; [] on the others."""
    if not _initialized():
        return [value]
    rank, size = place()
    values = [None] * size if rank == 0 else None
    distributed.gather_object(value, values)
    return values or []


def _initialized() -> bool:
    return distributed.is_available() and distributed.is_initialized()
