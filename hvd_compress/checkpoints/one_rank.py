"""The state of one rank: saved, and loaded into the same layout, or converted from the states of other ranks.

The unsent part, by parameter (:mod:`~hvd_compress.checkpoints.owed`), fits any layout: other ranks, nodes, buckets or
meshes. The exact state of the buckets fits this rank in this layout. A converted state has ``owner`` None and no exact
part.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial

from ..engine import state as states_of
from ..engine.engine import Engine
from ..engine.membership import Membership
from ..engine.modes import modes_off
from ..engine.shards import place_in_mesh
from ..engine.state import Fixed, Saved, State, Tree
from .owed import owed

#: Increased when a state of an older version can no longer be loaded.
FORMAT = 7

_CONVERT = "hvd_compress.reshard(states) converts the states of all ranks into one that every rank of any job may load"


@modes_off
def save(engine: Engine) -> State:
    engine.check_generation()
    engine.clock.begin_saving()
    with _in_order(engine):
        values: State = states_of.save(_whole(engine))
        if engine.clock.unapplied:
            values = _before_average(engine, values)
    return values


@modes_off
def save_converted(engine: Engine) -> State:
    """A state that fits any layout. Also in the middle of a step."""
    with _in_order(engine):
        values: State = states_of.save(_converted(engine))
    return values


@modes_off
def load(engine: Engine, state: Saved) -> None:
    converted = isinstance(state, dict) and state.get("owner", 0) is None
    states_of.check(_converted(engine) if converted else _whole(engine), state)
    engine.check_generation()  # or the next gradient would undo the loading
    engine.clock.restart(same_ranks=True)
    _restore(engine, state)


def place_of_shards(engine: Engine) -> list[int]:
    """The place of this rank in the mesh of the shards; [] if no parameter is sharded."""
    return next(filter(None, map(place_in_mesh, engine.parameters)), [])


def _before_average(engine: Engine, now: State) -> State:
    """The state before the last average, which the saved model lacks. Leaves the engine in the state ``now``."""
    engine.clock.undo()
    before: State = states_of.save(_whole(engine))
    # A copy: the user may modify the result.
    engine.clock.undo_by(partial(_restore, engine, deepcopy(before)))
    _restore(engine, now)
    return before


def _restore(engine: Engine, values: State) -> None:
    with _in_order(engine):
        engine.restart()
        # A restart may replace the memory that an earlier description refers to.
        states_of.load(_converted(engine) if values["owner"] is None else _exact(engine), values)


def _converted(engine: Engine) -> dict[str, Tree]:
    return {**_common(engine, Fixed(None)), "owed": owed(engine)}


def _whole(engine: Engine) -> dict[str, Tree]:
    # The unsent part comes last: it shares the copies of residuals.
    return {**_exact(engine), "owed": owed(engine)}


def _exact(engine: Engine) -> dict[str, Tree]:
    ranks, per_node = engine.collectives, engine.nodes.ranks
    owner = {"rank": ranks.rank, "ranks": ranks.size, "ranks_of_a_node": per_node}
    if isinstance(ranks, Membership):  # which has no rank of its own
        owner = {"peers": True}
    hint = f"every rank loads its own; torch.distributed.checkpoint needs hvd_compress.DCPState; {_CONVERT}"
    layout = [[piece.name for piece in work.bucket.pieces] for work in engine.works]
    body: dict[str, Tree] = {
        "parameters": {place.piece.name: Fixed(list(place.piece.shape)) for place in engine.place_of if place},
        "layout": Fixed(layout, f"other buckets: bucket_mb and nodes must be the same, or {_CONVERT}"),
        "method_state": engine.method.state(),
        "buckets": {str(work.bucket.index): work.state() for work in engine.works},
        "wire_stats": engine.stats.state(),
    }
    parts = {name: states_of.part_of(body, name == "per_rank") for name in ("shared", "per_rank")}
    return {**_common(engine, Fixed(owner, hint)), **parts}


def _common(engine: Engine, owner: Fixed) -> dict[str, Tree]:
    return {
        "format": Fixed(FORMAT, "the state is of another version of hvd_compress"),
        "method": Fixed(type(engine.method).__name__),
        "owner": owner,
        "place_in_mesh": Fixed(place_of_shards(engine), "the state is of another rank of the shard group"),
        "step": engine.state(),
        **engine.clock.state(),
    }


@contextmanager
def _in_order(engine: Engine) -> Iterator[None]:
    """A context in the stream order of all buckets."""
    with ExitStack() as stack:
        for work in engine.works:
            stack.enter_context(work.bucket.order)
        yield
