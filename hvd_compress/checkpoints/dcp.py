"""A compressor's state in checkpoints of torch.distributed.checkpoint (DCP)."""

import io
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..engine.arguments import check_integer
from ..engine.engine import Engine
from ..engine.membership import Membership
from ..engine.shards import is_sharded, local, mesh_of, wide_zeros
from ..engine.state import Leaf, Recorded, Saved, State, Tree
from ..guards.dcp import SAVERS, callers
from . import one_rank
from .convert import mean_of
from .owed import owed

# The key of the items that depend on the mesh. It sorts before all others: DCP looks for all keys before it reads
# anything, and its error contains the first one that is missing. load_state_dict() compares meshes of
# which no key is missing.
_BY_MESH = "by mesh (if missing: DCPState's saved_on= must be the mesh that saved, which saved_on=(1,) tells)"
# The items of a state that fit any mesh, beside the replicas' unsent parts.
_COMMON = ("format", "method", "step", "local_steps")


class DCPState:
    """A compressor's state for ``torch.distributed.checkpoint``, beside that of the model and of the optimizer.

    A ``Stateful``, whose methods DCP calls on all ranks. On a mesh of the shape on which it was saved, training resumes
    bit-exactly, as with :meth:`Compressor.state_dict() <hvd_compress.Compressor.state_dict>`. On another one, the state
    is converted as by :func:`hvd_compress.reshard`, and DCP divides the replicas' residuals into the new shards::

        dcp.save({"model": ..., "compression": hvd_compress.DCPState(compression)}, checkpoint_id=path)
        ...
        old = hvd_compress.DCPState(compression, saved_on=(2, 4))  # saved by 2 replicas of 4 shards
        dcp.load({"model": ..., "compression": old}, checkpoint_id=path)

    Each replica writes a residual twice: as it is, for the same mesh, and by parameter, for others. (Do not give DCP
    the compressor itself: it would save one rank's state for all.)

    Args:
        compression: a compressor, with ``process_group`` of the replicas and without ``nodes``, or the
            :class:`~hvd_compress.LocalSteps` of one.
        saved_on: for loading, the number of replicas and the shape of the shard mesh that saved; of DDP, the number of
            ranks only. None: those of this job. After loading, this object saves as any other.

    Raises:
        TypeError: ``compression`` is neither; ``saved_on`` is not a sequence of integers.
        ValueError: the compressor has ``nodes``, works under Horovod or on torchft; an entry of ``saved_on`` below 1;
            on loading, as :meth:`~hvd_compress.Compressor.load_state_dict`, if ``saved_on`` is another mesh than the
            one that saved, and if a shard with a residual is not compressed here.
        RuntimeError: on saving, in the middle of a step, between an average and the optimizer's step, or with the
            ``saved_on`` of another mesh; with LocalSteps, while the replicas' weights may differ: DCP saves the
            parameters of one replica. DCP asks for the state before it loads one, too.

    If ``saved_on`` is wrong or was forgotten, and there were fewer ranks or replicas than it says, the error is DCP's
    ``CheckpointException``: ``Missing key in checkpoint state_dict: compression.by mesh (if missing: ...``.
    """

    def __init__(self, compression: Any, saved_on: Sequence[int] | None = None) -> None:
        engine = getattr(getattr(compression, "compression", compression), "engine", None)
        if not isinstance(engine, Engine):
            raise TypeError(f"compression must be a compressor such as hvd_compress.IWP, got {compression!r:.80}")
        self._engine, self._alive = engine, compression  # an engine does not keep its compressor alive
        if isinstance(engine.collectives, Membership):
            raise ValueError("ranks that come and go have no place in a DCP checkpoint: save the state_dict() of each")
        if engine.nodes.inside is not None or not engine.collectives.ordered:
            raise ValueError("DCPState needs a compressor of torch.distributed without nodes: save its state_dict()")
        self._parameters = dict(zip(engine.names, engine.parameters, strict=True))
        first = next(filter(is_sharded, engine.parameters), engine.parameters[0])
        self._here = (engine.collectives.size, *mesh_of(first))
        self._saved_on = self._here if saved_on is None else _checked(saved_on)
        number, places = 0, [engine.collectives.rank, *one_rank.place_of_shards(engine)]
        for place, size in zip(places, self._here, strict=True):
            number = number * size + place
        #: The key of this rank's own state, numbered alike on all meshes, so that a smaller one finds all its keys.
        self._key = f"rank {number}"

    def state_dict(self) -> State:
        """Called by DCP, which saves the result or loads into it."""
        engine, same = self._engine, self._saved_on == self._here
        if not same and f"{SAVERS}saver" in callers():
            raise RuntimeError(
                f"saved_on={self._saved_on} is for loading, and nothing was loaded: to save on {self._here}, give DCP "
                "hvd_compress.DCPState(compression)"
            )
        numbers = [engine.collectives.rank] if same else range(self._saved_on[0])
        states = [one_rank.save(engine) if same else one_rank.save_converted(engine) for _ in numbers]
        if same and engine.clock.unapplied:
            raise RuntimeError("save after optimizer.step(): the last average has not been applied")
        if same:
            engine.clock.check_equal_weights()
        replicas = {str(n): self._trained(state.pop("owed")) for n, state in zip(numbers, states, strict=True)}
        by_mesh: State = {f"replica {number}": True for number in numbers}
        common = {key: self._named(states[0][key]) for key in _COMMON if key in states[0]}
        common["saved_on"] = "nothing (saved_on= is for loading)"
        if same:
            torch.save(states[0], own := io.BytesIO())
            by_mesh[self._key], common["saved_on"] = own.getvalue(), str(self._here)
        return {_BY_MESH: by_mesh, "replicas": replicas, "common": common}

    def load_state_dict(self, state: State) -> None:
        """Called by DCP after it has read into the :meth:`state_dict`."""
        engine, common = self._engine, dict(state["common"])
        if (mesh := common.pop("saved_on")) != str(self._saved_on):
            default = ", that of this job" if self._saved_on == self._here else ""
            raise ValueError(
                f"DCPState: saved_on must be the mesh that saved, {mesh}, and is {self._saved_on}{default}"
            )
        frozen = {kind: dict.fromkeys(cast(dict[str, Any], tensors)) for kind, tensors in owed(engine).items()}
        replicas = {
            number: {kind: {**frozen[kind], **tensors} for kind, tensors in replica.items()}
            for number, replica in tree_map_only(Tensor, local, state["replicas"]).items()
        }
        if self._saved_on == self._here:
            own = torch.load(io.BytesIO(state[_BY_MESH][self._key]), map_location="cpu", weights_only=True)
            one_rank.load(engine, {**own, "owed": replicas[str(engine.collectives.rank)]})
        else:
            here = {"owner": None, "place_in_mesh": one_rank.place_of_shards(engine)}
            mean = mean_of(replicas[str(number)] for number in range(self._saved_on[0]))
            values = {**tree_map_only(Tensor, local, common), **here, "owed": mean}
            one_rank.load(engine, _unrecorded(engine.clock.state(), values) if here["place_in_mesh"] else values)
            self._saved_on = self._here

    def _trained(self, owed: dict[str, dict[str, Tensor | None]]) -> State:
        """This rank's unsent part of trained parameters; zeros in place of None, since other ranks may have one."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in owed}
        for kind, tensors in owed.items():
            for name, held in tensors.items():
                if (p := self._parameters[name]).requires_grad:
                    found[kind][name] = whole(wide_zeros(p) if held is None else held, p)
        return found

    def _named(self, values: Saved, name: str = "") -> Saved:
        """Nested values with tensors by parameter name, as DTensors in which DCP finds this rank's shards."""
        if isinstance(values, dict):
            return {key: self._named(value, key) for key, value in values.items()}
        return whole(values, self._parameters[name]) if isinstance(values, Tensor) else values


def _checked(mesh: Saved) -> tuple[int, ...]:
    if isinstance(mesh, str) or not isinstance(mesh, Sequence) or not mesh:
        raise TypeError(f"saved_on must be the mesh that saved, such as (2, 4), or (8,) of DDP, got {mesh!r:.80}")
    return tuple(check_integer("an entry of saved_on", size, 1) for size in mesh)


def _unrecorded(tree: Tree, value: Saved) -> Saved:
    """A value of a description with 0 in place of each hash."""
    if isinstance(tree, Leaf):
        return 0 if isinstance(tree, Recorded) else value
    return {key: _unrecorded(tree[key], part) if key in tree else part for key, part in value.items()}


def whole(shard: Tensor, like: Tensor) -> Tensor:
    """The DTensor with ``shard`` on this rank, sharded as ``like``; ``shard`` itself if ``like`` is no DTensor."""
    if not is_sharded(like):
        return shard
    parameter: Any = like.detach()
    mesh, places, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    found: Tensor = type(parameter).from_local(shard, mesh, places, run_check=False, shape=shape, stride=stride)
    return found
