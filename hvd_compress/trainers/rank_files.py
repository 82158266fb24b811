"""A file of every rank in a trainer's checkpoint folder: ``hvd_compress-RANK-of-RANKS.pt``."""

import re
from pathlib import Path
from typing import Any

import torch

from ..carriers import world
from .training import Training


def save(training: Training, folder: str | Path) -> None:
    """Writes this rank's file, and deletes those of other numbers of ranks, which an older training has left. All ranks
    must call it."""
    state, (rank, size) = training.state(), world.place()
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, _file(folder, rank, size))
    world.gather(None)  # the older files stay until all new ones are there
    for path, ranks in _saved(Path(folder)).items():
        if ranks != size:
            path.unlink(missing_ok=True)  # every rank may have a folder of its own


def load(training: Training, folder: str | Path) -> None:
    """Resumes from the files. Raises ``FileNotFoundError``, on all ranks, if a rank misses one that it needs."""
    rank, size = world.place()
    saved = set(_saved(Path(folder)).values())
    ranks = size if size in saved else max(saved, default=0)
    needed = [rank] if ranks == size else range(ranks)
    present = bool(ranks) and all(_file(folder, number, ranks).exists() for number in needed)
    seen = world.gather((ranks, present))
    if not all(found for _, found in seen) or len(set(seen)) > 1:
        missing = [number for number, (_, found) in enumerate(seen) if not found]
        raise FileNotFoundError(
            f"{folder}: the files hvd_compress-RANK-of-RANKS.pt are missing on rank {missing or 'some'}. Every rank "
            "reads what it has saved, and needs a folder that all ranks share or its own; a checkpoint of a training "
            "without hvd_compress is not resumed but loaded into the model"
        )
    training.load(ranks, lambda number: _read(folder, number, ranks))


def _read(folder: str | Path, rank: int, ranks: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(_file(folder, rank, ranks), map_location="cpu", weights_only=True)
    return state


def _file(folder: str | Path, rank: int, ranks: int) -> Path:
    return Path(folder, f"hvd_compress-{rank}-of-{ranks}.pt")


def _saved(folder: Path) -> dict[Path, int]:
    """The files, and the number of ranks of each."""
    paths = folder.glob("hvd_compress-*.pt")
    names = [(path, re.fullmatch(r"hvd_compress-\d+-of-(\d+)\.pt", path.name)) for path in paths]
    return {path: int(name[1]) for path, name in names if name}
