"""Saving and loading of a compressor's state between steps, and its conversion for another number of ranks."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from . import state as states_of
from .driver import Unapplied
from .engine import Engine
from .modes import modes_off
from .shards import place_in_mesh
from .state import Fixed, Leaf, Tree, described, joined, refuse, same

# Increased when a state of an older version can no longer be loaded.
_FORMAT = 5

_CONVERT = (
    "hvd_compress.reshard(states) converts the states of all ranks into one that every rank of a job of any size may "
    "load"
)


@modes_off
def save(engine: Engine) -> dict[str, Any]:
    """See :meth:`hvd_compress.Compressor.state_dict`."""
    engine.check_generation()
    engine.driver.begin_saving()
    with _in_order(engine):
        values: dict[str, Any] = states_of.save(_description(engine))
        if (average := engine.driver.unapplied) is not None:
            values = _before_average(engine, average, values)
    return values


def _before_average(engine: Engine, average: Unapplied, now: dict[str, Any]) -> dict[str, Any]:
    """The state with what the last average has sent back in the residuals, since the model that is saved with it does
    not contain that average. Leaves the engine in the state ``now``."""
    average.undo()
    before: dict[str, Any] = states_of.save(_description(engine))
    # A copy: the user may modify what is returned.
    average.undo_by(partial(_restore, engine, states_of.save(_description(engine))))
    _restore(engine, now)
    return before


def _restore(engine: Engine, values: dict[str, Any]) -> None:
    with _in_order(engine):
        engine.restart()
        states_of.load(_description(engine), _fitted(engine, values))


@modes_off
def load(engine: Engine, state: Any) -> None:
    """See :meth:`hvd_compress.Compressor.load_state_dict`."""
    states_of.check(_description(engine), _fitted(engine, state))
    engine.check_generation()  # or the next gradient would undo the loading
    engine.driver.restart(same_ranks=True)
    _restore(engine, state)
    engine.peer.changed()


@modes_off
def reshard(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Converts the states of all ranks into one for every rank of a job of any size, with or without nodes.

    For resuming on another number of ranks, in other nodes or with another ``bucket_mb``, from the
    :meth:`~hvd_compress.Compressor.state_dict` of every rank, saved after the same step::

        states = (torch.load(f"compression-{rank}.pt") for rank in range(old_ranks))
        compression.load_state_dict(hvd_compress.reshard(states))      # the same on every rank

    What a rank, or a node, still owes (residuals, velocities, unsent block means) becomes the mean over the old ranks,
    or nodes. So this mean, which averages send in the end, is unchanged, to rounding; with equally many ranks the sum,
    too. Byte counts become their means. The rest is the same on all ranks, and stays, except the quantization scales of
    a bucket of other parameters: they are measured again. Random numbers depend on seed and step.

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
    # By the place of a rank in its node: the buckets of its first state, and their means.
    buckets, means = dict[int, tuple[Any, Any]](), dict[int, Any]()
    for count, state in enumerate(states, 1):
        path = f"states[{count - 1}]"
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            refuse(path, "must be a state_dict() of this version of hvd_compress")
        if not isinstance(owner := state.get("owner"), dict) or owner.get("rank") != count - 1:
            refuse(joined(path, "owner"), f"must be rank {count - 1}, got {described(owner)}")
        first, ranks = first or state, ranks or owner.get("ranks", 0)
        place, per_node = owner.get("place", 0), owner.get("ranks_of_a_node", 1)
        if owner.get("ranks") != ranks or count > ranks or per_node != first["owner"].get("ranks_of_a_node"):
            refuse(joined(path, "owner"), f"must be a rank of the same job of {ranks}, got {described(owner)}")
        _check_same(_same_on_all_ranks(first), _same_on_all_ranks(state), "", count - 1)
        rest, own = _without_buckets(state.get("per_rank"))
        like = buckets.setdefault(place, (_without_buckets(state.get("shared"))[1], own))
        _check_same(like[0], _without_buckets(state.get("shared"))[1], "shared.buckets", count - 1)
        mean = _added(mean, rest, 1.0 / ranks, "per_rank")
        means[place] = _added(means.get(place), own, per_node / ranks, "per_rank.buckets")
    if not count:
        raise ValueError("reshard needs the states of all ranks, got none")
    if count != ranks:
        raise ValueError(f"reshard needs the states of all {ranks} ranks, got {count}")
    shared, per_rank = dict[str, Any](), dict[str, Any]()
    for place, (alike, own) in buckets.items():
        shared, per_rank = {**shared, **alike}, {**per_rank, **_rounded(means[place], own)}
    parts = {
        "shared": {**first["shared"], "buckets": shared},
        "per_rank": {**_rounded(mean, _without_buckets(first["per_rank"])[0]), "buckets": per_rank},
    }
    return {**first, "owner": None, **parts}


class _Owner(Leaf):
    """The rank that a state belongs to, of how many, and its place in its node: None if every rank may load it."""

    def __init__(self, engine: Engine) -> None:
        ranks, nodes = engine.collectives, engine.nodes
        self._own = {"rank": ranks.rank, "ranks": ranks.size, "place": nodes.rank, "ranks_of_a_node": nodes.ranks}

    def save(self) -> dict[str, int]:
        return self._own

    def check(self, value: Any, path: str) -> None:
        if value is None or same(value, self._own):
            return
        if not (isinstance(value, dict) and value.keys() == self._own.keys()):
            refuse(path, f"must be a rank and a number of ranks, or None, got {described(value)}")
        of = "rank {rank} of {ranks}".format
        if value["ranks_of_a_node"] != self._own["ranks_of_a_node"]:
            of = "rank {rank} of {ranks}, in nodes of {ranks_of_a_node}".format
        hint = ""
        if value["ranks"] == self._own["ranks"]:
            hint = " (every rank must save and load its own; torch.distributed.checkpoint needs hvd_compress.DCPState)"
        refuse(path, f"this is the state of {of(**value)}, and this is {of(**self._own)}; {_CONVERT}{hint}")

    def load(self, value: Any) -> None:
        """Does nothing: there is nothing to load."""


class _Layout(Leaf):
    """The names of the pieces of each bucket. No option, since parameters come before it."""

    def __init__(self, engine: Engine) -> None:
        self.names = [[piece.name for piece in work.bucket.pieces] for work in engine.works]

    def save(self) -> list[list[str]]:
        return self.names

    def check(self, value: Any, path: str) -> None:
        if not same(value, self.names):
            refuse(path, f"the state has other buckets: bucket_mb and nodes must be the same, or {_CONVERT}")

    def load(self, value: Any) -> None:
        """Does nothing: there is nothing to load."""


def _description(engine: Engine) -> Tree:
    body: dict[str, Tree] = {
        "parameters": {
            place.piece.name: Fixed(list(place.piece.shape)) for place in engine.place_of if place is not None
        },
        "layout": _Layout(engine),
        "method_state": engine.method.state(),
        "buckets": {str(work.bucket.index): work.state() for work in engine.works},
        "wire_stats": engine.stats.state(),
    }
    for place in filter(None, map(place_in_mesh, engine.parameters)):
        body["place_in_mesh"] = Fixed(place, "the state is of another rank of the shard group")
    body |= engine.driver.state()
    return {
        "format": Fixed(_FORMAT, "the state is of another version of hvd_compress"),
        "method": Fixed(type(engine.method).__name__),
        "owner": _Owner(engine),
        "step": engine.state(),
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


def _fitted(engine: Engine, state: Any) -> Any:
    """A state of all ranks in the buckets of this one, by piece. What belongs to a bucket as a whole is taken from the
    state if that has a bucket of the same pieces, else left as it is. Other states, and damaged ones, are returned."""
    if not isinstance(state, dict) or state.get("owner", 0) is not None or not isinstance(state.get("shared"), dict):
        return state
    theirs, layout, tree, fitted = state["shared"].get("layout"), _Layout(engine).names, _description(engine), {}
    if not isinstance(theirs, list) or not all(isinstance(names, list) for names in theirs):
        return state
    assert isinstance(tree, dict)
    for part in ("shared", "per_rank"):
        description, (rest, buckets) = tree[part], _without_buckets(state.get(part))
        if not isinstance(rest, dict) or not isinstance(buckets, dict) or not isinstance(description, dict):
            return state
        old = [(names, buckets.get(str(index))) for index, names in enumerate(theirs)]
        by_piece = {path: value for names, bucket in old for path, value in _by_piece(bucket, names)}
        own = {}
        for index, wanted in description.get("buckets", {}).items():  # type: ignore[union-attr]
            names = layout[int(index)]
            same_pieces = next((bucket for pieces, bucket in old if pieces == names), None)
            own[index] = _fit(wanted, names, by_piece) if same_pieces is None else same_pieces
        fitted[part] = {**rest, **({"buckets": own} if own else {})}
    fitted["shared"]["layout"] = layout
    return {**state, **fitted}


def _by_piece(value: Any, names: list[str], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What in a bucket's values belongs to one of the pieces with these names, by path."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if value.keys() <= set(names):
            yield (*path, key), item
        else:
            yield from _by_piece(item, names, (*path, key))


def _fit(tree: Tree, names: list[str], by_piece: dict[tuple[str, ...], Any], path: tuple[str, ...] = ()) -> Any:
    """The values of a bucket's description: by piece, where they belong to one, else its present ones."""
    if isinstance(tree, Leaf):
        return tree.save()
    if tree.keys() <= set(names):
        return {key: by_piece[(*path, key)] for key in tree if (*path, key) in by_piece}
    return {key: _fit(item, names, by_piece, (*path, key)) for key, item in tree.items()}


def _without_buckets(part: Any) -> tuple[Any, Any]:
    """A part of a state, without that of the buckets, which only their owners have, and the latter."""
    if not isinstance(part, dict):
        return part, {}
    return {key: value for key, value in part.items() if key != "buckets"}, part.get("buckets", {})


def _same_on_all_ranks(state: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in state.items() if key not in ("owner", "per_rank")}
    return {**rest, "shared": _without_buckets(state.get("shared"))[0]}


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
