"""A file of every rank in a trainer's checkpoint folder: ``hvd_compress-RANK-of-RANKS.pt``; the second training in one
folder has ``hvd_compress_1-RANK-of-RANKS.pt``, and so on."""

import re
from functools import partial
from pathlib import Path

import torch

from ..carriers import world
from .training import Training


def save(training: Training, folder: str | Path, number: int = 0) -> None:
    """Writes this rank's file, and deletes older ones of other numbers of ranks. All ranks must call it."""
    state, (rank, size) = training.state(), world.place()
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, _file(folder, rank, size, number))
    world.gather(None)  # the older files stay until all new ones are there
    for path, ranks in _saved(folder, number).items():
        if ranks != size:
            path.unlink(missing_ok=True)  # every rank may have a folder of its own


def load(training: Training, folder: str | Path, number: int = 0) -> None:
    """Resumes from the files. Raises ``FileNotFoundError``, on all ranks, if a rank misses one that it needs."""
    rank, size = world.place()
    saved = set(_saved(folder, number).values())
    ranks = size if size in saved else max(saved, default=0)
    needed = [rank] if ranks == size else range(ranks)
    present = bool(ranks) and all(_file(folder, other, ranks, number).exists() for other in needed)
    seen = world.gather((ranks, present))
    if not all(found for _, found in seen) or len(set(seen)) > 1:
        missing = [other for other, (_, found) in enumerate(seen) if not found]
        raise FileNotFoundError(
            f"{folder}: the files {_name(number)}-RANK-of-RANKS.pt are missing on rank {missing or 'some'}. Every rank "
            "reads what it has saved, and needs a folder that all ranks share or its own; a checkpoint of a training "
            "without hvd_compress is not resumed but loaded into the model"
        )
    read = partial(torch.load, map_location="cpu", weights_only=True)
    training.load(ranks, lambda other: read(_file(folder, other, ranks, number)))


def _name(number: int) -> str:
    return f"hvd_compress_{number}" if number else "hvd_compress"


def _file(folder: str | Path, rank: int, ranks: int, number: int) -> Path:
    return Path(folder, f"{_name(number)}-{rank}-of-{ranks}.pt")


def _saved(folder: str | Path, number: int) -> dict[Path, int]:
    """The files, and the number of ranks of each."""
    paths = Path(folder).glob(f"{_name(number)}-*.pt")
    names = [(path, re.fullmatch(rf"{_name(number)}-\d+-of-(\d+)\.pt", path.name)) for path in paths]
    return {path: int(name[1]) for path, name in names if name}
