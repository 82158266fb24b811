"""A compressor's state in checkpoints of torch.distributed.checkpoint (DCP)."""

import io
from typing import Any

import torch
from torch import Tensor

from ..engine import checkpoint, portable
from ..engine import state as states_of
from ..engine.engine import Engine
from ..engine.shards import is_sharded, local, place_in_mesh


class DCPState:
    """A compressor's state for ``torch.distributed.checkpoint``, beside that of the model and of the optimizer.

    A ``Stateful``, whose methods DCP calls on all ranks. On a mesh of the shape on which it was saved, training resumes
    bit-exactly, as with :meth:`Compressor.state_dict() <hvd_compress.Compressor.state_dict>`. On another one, each
    replica gets the mean over the old replicas of what they still owed (residuals, velocities), which DCP divides into
    the new shards; the step and the common weights and momentum of :class:`~hvd_compress.LocalSteps` stay. What
    is measured in training (quantization scales, shares of the slots, histories, PowerSGD's Q) is measured anew, DeMo's
    momentum of uncompressed matrices begins at 0, and byte counts stay those of the loading object::

        dcp.save({"model": ..., "compression": hvd_compress.DCPState(compression)}, checkpoint_id=path)
        ...
        old = hvd_compress.DCPState(compression, saved_on=(2, 4))  # saved by 2 replicas of 4 shards
        dcp.load({"model": ..., "compression": old}, checkpoint_id=path)

    Each replica writes a residual twice: as it is, for the same mesh, and by parameter, for others. (Do not give DCP
    the compressor itself: it would save one rank's state for all.)

    Args:
        compression: a compressor, with ``process_group`` of the replicas and without ``nodes``.
        saved_on: for loading, the number of replicas and the shape of the shard mesh that saved; of DDP, the number of
            ranks only. None: those of this job. After loading, this object saves as any other.

    Raises:
        ValueError: the compressor has ``nodes`` or works under Horovod; on loading, as
            :meth:`~hvd_compress.Compressor.load_state_dict`, if ``saved_on`` is not what saved, and if a shard is not
            compressed here that has a residual.
        RuntimeError: on saving, in the middle of a step, or between an average and the optimizer's step; with
            LocalSteps, while the replicas' weights may differ: DCP saves the parameters of one replica. DCP asks for
            the state before it loads one, too.
    """

    def __init__(self, compression: Any, saved_on: tuple[int, ...] | None = None) -> None:
        self._engine: Engine = compression.engine
        if self._engine.nodes.inside is not None or self._engine.collectives.host != "ddp":
            raise ValueError("DCPState needs a compressor of torch.distributed without nodes: save its state_dict()")
        self._parameters = dict(zip(self._engine.names, self._engine.parameters, strict=True))
        first = next(filter(is_sharded, self._engine.parameters), self._engine.parameters[0])
        self._here = (self._engine.collectives.size, *(_mesh(first).shape if is_sharded(first) else ()))
        self._saved_on = tuple(saved_on or self._here)
        place = [self._engine.collectives.rank, *place_in_mesh(first)]
        #: Of this rank's own state.
        self._key = ", ".join(f"{i} of {n}" for i, n in zip(place, self._here, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """What DCP saves, or loads into."""
        engine, same = self._engine, self._saved_on == self._here
        mesh = _text(self._here) if same else "nothing (saved_on= is for loading)"
        common = {**self._named(states_of.save(portable.shared(engine))), "saved_on": mesh}
        if not same:
            replicas = {str(replica): self._named(portable.owed(engine)) for replica in range(self._saved_on[0])}
            return {"replicas": replicas, "common": common}
        own = io.BytesIO()
        torch.save(checkpoint.save(engine), own)
        if engine.average_waits:
            raise RuntimeError("save after optimizer.step(): the last average has not been applied")
        if engine.local_steps is not None:
            engine.local_steps.check_common()
        replicas = {str(engine.collectives.rank): self._named(portable.owed(engine))}
        return {"own": {self._key: own.getvalue()}, "replicas": replicas, "common": common}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what DCP has read into :meth:`state_dict`."""
        if self._saved_on == self._here:
            own = io.BytesIO(state["own"][self._key])
            checkpoint.load(self._engine, torch.load(own, map_location="cpu", weights_only=True))
            return
        common = dict(state["common"])
        if (mesh := common.pop("saved_on")) != _text(self._saved_on):
            raise ValueError(f"the checkpoint was saved on {mesh}, and saved_on says {_text(self._saved_on)}")
        replicas = [_local(state["replicas"][str(replica)]) for replica in range(self._saved_on[0])]
        portable.load(self._engine, replicas, _local(common))
        self._saved_on = self._here

    def _named(self, values: Any, name: str = "") -> Any:
        """Nested values with tensors by parameter name, as DTensors in which DCP finds this rank's shards."""
        if isinstance(values, dict):
            return {key: self._named(value, key) for key, value in values.items()}
        return self._whole(name, values) if isinstance(values, Tensor) else values

    def _whole(self, name: str, shard: Tensor) -> Tensor:
        parameter: Any = self._parameters[name]
        if not is_sharded(parameter):
            return shard
        from torch.distributed.tensor import DTensor

        shape, stride = parameter.shape, parameter.stride()
        mesh, places = parameter.device_mesh, parameter.placements
        return DTensor.from_local(shard, mesh, places, run_check=False, shape=shape, stride=stride)


def _text(mesh: tuple[int, ...]) -> str:
    return " x ".join(map(str, mesh))


def _mesh(parameter: Any) -> Any:
    return parameter.device_mesh


def _local(values: Any) -> Any:
    """The inverse of :meth:`DCPState._named`."""
    if isinstance(values, dict):
        return {key: _local(value) for key, value in values.items()}
    return local(values) if isinstance(values, Tensor) else values
