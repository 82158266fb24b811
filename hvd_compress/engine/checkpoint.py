"""Saving and loading of a compressor's state between steps, and its conversion for another number of ranks."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from . import state as states_of
from .engine import Engine
from .modes import modes_off
from .state import Entry, Fixed, Leaf, Tree, described, joined, refuse, same

# Increased when a state of an older version can no longer be loaded.
_FORMAT = 4

_CONVERT = (
    "hvd_compress.reshard(states) converts the states of all ranks into one that every rank of a job of any size may "
    "load"
)


@modes_off
def save(engine: Engine) -> dict[str, Any]:
    """See :meth:`hvd_compress.Compressor.state_dict`."""
    engine.check_generation()
    if engine.local_steps is not None:
        engine.local_steps.drain()
    if engine.collecting:
        raise RuntimeError(
            "state_dict() in the middle of a step; call it after optimizer.step() (or reset(), after a failure)"
        )
    engine.undo_skipped_step()
    with _in_order(engine):
        values: dict[str, Any] = states_of.save(_description(engine))
        if engine.average_waits:
            values = _before_average(engine, values)
    return values


def _before_average(engine: Engine, now: dict[str, Any]) -> dict[str, Any]:
    """The state with what the last average has sent back in the residuals, since the model that is saved with it does
    not contain that average. Leaves the engine in the state ``now``."""
    engine.undo()
    before: dict[str, Any] = states_of.save(_description(engine))
    # A copy: the user may modify what is returned.
    engine.restore = partial(_restore, values=states_of.save(_description(engine)))
    _restore(engine, now)
    return before


def _restore(engine: Engine, values: dict[str, Any]) -> None:
    with _in_order(engine):
        engine.restart()
        states_of.load(_description(engine), values)


@modes_off
def load(engine: Engine, state: Any) -> None:
    """See :meth:`hvd_compress.Compressor.load_state_dict`."""
    states_of.check(_description(engine), state)
    engine.check_generation()  # or the next gradient would undo the loading
    if engine.local_steps is not None:
        engine.local_steps.restart(same_ranks=True)
    engine.reset()
    _restore(engine, state)
    engine.last_average.forget()
    engine.comparison.done = engine.undoable = False
    engine.restore = None


@modes_off
def reshard(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Converts the states of all ranks into one for every rank of a job of any size.

    For resuming on another number of ranks, from the :meth:`~hvd_compress.Compressor.state_dict` of every rank, saved
    after the same step::

        states = (torch.load(f"compression-{rank}.pt") for rank in range(old_ranks))
        compression.load_state_dict(hvd_compress.reshard(states))      # the same on every rank

    What a rank still owes (residuals, velocities, unsent block means) becomes the mean over the old ranks. So the mean
    over ranks, which averages send in the end, is unchanged, to rounding; with equally many ranks the sum, too. Byte
    counts become their means. The rest is the same on all ranks, and stays. Random numbers depend on seed and step.

    Args:
        states: in the order of the ranks. An iterator is read one state at a time.

    Raises:
        ValueError: not the states of ranks 0 to N - 1 of N, in this order and of one step; or the ranks differ in
            something that cannot be averaged: with :class:`~hvd_compress.LocalSteps` the ranks' parameters, unless
            ``finish()`` was called before saving.
    """
    first: dict[str, Any] = {}
    mean: Any = None
    ranks = count = 0
    for count, state in enumerate(states, 1):
        path = f"states[{count - 1}]"
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            refuse(path, "must be a state_dict() of this version of hvd_compress")
        if not isinstance(owner := state.get("owner"), dict) or owner.get("rank") != count - 1:
            refuse(joined(path, "owner"), f"must be rank {count - 1}, got {described(owner)}")
        first, ranks = first or state, ranks or owner.get("ranks", 0)
        if owner.get("ranks") != ranks or count > ranks:
            refuse(joined(path, "owner"), f"must be a rank of the same job of {ranks}, got {described(owner)}")
        _check_same(_same_on_all_ranks(first), _same_on_all_ranks(state), "", count - 1)
        mean = _added(mean, state.get("per_rank"), 1.0 / ranks, "per_rank")
    if not count:
        raise ValueError("reshard needs the states of all ranks, got none")
    if count != ranks:
        raise ValueError(f"reshard needs the states of all {ranks} ranks, got {count}")
    return {**first, "owner": None, "per_rank": _rounded(mean, first["per_rank"])}


class _Owner(Leaf):
    """The rank that a state belongs to, of how many: None if every rank may load it."""

    def __init__(self, engine: Engine) -> None:
        self._own = {"rank": engine.collectives.rank, "ranks": engine.collectives.size}

    def save(self) -> dict[str, int]:
        return self._own

    def check(self, value: Any, path: str) -> None:
        if value is None or same(value, self._own):
            return
        if not (isinstance(value, dict) and value.keys() == self._own.keys()):
            refuse(path, f"must be a rank and a number of ranks, or None, got {described(value)}")
        of = "rank {rank} of {ranks}".format
        refuse(path, f"this is the state of {of(**value)}, and this is {of(**self._own)}; {_CONVERT}")

    def load(self, value: Any) -> None:
        """Does nothing: there is nothing to load."""


def _description(engine: Engine) -> Tree:
    body: dict[str, Tree] = {
        "parameters": {place.piece.name: Fixed(list(place.piece.shape)) for place in engine.places},
        "method_state": engine.method.state(),
        "buckets": {str(work.bucket.index): work.state() for work in engine.works},
        "wire_stats": engine.stats.state(),
    }
    if engine.local_steps is not None:
        body["local_steps"] = engine.local_steps.state()
    return {
        "format": Fixed(_FORMAT, "the state is of another version of hvd_compress"),
        "method": Fixed(type(engine.method).__name__),
        "owner": _Owner(engine),
        "step": Entry(vars(engine), "step", int, low=0),
        "shared": states_of.part_of(body, per_rank=False),
        "per_rank": states_of.part_of(body, per_rank=True),
    }


@contextmanager
def _in_order(engine: Engine) -> Iterator[None]:
    """A context in the stream order of all buckets."""
    with ExitStack() as stack:
        for work in engine.works:
            stack.enter_context(work.bucket.order)
        yield


def _same_on_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in ("owner", "per_rank")}


def _check_same(one: Any, other: Any, path: str, rank: int) -> None:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            _check_same(one.get(key), other.get(key), joined(path, key), rank)
    elif not same(one, other):
        refuse(path, f"differs between rank 0 and rank {rank}, and cannot be averaged")


def _added(total: Any, value: Any, factor: float, path: str) -> Any:
    """``total + factor * value`` in float64; ``total`` is None for 0."""
    if isinstance(value, dict):
        if total is not None and total.keys() != value.keys():
            refuse(path, f"the states have different items: {sorted(map(str, total.keys() ^ value.keys()))!r:.200}")
        parts = {} if total is None else total
        return {key: _added(parts.get(key), item, factor, joined(path, key)) for key, item in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        if total is None:
            return value.double() * factor
        if isinstance(total, Tensor) and total.shape == value.shape:
            return total.add_(value.to(total), alpha=factor)
    elif type(value) in (int, float) and not isinstance(total, dict | Tensor):
        return (total or 0.0) + value * factor
    refuse(path, f"must be a number or a float tensor of one shape on all ranks, got {described(value)}")


def _rounded(mean: Any, like: Any) -> Any:
    if isinstance(mean, dict):
        return {key: _rounded(item, like[key]) for key, item in mean.items()}
    return mean.to(like.dtype) if isinstance(mean, Tensor) else mean
