"""Converts the states of all ranks of one job into one for every rank of another."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from ..engine.modes import modes_off
from ..engine.state import Saved, State, described, joined, refuse, same
from .one_rank import FORMAT

#: A sum in float64, the number of its tensors, and the dtype of the first.
_Sum: TypeAlias = tuple[Tensor, int, torch.dtype]


@modes_off
def reshard(states: Iterable[State]) -> State:
    """Converts the states of all ranks into one for every rank of a job of any size, with or without nodes.

    For resuming on another number of ranks, in other nodes or with another ``bucket_mb``, from the
    :meth:`~hvd_compress.Compressor.state_dict` of every rank, saved after the same step::

        states = (torch.load(f"compression-{rank}.pt") for rank in range(old_ranks))
        compression.load_state_dict(hvd_compress.reshard(states))      # the same on every rank

    Every new rank gets the mean of the old ranks' (or nodes') unsent parts: residuals, velocities, block means. The
    mean over all ranks, which training applies in the end, is therefore unchanged, to rounding. The step stays, and so
    do the common weights and momentum of :class:`~hvd_compress.LocalSteps`. Statistics of the training (quantization
    scales, shares of the slots, histories, PowerSGD's Q) begin anew, as does DeMo's momentum of uncompressed matrices.
    Byte counts stay those of the object that loads.

    Args:
        states: in the order of the ranks. An iterator is read one state at a time.

    Raises:
        ValueError: not the states of ranks 0 to N - 1 of N, in this order and of one step; or the ranks differ in
            a value that cannot be averaged: with :class:`~hvd_compress.LocalSteps` the ranks' parameters, unless
            ``finish()`` was called before saving.
    """
    common: State = {}
    mean = mean_of(_of_all_ranks(states, common))
    return {**common, "owner": None, "owed": mean}


def _of_all_ranks(states: Iterable[Saved], common: State) -> Iterator[Saved]:
    """Returns the unsent part of each rank. Writes to ``common`` the items that belong to no rank."""
    first: State = {}
    count = 0
    for count, state in enumerate(states, 1):
        path = f"states[{count - 1}]"
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            refuse(path, "must be a state_dict() of this version of hvd_compress")
        owner = state.get("owner")
        if not isinstance(owner, dict) or owner.get("rank") != count - 1 or type(owner.get("ranks")) is not int:
            refuse(joined(path, "owner"), f"must be rank {count - 1}, got {described(owner)}")
        rest = {key: value for key, value in state.items() if key not in ("owner", "owed", "shared", "per_rank")}
        if not first:
            first = owner
            common.update(rest)
        if {**owner, "rank": 0} != first or count > owner["ranks"]:
            refuse(
                joined(path, "owner"), f"must be a rank of the same job as {described(first)}, got {described(owner)}"
            )
        _check_same(common, rest, "", count - 1)
        yield state.get("owed")
    if count != first.get("ranks"):
        raise ValueError(f"reshard needs the states of all {first.get('ranks', '')} ranks, got {count or 'none'}")


def _check_same(one: Saved, other: Saved, path: str, rank: int) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            _check_same(one.get(key), other.get(key), joined(path, key), rank)
    elif not same(one, other):
        cure = ": call local.finish() before saving" if path.startswith("local_steps") else ""
        refuse(path, f"differs between rank 0 and rank {rank}, and cannot be averaged{cure}")


def mean_of(ranks: Iterable[Saved]) -> dict[str, dict[str, Tensor | None]]:
    """The mean of the ranks' unsent parts, over the ranks that have one, in float64. An iterator is read one rank at a
    time. Raises ``ValueError`` if the ranks differ in names or shapes."""
    found: dict[str, dict[str, _Sum | None]] = {}
    for count, each in enumerate(ranks):
        if not isinstance(each, dict) or not all(isinstance(tensors, dict) for tensors in each.values()):
            refuse("owed", f"must be dicts of tensors, got {described(each)}")
        if not count:
            found = {kind: dict.fromkeys(tensors) for kind, tensors in each.items()}
        if different := _names(found) ^ _names(each):
            refuse("owed", f"the states have different items: {sorted(different)!r:.200}")
        for kind, tensors in each.items():
            for name, tensor in tensors.items():
                found[kind][name] = _added(found[kind][name], tensor, f"owed.{kind}.{name}")
    return {
        kind: {name: each and (each[0] / each[1]).to(each[2]) for name, each in sums.items()}
        for kind, sums in found.items()
    }


def _added(total: _Sum | None, tensor: Saved, path: str) -> _Sum | None:
    if tensor is None:
        return total
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        refuse(path, f"must be a float tensor or None, got {described(tensor)}")
    if total is None:
        return tensor.double().clone(), 1, tensor.dtype
    if total[0].shape != tensor.shape:
        refuse(path, f"must have one shape on all ranks, got {tuple(total[0].shape)} and {tuple(tensor.shape)}")
    return total[0].add_(tensor.to(total[0].device)), total[1] + 1, total[2]


def _names(owed: State) -> set[str]:
    """The names of the kinds, and of the tensors of each kind."""
    return {*owed, *(f"{kind}.{name}" for kind, tensors in owed.items() for name in tensors)}
