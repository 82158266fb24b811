"""The Horovod protocol, once for all methods: which parameter, which bucket, which step.

Horovod calls ``compress(p.grad)`` from the backward hooks, in an order that differs from rank to rank, and
``decompress`` only after every gradient of the step has been through ``compress``. Between the two, this driver
runs one *exchange* per bucket: a generator that reads like the paper's algorithm and yields a
:class:`~hvd_compress.collectives.Request` whenever bytes must cross the network. It is resumed by polling in every
later ``compress`` (so it overlaps backward) and to its end in the first ``decompress`` of the step. Nothing in
``compress`` ever waits: every rank has started all that the others wait for before it waits itself.
"""

import abc
import threading
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from .. import ops
from ..engine.arguments import named_pairs, whole_number
from ..engine.bucket import Bucket, Segment, fill, in_order_of, is_dense
from ..engine.collectives import Collectives, HorovodCollectives
from ..engine.exchange import Driver, Exchange
from ..engine.optimizer_watch import OptimizerGuard
from ..hosts.lookup import GradientLookup
from ..engine.wire_stats import Traffic

# float64 is for checking gradients, not for training over a slow network: it goes as it is.
_COMPRESSED = (torch.float32, torch.float16, torch.bfloat16)


class _Ticket(NamedTuple):
    """``decompress`` finds the result by this: a segment of a bucket."""

    bucket: Bucket
    position: int


class _Dense(NamedTuple):
    """A parameter's gradient that travels as it is, flat; ``strides`` are those of the payload's memory order, and
    ``scale`` is what it was divided by."""

    number: int
    grad: Tensor
    strides: tuple[int, ...]
    scale: float


# Entered for every gradient: classes, which cost a fraction of generators.


class _Clock:
    """What the body takes, without its waiting, is the compressor's own time."""

    def __init__(self, driver: Driver, traffic: Traffic) -> None:
        self._driver, self._traffic = driver, traffic

    def __enter__(self) -> None:
        self._begin = time.perf_counter() - self._driver.waited

    def __exit__(self, *error: object) -> None:
        self._traffic.busy(time.perf_counter() - self._driver.waited - self._begin)


class _OrAbandon:
    """A failed exchange must not haunt the steps after it."""

    def __init__(self, compressor: "Compressor") -> None:
        self._compressor = compressor

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None:
            self._compressor.reset()


def _without_autograd() -> AbstractContextManager[Any]:
    """In backward's hooks it is off already, as a rule."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


class Compressor(abc.ABC):
    """Base of all methods; give an instance to ``horovod.torch.DistributedOptimizer(compression=...)``.

    Parameters of two or more dimensions and at least ``min_numel`` entries are compressed; the others, and gradients it
    does not know, go through Horovod as they are. The result is written into the gradient's own memory.

    Args:
        named_parameters: ``(name, parameter)`` pairs, as for Horovod's optimizer; on all ranks the same, in the same
            order.
        seed: of all randomness; equal on all ranks. torch's own generators are never touched.
        min_numel: smallest tensor that is compressed, in entries.
        bucket_mb: a bucket's capacity in MiB of float32 gradients; each bucket is one exchange.
        dense_values: how the tensors travel that are not compressed: ``"fp32"``, or ``"fp16"`` for half their bytes,
            rounded as Horovod's own fp16 compression rounds them: what is lost of these is lost.
        process_set: the one given to Horovod's optimizer, if any.
        grad_scaler: the ``torch.amp.GradScaler`` in use, if any: residuals are then kept in unscaled units.
        collectives: what carries the exchanges; Horovod by default.

    Raises:
        ValueError: an argument outside its range, duplicate names, a parameter that moved to another device, a second
            optimizer stepping the parameters.
        TypeError: an argument or a gradient of the wrong type.
        RuntimeError: parameters on a GPU for which the CUDA operators were not built.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        seed: int = 0,
        min_numel: int = 1024,
        bucket_mb: float = 32.0,
        dense_values: str = "fp32",
        process_set: Any = None,
        grad_scaler: Any = None,
        collectives: Collectives | None = None,
    ) -> None:
        named = named_pairs(named_parameters)
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb must be above 0, got {bucket_mb}")
        if dense_values not in ("fp16", "fp32"):
            raise ValueError(f"dense_values must be fp16 or fp32, got {dense_values!r}")
        if min_numel < 1:
            raise ValueError(f"min_numel must be at least 1, got {min_numel}")
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler or None, got {grad_scaler!r:.80}")
        self._seed = whole_number(seed)
        self._dense_half = dense_values == "fp16"
        self._scaler = grad_scaler
        self._collectives: Collectives = collectives or HorovodCollectives(process_set)
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        compressible = [
            (name, p)
            for name, p in named
            if p.requires_grad and p.dtype in _COMPRESSED and p.dim() >= 2 and p.numel() >= min_numel and is_dense(p)
        ]
        self._buckets = fill(compressible, int(bucket_mb * 2**20))
        for bucket in self._buckets:
            ops.check_device(bucket.device)
        self._tickets = {
            id(segment.parameter): _Ticket(bucket, position)
            for bucket in self._buckets
            for position, segment in enumerate(bucket.segments)
        }
        self.traffic = Traffic()
        # Horovod matches collectives by name: this one is the same on every rank that holds these parameters,
        # whatever other compressors a rank may have built (a count of instances would not be). It says nothing of the
        # method: ranks with different ones must meet, to be told, and not wait for each other.
        shapes = ";".join(f"{name}:{tuple(p.shape)}" for name, p in named)
        self._driver = Driver(self._collectives, self.traffic, f"hvd_compress.{zlib.crc32(shapes.encode()):08x}")
        self._lookup = GradientLookup(self._parameters)
        self._guard = OptimizerGuard(self._parameters, self)
        # Gradients of a model spread over several GPUs come from several threads.
        self._lock = threading.RLock()
        self._generation = self._collectives.generation()
        self._step = 0
        self._collecting = False
        # Of the step under way.
        self._scale, self._ranks = 1.0, 1
        self._warned: set[str] = set()

    # What a method provides.

    def begin(self, bucket: Bucket) -> None:
        """A new step begins: plan it. Must not communicate."""

    @abc.abstractmethod
    def receive(self, bucket: Bucket, position: int, grad: Tensor) -> None:
        """Take in the gradient of ``bucket.segments[position]``, laid out in the parameter's memory order. Must not
        communicate."""

    @abc.abstractmethod
    def exchange(self, bucket: Bucket) -> Exchange:
        """The algorithm: yields requests, is sent their results, ends with the bucket's gradients assigned."""

    def _passed(self, tensor: Tensor) -> Tensor:
        """What Horovod has averaged of a gradient that is none of ours, or sparse: the last word on it."""
        return tensor

    def settle(self, number: int, grad: Tensor) -> None:
        """The averaged gradient of a parameter that travelled dense is in ``grad``: the last word on it."""

    def finished(self) -> None:
        """All exchanges of the step are done, and backward is over: weights may be touched. Must not communicate."""

    def undo(self, bucket: Bucket) -> None:
        """The last step's average was never applied (a ``GradScaler`` skipped the step): take back what was sent."""

    def restart(self, bucket: Bucket) -> None:
        """The ranks were formed anew: forget what new ranks cannot know. The residual may stay."""

    def held(self, bucket: Bucket, segment: Segment) -> Tensor:
        """What this rank holds back of a parameter's gradients, in the parameter's shape: float32."""
        return segment.reshaped(bucket.peek(segment))

    def held_norm(self, bucket: Bucket) -> Tensor:
        """The L2 norm of all that this rank holds back in a bucket: float32, ()."""
        norm: Tensor = torch.stack([bucket.peek(segment).norm() for segment in bucket.segments]).norm()
        return norm

    def saved(self, segment: Segment, flat: Tensor) -> Tensor:
        """What a checkpoint holds of a bucket-wide tensor: a view of the segment's part, as the method understands
        it."""
        return segment.shaped(flat)

    def method_state(self) -> dict[str, Any]:
        """What a checkpoint needs beyond the buckets' ``state``, by parameter name where it belongs to one."""
        return {}

    def load_method_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`method_state`; raises ``ValueError``, before changing anything, if it does not fit."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` if this optimizer and this compressor do not fit; called before each of its steps."""
        self._collectives.check_optimizer(optimizer)
        if getattr(optimizer, "_compression", None) is self and (strangers := self._strangers(optimizer)):
            self._meet(strangers)

    def _strangers(self, optimizer: Optimizer) -> int:
        """How many of the optimizer's parameters, of those that are trained, this compressor does not know."""
        known = self._lookup.is_parameter
        return sum(p.requires_grad and not known(p) for group in optimizer.param_groups for p in group["params"])

    def _meet(self, strangers: int) -> None:
        self._warn(
            f"{strangers} of the optimizer's parameters were not given to this compressor: their gradients travel as "
            "they are, and stats() does not count them"
        )

    # Horovod's protocol.

    def compress(self, tensor: Tensor) -> tuple[Tensor, object]:
        """Called by Horovod with a gradient; returns what Horovod's own allreduce is to average, and a context.

        Raises:
            TypeError: the gradient is not of a floating dtype.
            ValueError: its parameter moved to another device since the compressor was built.
        """
        with self._lock, self._clock(), _without_autograd():
            number = self._lookup.find(tensor)
            if number is None:
                return self._pass(tensor)
            self._check_gradient(number, tensor)
            self.formed_anew()
            if not self._collecting:
                self._begin_step()
            ticket = self._tickets.get(id(self._parameters[number]))
            if ticket is None:
                return self._as_is(number, tensor)
            bucket, position = ticket.bucket, ticket.position
            if bucket.arrived[position]:
                raise RuntimeError(
                    f"{self._names[number]}: compressed twice in one step (after a step that failed, call reset())"
                )
            self.traffic.count_gradient(tensor.numel(), self._ranks)
            with _OrAbandon(self):
                bucket.order.enter()
                self.receive(bucket, position, bucket.receive(position, tensor))
                bucket.taken(position)
                bucket.order.leave()
                if bucket.full:
                    self._driver.launch(bucket, self._whole_exchange(bucket))
                self._driver.advance()
            # Horovod insists on reducing something for this name: nothing at all will do.
            return tensor.new_empty(0, dtype=torch.float32), ticket

    def decompress(self, tensor: Tensor, ctx: object) -> Tensor:
        """Called by Horovod with what its allreduce returned; returns the gradient, averaged, of the parameter's
        shape."""
        if ctx is None:
            return self._passed(tensor)
        with self._lock, self._clock():
            if self._collecting:
                with _without_autograd(), _OrAbandon(self):
                    self._finish_step()
            if isinstance(ctx, _Ticket):
                return ctx.bucket.give_back(ctx.position)
            assert isinstance(ctx, _Dense)
            with _without_autograd():
                if tensor.data_ptr() != ctx.grad.data_ptr():
                    ctx.grad.copy_(tensor.as_strided(ctx.grad.shape, ctx.strides))
                    if ctx.scale != 1.0:
                        ctx.grad.mul_(ctx.scale)
                self.settle(ctx.number, ctx.grad)
            return ctx.grad

    # The user's view.

    def residual(self, name: str) -> Tensor:
        """What this rank holds back of the gradients of parameter ``name``: float32, of its shape, a copy; zeros for
        one that travels dense. Raises ``KeyError`` for an unknown name."""
        for bucket, segment in self._places():
            if segment.name == name:
                bucket.order.enter()
                return self.held(bucket, segment).clone()
        parameter = dict(zip(self._names, self._parameters, strict=True))[name]
        return torch.zeros_like(parameter, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between steps: residuals and the like, by parameter name, and the step. Call it after
        ``optimizer.step()``: a step that was averaged but not taken counts as skipped.

        Residuals differ from rank to rank: every rank saves its own.
        """
        if self._collecting:
            raise RuntimeError(
                "state_dict() in the middle of a step; call it after optimizer.step() (or reset(), after a failure)"
            )
        if self._guard.stepped is False:
            self._undo()
        self._enter_all()
        tensors = {
            segment.name: {key: self.saved(segment, flat).clone() for key, flat in bucket.state.items()}
            for bucket, segment in self._places()
        }
        # Codes without a zero leave something in the padding, and that is coded again.
        padding = {
            segment.name: {key: segment.padding(flat).clone() for key, flat in bucket.state.items()}
            for bucket, segment in self._places()
        }
        return {
            "method": type(self).__name__,
            "step": self._step,
            "tensors": tensors,
            "padding": padding,
            "extra": self.method_state(),
            "traffic": self.traffic.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes bit-exactly from :meth:`state_dict` of a compressor built with the same arguments, on every rank. A
        step under way is forgotten (:meth:`reset`).

        Raises:
            ValueError: another method's state, a damaged or older one, or other parameters or shapes than this
                compressor's. Nothing of it is taken over.
        """
        if state.get("method") != type(self).__name__:
            raise ValueError(
                f"this is the state of {state.get('method')}, and this compressor is {type(self).__name__}"
            )
        places = self._places()
        if "padding" not in state:
            raise ValueError("this state is of an older version of hvd_compress")
        ours, theirs = {segment.name for _, segment in places}, set(state["tensors"])
        if ours != theirs:
            raise ValueError(f"state and compressor hold different parameters: {sorted(ours ^ theirs)}")
        for bucket, segment in places:
            for key in bucket.state:
                loaded = state["tensors"][segment.name].get(key)
                got = "nothing" if loaded is None else f"shape {tuple(loaded.shape)}"
                shape = tuple(self.saved(segment, bucket.state[key]).shape)
                if loaded is None or loaded.shape != shape:
                    raise ValueError(f"{segment.name}: {key} needs shape {shape}, the state has {got}")
        self.reset()
        self._enter_all()
        self.load_method_state(state["extra"])
        for bucket, segment in places:
            for key, flat in bucket.state.items():
                segment.padding(flat).copy_(state["padding"][segment.name][key])
                self.saved(segment, flat).copy_(state["tensors"][segment.name][key])
        self._leave_all()
        self._step = state["step"]
        self.traffic.load_state_dict(state["traffic"])
        if self._guard.stepped is False:
            # The last step was not taken: with what was loaded, there is nothing of it to undo.
            self._guard.stepped = True

    @torch.no_grad()
    def reset(self) -> None:
        """After a failure: forgets the step under way; the next gradient begins a new one. What buckets have sent in
        that step goes back into the residuals, and the gradients it has compressed become zero."""
        with self._lock:
            self._driver.abandon()
            self._lookup.forget()
            if self._collecting:
                self._collecting = False
                self._undo()
                for bucket in self._buckets:
                    bucket.use_up()
            for bucket in self._buckets:
                bucket.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a compressor belongs to its model and optimizer: build a new one for a copy")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a compressor belongs to its process: save its state_dict(), on every rank its own")

    def stats(self) -> dict[str, Any]:
        """What crossed the network: this rank's bytes in the last step and in total, everything included but sparse
        gradients and those of parameters that were not given to this compressor.

        ``last`` and ``total`` hold ``dense_bytes`` (what a float32 ring allreduce of the gradients would have sent),
        ``wire_bytes`` and its parts ``values_bytes``, ``indices_bytes``, ``dense_tensor_bytes``, ``budget_bytes``, and
        ``wire_ratio = dense_bytes / wire_bytes``. ``residual_norm`` is the L2 norm of all residuals; ``compress_ms``
        the median over recent steps of the time spent in the compressor without waiting.
        """
        for bucket in self._buckets:
            bucket.order.enter()
        norms = [self.held_norm(bucket) for bucket in self._buckets]
        norm = torch.stack([n.cpu() for n in norms]).norm().item() if norms else 0.0
        return {"steps": self._step, **self.traffic.report(), "residual_norm": norm}

    @property
    def scale(self) -> float:
        """Of this step's gradients: the ``GradScaler``'s, or 1."""
        return self._scale

    # For a method that takes its steps itself, without Horovod's optimizer.

    @property
    def buckets(self) -> list[Bucket]:
        return self._buckets

    @property
    def ranks(self) -> int:
        return self._collectives.size

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """All of them, in the user's order."""
        return list(zip(self._names, self._parameters, strict=True))

    def formed_anew(self) -> bool:
        """Whether the ranks were formed anew since last time (elastic); what they knew is then forgotten."""
        anew = self._collectives.generation() is not self._generation
        if anew:
            self._restart()
        return anew

    @contextmanager
    def step_of_its_own(self, worth: int = 0) -> Iterator[None]:
        """A step whose exchanges are launched in the body and run to their ends after it; it stands for ``worth``
        exchanges of all gradients."""
        with self._lock, self._clock(), _OrAbandon(self):
            self._begin_step()
            for parameter in self._parameters:
                if parameter.requires_grad:
                    self.traffic.count_gradient(worth * parameter.numel(), self._ranks)
            yield
            self._driver.finish()
            self.traffic.end_step()
            self._collecting = False
            self._step += 1
            # What was averaged is applied already.
            self._guard.stepped = True

    def launch(self, bucket: Bucket, exchange: Exchange) -> None:
        """Starts an exchange of a :meth:`step_of_its_own`."""
        self._driver.launch(bucket, exchange)

    def parameters_text(self) -> str:
        """How many parameters are compressed, for ``__repr__``."""
        segments = [segment for _, segment in self._places()]
        entries, rest = sum(s.numel for s in segments), sum(p.numel() for p in self._parameters)
        return (
            f"{len(segments)} of {len(self._parameters)} tensors compressed ({entries:,} of {rest:,} entries), "
            f"{len(self._buckets)} bucket{'s' if len(self._buckets) != 1 else ''}"
        )

    # A step.

    def _begin_step(self) -> None:
        if self._guard.stepped is False:
            self._undo()
        self._ranks = self._collectives.size
        self._scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        self.traffic.begin_step()
        for bucket in self._buckets:
            bucket.clear()
            bucket.order.enter()
            self.begin(bucket)
            bucket.order.leave()
        # Only now: a step that could not begin has nothing to take back, and the next gradient begins it again.
        self._collecting = True

    def _whole_exchange(self, bucket: Bucket) -> Exchange:
        bucket.forget_due()
        yield from self.exchange(bucket)
        bucket.assigned()

    def _undo(self) -> None:
        """The step was averaged, but no optimizer took it: nothing was said after all."""
        for bucket in self._buckets:
            bucket.order.enter()
            self.undo(bucket)
            bucket.order.leave()

    def _finish_step(self) -> None:
        """In the first decompress of a step: every gradient of the step has been through compress on this rank."""
        for bucket in self._buckets:
            if any(bucket.arrived) and not bucket.full:
                # Horovod asks all ranks for the same parameters, so all find the same ones missing.
                missing = [s.name for s, here in zip(bucket.segments, bucket.arrived, strict=True) if not here]
                self._warn(
                    f"Horovod never sent the gradients of {', '.join(missing)}: give the compressor only parameters "
                    "that the optimizer holds, or their buckets cannot overlap backward"
                )
                self._driver.launch(bucket, self._whole_exchange(bucket))
        self._driver.finish()
        self.finished()
        self.traffic.end_step()
        self._lookup.forget()
        self._collecting = False
        self._step += 1
        # Without an optimizer (a test, a user's own loop) nobody steps; a GradScaler skips from the first step on.
        if self._guard.stepped is not None or self._scaler is not None:
            self._guard.stepped = False

    def _restart(self) -> None:
        """The ranks were formed anew (elastic): old handles are void, and all ranks count from zero again."""
        self._generation = self._collectives.generation()
        if not self._collecting and self._guard.stepped is False:
            self._undo()
        self.reset()
        self._step = 0
        self._guard.stepped = None
        for bucket in self._buckets:
            self.restart(bucket)

    def _places(self) -> list[tuple[Bucket, Segment]]:
        """Of all parameters that are compressed."""
        return [(bucket, segment) for bucket in self._buckets for segment in bucket.segments]

    def _enter_all(self) -> None:
        """What follows, on whatever stream, sees all that exchanges did and have left due."""
        for bucket in self._buckets:
            bucket.order.enter()
            bucket.catch_up()

    def _leave_all(self) -> None:
        for bucket in self._buckets:
            bucket.order.leave()

    def _clock(self) -> _Clock:
        return _Clock(self._driver, self.traffic)

    # Gradients that are not compressed.

    def _as_is(self, number: int, grad: Tensor) -> tuple[Tensor, _Dense]:
        """A payload that Horovod accepts: contiguous, not bfloat16."""
        parameter = self._parameters[number]
        canonical = in_order_of(parameter, grad) if is_dense(parameter) else grad.contiguous()
        scale = 1.0
        if self._dense_half and canonical.dtype in (torch.float32, torch.bfloat16):
            # In unscaled units: a GradScaler's 65536 would leave float16 no room.
            scale = self._scale
            canonical = (canonical / scale).half()
        elif canonical.dtype == torch.bfloat16:
            canonical = canonical.float()
        self.traffic.count_dense(canonical.numel(), canonical.nbytes, self._ranks)
        return canonical.as_strided((canonical.numel(),), (1,)), _Dense(number, grad, canonical.stride(), scale)

    def _pass(self, tensor: Tensor) -> tuple[Tensor, None]:
        """Not a gradient of ours: as it is, and counted if it comes in the middle of a step."""
        if self._lookup.is_parameter(tensor):
            self._warn("Adasum hands in parameters, not gradients: they are sent as they are, uncompressed")
        elif self._collecting:
            self._warn(
                f"a gradient of shape {tuple(tensor.shape)} belongs to none of this compressor's parameters and is "
                "sent as it is; give the compressor all of the optimizer's named parameters"
            )
            self.traffic.count_dense(tensor.numel(), tensor.nbytes, self._ranks)
        return tensor.contiguous(), None

    def _check_gradient(self, number: int, grad: Tensor) -> None:
        parameter, name = self._parameters[number], self._names[number]
        if not grad.is_floating_point():
            raise TypeError(f"{name}: gradient of dtype {grad.dtype}; allowed are float32, float16, bfloat16, float64")
        ticket = self._tickets.get(id(parameter))
        if ticket is not None and grad.dtype != parameter.dtype:
            raise TypeError(f"{name}: gradient of dtype {grad.dtype}, but the parameter is {parameter.dtype}")
        if ticket is not None and ticket.bucket.device != grad.device:
            raise ValueError(
                f"{name}: was on {ticket.bucket.device} when the compressor was built and its gradient is on "
                f"{grad.device}; build the compressor after moving the model"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{type(self).__name__}: {text}", stacklevel=4)
