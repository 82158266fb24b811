"""The base class of all methods, for users and for authors of a method."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from ..checkpoints import one_rank
from ..engine.arguments import NamedParameters, check_integer, check_number, named_pairs
from ..engine.bucket import Bucket
from ..engine.clock import Clock
from ..engine.collectives import Collectives, Nodes
from ..engine.dense import DenseGradient
from ..engine.engine import Engine
from ..engine.membership import Membership
from ..engine.method import Method
from ..engine.modes import modes_off
from ..engine.optimizers import watch
from ..engine.place import Place
from ..engine.shards import local, meshes
from ..guards.dcp import refuse_dcp
from ..guards.unsharded import check_resharded
from .reporting import Reporting

_Clock = TypeVar("_Clock")


class Horovod(Protocol):
    """The clock that takes gradients from Horovod."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Place | DenseGradient | None]: ...

    def decompress(self, tensor: Tensor, ctx: Place | DenseGradient) -> Tensor: ...


@dataclass(frozen=True)
class Surroundings:
    """The carriers and hosts of a compressor, given when the package is put together: a method imports neither.

    ``collectives`` makes those of a ``process_set`` or a ``process_group``; ``clock`` the host's side of an engine,
    with a ``grad_scaler`` or None; ``horovod`` is the class of Horovod's side: Horovod calls the compressor.
    """

    collectives: Callable[[Any, Any], Collectives]
    clock: Callable[[Engine, Any], Clock]
    horovod: type[Horovod]


class Compressor(Reporting, Method):
    """Base class of all methods.

    Give an instance to ``horovod.torch.DistributedOptimizer(compression=...)``, to
    ``DistributedDataParallel.register_comm_hook(compression, hvd_compress.ddp_hook)``, for FSDP2 to
    :func:`hvd_compress.register_fsdp_hooks`, or, in your own loop, to :func:`hvd_compress.average_gradients`. Build it
    after ``hvd.init()`` or ``torch.distributed.init_process_group()``, and after the model is on its device, and
    sharded.

    Parameters with two or more dimensions and at least ``min_numel`` entries are compressed; other gradients are
    averaged uncompressed. Of a sharded parameter (DTensor), this rank's shard counts as the parameter. Averages are
    written into the gradients' own memory.

    Args:
        named_parameters: ``(name, parameter)`` pairs, as ``model.named_parameters()``, or the model itself; the same on
            all ranks, in the same order.
        seed: of all random numbers, an integer, the same on all ranks. torch's generators are not used.
        min_numel: the smallest number of entries of a compressed tensor.
        bucket_mb: capacity of a bucket in MiB of float32 gradients; each bucket is one exchange.
        dense_values: ``"fp32"``, or ``"fp16"`` to send uncompressed tensors in half the bytes, rounded, as Horovod's
            fp16 compression does.
        process_set: the one given to Horovod's optimizer, if any.
        process_group: the one given to DistributedDataParallel, if any; with FSDP2, the group of the replicas, such as
            ``mesh.get_group("replicate")``. Or a torchft ``Manager``: ranks that come and go (``docs/torchft.md``).
        nodes: several GPUs a node (``docs/nodes.md``): gradients are summed inside a node, where the network
            is fast, and the compressor exchanges between nodes; each rank of a node does that for its share of the
            parameters. True: nodes as torchrun or Horovod have started them; a number of nodes, which divides the ranks
            in order; with torch, a ``DeviceMesh`` of the dimensions node and GPU. All ranks must build the compressor
            at the same time. Horovod needs process sets for them.
        grad_scaler: the ``torch.amp.GradScaler`` in use, if any. Residuals then do not depend on the loss scale, and
            the values sent in a step that the scaler skips are added back.
        start_timeout: seconds to wait in the first step for the other ranks, to compare all options and parameters.
        collectives: replaces the host's collectives, for tests and simulations
            (:class:`hvd_compress.carriers.threads.ThreadWorld`).

    Raises:
        ValueError: an argument out of range, duplicate names, no initialised host, a second optimizer that steps the
            parameters, an optimizer with momentum beside momentum correction; nodes with unequal numbers of ranks; an
            FSDP2 model that is unsharded after a validation.
        TypeError: an argument or a gradient of the wrong type.
        RuntimeError: parameters on a GPU for which the CUDA operators were not built; in the first step, and in the
            first one after ``load_state_dict()`` or an elastic reset, ranks whose options or parameters differ.
    """

    engine: Engine
    _around: ClassVar[Surroundings]

    @classmethod
    def surround(cls, around: Surroundings) -> None:
        cls._around = around

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__init__" in vars(cls):  # it may make state, too
            cls.__init__ = modes_off(cls.__init__)  # type: ignore[method-assign]

    @modes_off
    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        seed: int = 0,
        min_numel: int = 1024,
        bucket_mb: float = 32.0,
        dense_values: str = "fp32",
        process_set: Any = None,
        process_group: Any = None,
        nodes: Any = False,
        grad_scaler: Any = None,
        start_timeout: float = 300.0,
        collectives: Collectives | None = None,
    ) -> None:
        if hasattr(self, "arguments"):
            raise TypeError("self.arguments is not read: list in options() what ranks must have in common")
        check_resharded(named_parameters)
        named = named_pairs(named_parameters, f"{type(self).__name__}(model)")
        self._model = weakref.ref(named_parameters) if isinstance(named_parameters, torch.nn.Module) else None
        seed, min_numel = check_integer("seed", seed), check_integer("min_numel", min_numel, 1)
        bucket_mb = check_number("bucket_mb", bucket_mb, above=0)
        start_timeout = check_number("start_timeout", start_timeout, above=0, infinite=True)
        if dense_values not in ("fp16", "fp32"):
            raise ValueError(f"dense_values must be fp16 or fp32, got {dense_values!r}")
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {grad_scaler!r:.80}")
        everyone = collectives or self._around.collectives(process_set, process_group)
        levels = Nodes(everyone) if nodes is False else everyone.in_nodes(nodes)
        #: The ranks that the method's exchange is between: with nodes, one rank of each.
        self.collectives = levels.between
        self._peers = isinstance(everyone, Membership)
        self._common: dict[str, Any] = {"min_numel": min_numel, "bucket_mb": bucket_mb, "dense_values": dense_values}
        self.engine = Engine(self, named, levels, seed=seed, start_timeout=start_timeout, **self._common)
        self.grad_scaler, self.seed = grad_scaler, seed
        if not everyone.ordered:  # Horovod: our hooks must be registered before those of its optimizer
            self._clock = self.clock
        self.engine.comparison.register(self)
        watch(self)

    def options(self) -> dict[str, object]:
        return {**super().options(), **self._common}

    def __repr__(self) -> str:
        engine, options = self.engine, ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        entries, buckets = sum(bucket.numel for bucket in self.buckets), len(engine.works)
        tensors = sum(place is not None for place in engine.place_of)
        total = sum(local(p).numel() for p in engine.parameters)
        return (
            f"{type(self).__name__}({options}; {tensors} of {len(engine.parameters)} tensors compressed "
            f"({entries:,} of {total:,} entries), {buckets} bucket{'s' * (buckets != 1)})"
        )

    @property
    def model(self) -> torch.nn.Module | None:
        """The model that was given in place of its named parameters, while it exists."""
        return None if self._model is None else self._model()

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of compressed parameters; empty if none is compressed."""
        return [work.bucket for work in self.engine.works]

    def shard_groups(self) -> list[Collectives]:
        groups = [mesh.get_group(n) for mesh in meshes(self.engine.parameters) for n in range(mesh.ndim)]
        return [self._around.collectives(None, group) for group in groups]

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.engine.step

    # The clock.

    @property
    def clock(self) -> Clock:
        """The object that begins and ends exchanges: the local steps of this compressor, or the host's side."""
        if self._clock is None:
            with self.engine.entered:  # optimizers of other threads ask for it, too
                self._clock = self._clock or self._around.clock(self.engine, self.grad_scaler)
        return self._clock

    def use(self, kind: type[_Clock]) -> _Clock:
        """The clock, for hosts that pass gradients in. Raises ``RuntimeError`` if it is not of this kind."""
        if self._peers:
            raise RuntimeError(
                "gradients are not exchanged in each step with a torchft.Manager, whose ranks come and go: use local "
                "steps, such as hvd_compress.recipes.low_bit(model, optimizer, period, process_group=manager)"
            )
        clock = self.clock
        if not isinstance(clock, kind):
            raise RuntimeError(f"this compressor {clock.bound}")
        return clock

    def bind(self, clock: Clock) -> None:
        """Lets ``clock`` begin and end exchanges. Only before gradients were exchanged."""
        with self.engine.entered:
            self._clock = clock
        self.engine.comparison.changed()

    @property
    def takes_local_steps(self) -> bool:
        """Whether :class:`~hvd_compress.LocalSteps` uses this compressor, and not a host."""
        return self._clock is not None and self._clock.takes_local_steps

    def compress(self, tensor: Tensor) -> tuple[Tensor, Place | DenseGradient | None]:
        """Called by Horovod with a gradient. Returns the tensor that Horovod averages, and a context. Raises
        ``TypeError`` for another dtype, ``ValueError`` for another device than the parameter's."""
        return self.use(self._around.horovod).compress(tensor)

    def decompress(self, tensor: Tensor, ctx: Place | DenseGradient | None) -> Tensor:
        """Called by Horovod with the tensor that it has averaged. Returns the averaged gradient."""
        return self.passed(tensor) if ctx is None else self.use(self._around.horovod).decompress(tensor, ctx)

    # Between steps.

    def discard_step(self) -> None:
        """Takes back the last average, which is not applied: this rank's part of it is added back to the residuals, and
        sent later.

        Call it on every rank instead of ``optimizer.step()``, after ``optimizer.synchronize()`` (Horovod),
        ``backward()`` (hooks) or ``average_gradients()``, and zero the gradients, which hold that average. Without this
        call, an average counts as applied. It is not needed for steps that a ``GradScaler`` skips if the compressor has
        the scaler. If several averages were computed since the last optimizer step, only the last one is taken back.
        Does nothing if there is none, or with :class:`~hvd_compress.LocalSteps`. Raises ``RuntimeError`` in the middle
        of a step.
        """
        self.engine.clock.discard()

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's state between steps, for ``torch.save`` (``weights_only`` is enough to load it).

        ``owed``: the unsent part, by parameter, which fits any ranks, nodes and buckets. ``shared``: the part of the
        exact state that is the same on all ranks. ``per_rank``: the rest of it, and byte counts. ``owner``: the rank
        and the number of ranks. ``step``, ``method``, ``format``.

        Save it on every rank, after ``optimizer.step()`` and ``GradScaler.update()``. Raises ``RuntimeError`` in the
        middle of a step, ``TypeError`` if ``torch.distributed.checkpoint`` calls it, which needs a
        :class:`~hvd_compress.DCPState`.
        """
        refuse_dcp(self.engine)
        return one_rank.save(self.engine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes bit-exactly from the :meth:`state_dict` that the same rank of equally many ranks saved from a
        compressor with the same arguments, or from :func:`hvd_compress.reshard`. Tensors may be on any device. A step
        in progress is dropped (:meth:`reset`).

        Raises ``ValueError``, and changes nothing, if an item does not fit: another method, version, set of parameters,
        option, rank or number of ranks; a missing or unknown item; a wrong type, dtype, shape or range; a value that is
        not finite. The message begins with the path of the item, such as
        ``per_rank.buckets.0.residual.conv1.weight.entries``.
        """
        one_rank.load(self.engine, state)

    def reset(self) -> None:
        """Drops the step in progress, after a failure; the next gradient begins a new one. Values that were sent in it
        are added back to the residuals, and compressed gradients become zero; with Horovod, what others add to these
        later stays. With ``nodes``, gradients that the node had not summed are lost. Waits for an exchange of local
        steps in flight, unless that has failed."""
        self.engine.clock.reset(wait=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a compressor belongs to its model and optimizer, and cannot be copied with them: copy model.module "
            "instead of the DistributedDataParallel model, and build a new compressor for the copy"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a compressor belongs to its process and cannot be pickled: save model.module (or its state_dict()) "
            "instead of the DistributedDataParallel model, and compression.state_dict(), on every rank its own"
        )
