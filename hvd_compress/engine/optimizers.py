"""Observes the steps of optimizers, by torch's global hooks: hosts do not tell a compressor of them."""

import gc
import threading
import traceback
import weakref
from collections.abc import Iterable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .method import Method
from .modes import modes_off
from .shards import local


class Optimizers:
    """The optimizers that step some ``parameters``. Tells the clock when they do.

    In the first step of another optimizer, raises ``ValueError`` if only one may step them: residuals would mix.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        #: The optimizer that began a step last.
        self._seen: weakref.ref[Optimizer] | None = None
        self._sizes = weakref.WeakKeyDictionary[Optimizer, int]()
        #: The number of parameters of the optimizer whose groups changed most recently, or None.
        self.regrouped: int | None = None

    def release(self) -> None:
        """Lets any optimizer step the parameters from now on, unobserved."""
        self._ids, self._seen = set(), None

    def unknown(self, optimizer: Optimizer) -> int:
        """The number of the optimizer's trained parameters that are others."""
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

    def before_step(self, method: Method, optimizer: Optimizer) -> None:
        """Called before each step of any optimizer. ``method``: whose parameters these are."""
        seen = None if self._seen is None else self._seen()
        if optimizer is not seen:
            if self._ids.isdisjoint(parameters_of([optimizer])):
                if method.has_clock:
                    method.clock.before_other_step(optimizer)
                return
            if method.clock.single and seen is not None and not share_parameters(optimizer, seen):
                raise ValueError(
                    f"this compressor serves a {type(seen).__name__} already and a second optimizer "
                    f"({type(optimizer).__name__}) steps its parameters; build one compressor for each optimizer, "
                    "from that optimizer's own named parameters"
                )
            self._seen = weakref.ref(optimizer)
        # hvd.broadcast_optimizer_state() steps an optimizer without state, also after an elastic reset: such a step
        # does not use an older average.
        method.engine.check_generation()
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._sizes.setdefault(optimizer, size) != size:  # a new parameter group
            self._sizes[optimizer] = self.regrouped = size
            method.engine.comparison.changed()
        method.clock.before_optimizer_step(optimizer)

    def after_step(self, method: Method, optimizer: Optimizer) -> None:
        """Called after each step of any optimizer."""
        seen = None if self._seen is None else self._seen()
        if seen is not None and (optimizer is seen or share_parameters(optimizer, seen)):
            # One that wraps the other steps after it.
            method.clock.after_optimizer_step(optimizer, counts=optimizer is seen)


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of the parameters that optimizers hold."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def share_parameters(one: Optimizer, other: Optimizer) -> bool:
    """Whether two optimizers are Horovod's and the one that it wraps: two objects with the same parameter lists."""
    return any(a["params"] is b["params"] for a in one.param_groups for b in other.param_groups)


_watching: tuple[weakref.ref[Method], ...] = ()
_registering = threading.Lock()


def watch(method: Method) -> None:
    """Observes for ``method``, of which no strong reference is kept, from now on. Several threads may call it, and
    optimizers may step in others meanwhile.

    The global hooks are registered once, serve all methods, and are never removed: removing one while torch iterates
    over its hooks would raise an error."""
    global _watching
    with _registering:
        if not _watching:  # once: from now on the tuple always holds at least the newest one
            register_optimizer_step_pre_hook(_before_any_step)
            register_optimizer_step_post_hook(_after_any_step)
        _watching = (*(other for other in _watching if other() is not None), weakref.ref(method))


@modes_off
def _before_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for reference in _watching:
        try:
            if (method := reference()) is not None:
                method.engine.optimizers.before_step(method, optimizer)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            del method
            gc.collect()  # on other ranks a dropped one may have gone already, without an error
            if reference() is not None:
                raise


@modes_off
def _after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for reference in _watching:
        if (method := reference()) is not None:
            method.engine.optimizers.after_step(method, optimizer)
