"""Observes the steps of optimizers, by torch's global hooks: hosts do not tell a compressor of them."""

import gc
import threading
import traceback
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .driver import Driver
from .modes import modes_off
from .owner import Owner
from .peer import EnginePeer
from .shards import local


class Watched(Protocol):
    """The part of an engine that :class:`Optimizers` uses."""

    @property
    def driver(self) -> Driver: ...

    @property
    def peer(self) -> EnginePeer: ...

    def check_generation(self) -> bool: ...


class Optimizers:
    """Tells the driver of a method's engine when optimizers step. Keeps no strong reference.

    In the first step of another optimizer, raises ``ValueError`` if only one may step the parameters: their residuals
    would mix.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], owner: Owner[Watched]) -> None:
        self._ids, self._owner = {id(parameter) for parameter in parameters}, weakref.ref(owner)
        #: The optimizer that began a step last.
        self._seen: weakref.ref[Optimizer] | None = None
        self._sizes = weakref.WeakKeyDictionary[Optimizer, int]()
        #: The number of parameters of the optimizer whose groups changed most recently, or None.
        self.regrouped: int | None = None

    def watch(self) -> None:
        """Begins to observe. (Optimizers may step in other threads meanwhile.)"""
        _register(self)

    def release(self) -> None:
        """Lets any optimizer step the parameters from now on, unobserved."""
        self._ids, self._seen = set(), None

    def unknown(self, optimizer: Optimizer) -> int:
        """The number of the optimizer's trained parameters that the engine was not given."""
        return sum(p.requires_grad and id(p) not in self._ids for g in optimizer.param_groups for p in g["params"])

    def applies_gradients(self, optimizer: Optimizer) -> bool:
        """Whether this step applies gradients. One that only creates the optimizer's state does not:
        ``torch.distributed.checkpoint`` takes one with gradients and learning rate 0,
        ``hvd.broadcast_optimizer_state()`` with gradients 0. Synchronises a GPU."""
        return any(
            group.get("lr") != 0
            and any(id(p) in self._ids and p.grad is not None and local(p.grad).any() for p in group["params"])
            for group in optimizer.param_groups
        )

    def restart(self) -> None:
        """Called when the set of ranks has changed (elastic)."""
        self.regrouped = None

    @property
    def owned(self) -> bool:
        """Whether the method exists."""
        return self._owner() is not None

    @modes_off
    def before_step(self, optimizer: Optimizer) -> None:
        owner = self._owner()
        if owner is None:
            return
        engine, seen = owner.engine, self._seen() if self._seen is not None else None
        if optimizer is not seen:
            if not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
                if owner.has_clock:
                    engine.driver.before_other_step(optimizer)
                return
            driver = engine.driver
            if driver.single and seen is not None and not share_parameters(optimizer, seen):
                raise ValueError(
                    f"this compressor serves a {type(seen).__name__} already and a second optimizer "
                    f"({type(optimizer).__name__}) steps its parameters; build one compressor for each optimizer, "
                    "from that optimizer's own named parameters"
                )
            self._seen = weakref.ref(optimizer)
        # hvd.broadcast_optimizer_state() steps an optimizer without state, also after an elastic reset: such a step
        # does not use an older average.
        engine.check_generation()
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._sizes.setdefault(optimizer, size) != size:  # a new parameter group
            self._sizes[optimizer] = self.regrouped = size
            engine.peer.changed()
        engine.driver.before_optimizer_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        seen, owner = self._seen() if self._seen is not None else None, self._owner()
        if seen is None or owner is None:
            return
        if optimizer is seen or share_parameters(optimizer, seen):  # one that wraps the other steps after it
            owner.engine.driver.after_optimizer_step(optimizer, counts=optimizer is seen)


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the parameters that optimizers hold."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside wrappers, as Accelerate's and Lightning's, whose groups and state are those of their
    ``optimizer``. (Lookahead has such an attribute, too, and a state of its own.)"""
    found = optimizer
    while hasattr(found, "param_groups") and hasattr(found, "optimizer"):
        if isinstance(found, Optimizer) and not vars(found).keys().isdisjoint({"param_groups", "state"}):
            break
        found = found.optimizer
    return found


def inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers in ``optimizer`` that have states of their own: itself, and those that it holds (SAM, Lookahead, a
    container of several)."""
    held = [
        item for value in vars(optimizer).values() for item in (value if isinstance(value, list | tuple) else [value])
    ]
    own = [optimizer] if "state" in vars(optimizer) else []
    return [*own, *(part for item in held if isinstance(item, Optimizer) for part in inside(item))]


def share_parameters(one: Optimizer, other: Optimizer) -> bool:
    """Whether two optimizers are Horovod's and the one that it wraps: different objects with the same parameter
    lists."""
    return any(a["params"] is b["params"] for a in one.param_groups for b in other.param_groups)


_watching: tuple[weakref.ref[Optimizers], ...] = ()
_registering = threading.Lock()


def _register(optimizers: Optimizers) -> None:
    """Registers the global hooks, once. They serve all engines and are never removed: removing one while torch iterates
    over its hooks would raise an error. Several threads may register."""
    global _watching
    with _registering:
        if not _watching:  # once: from now on the tuple always holds at least the newest one
            register_optimizer_step_pre_hook(_before_any_step)
            register_optimizer_step_post_hook(_after_any_step)
        _watching = (*(other for other in _watching if other() is not None), weakref.ref(optimizers))


def _before_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for reference in _watching:
        try:
            if (alive := reference()) is not None:
                alive.before_step(optimizer)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            del alive
            gc.collect()  # on other ranks a dropped one may have gone already, without an error
            if (alive := reference()) is not None and alive.owned:
                raise


def _after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for reference in _watching:
        if (alive := reference()) is not None:
            alive.after_step(optimizer)
