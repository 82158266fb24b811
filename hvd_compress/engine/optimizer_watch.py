"""Observes the steps of the optimizer that holds a compressor's parameters; hosts tell a compressor nothing of it."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .method import Method
from .shards import local


class Watched(Protocol):
    """An engine, as far as its optimizer matters."""

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]: ...

    @property
    def single(self) -> bool:
        """Whether one optimizer only may step the parameters."""

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before every step of an optimizer that holds some of the parameters."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called after it."""


class OptimizerWatch:
    """Tells an engine of the steps of its parameters' optimizer. Keeps no strong reference.

    Raises ``ValueError`` if a second optimizer steps the parameters although only one may (their residuals would mix),
    or if an optimizer was given the compressor but holds none of the parameters.
    """

    def __init__(self, engine: Watched, method: Method) -> None:
        self.ids = {id(parameter) for parameter in engine.parameters}
        self._engine, self._method = weakref.ref(engine), weakref.ref(method)
        self._seen: weakref.ref[Optimizer] | None = None
        #: The optimizers that have stepped, ever and since :meth:`forget_step`.
        self._steppers, self._stepped = weakref.WeakSet[Optimizer](), weakref.WeakSet[Optimizer]()
        # The parameters that those optimizers hold; None until somebody asks.
        self._trained: set[int] | None = None
        self._held: set[int] | None = None
        # False after the first gradient in this process, and after bypassed_by() has been true.
        self._may_be_bypassed = True
        self.forget_step()

    def start(self) -> None:
        """From now on steps are observed: the method is complete. (Optimizers may step in other threads meanwhile.)"""
        _register(self)

    def stepping(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that steps the parameters of ``optimizer``: itself, or Horovod's, which wraps it."""
        seen = self._seen() if self._seen is not None else None
        return seen if seen is not None and share_parameters(optimizer, seen) else optimizer

    def before_step(self, optimizer: Optimizer) -> None:
        engine, method = self._engine(), self._method()
        if engine is None or method is None:  # an exception's frames may keep the engine longer
            return
        seen = self._seen() if self._seen is not None else None
        if optimizer is not seen:
            if not any(id(p) in self.ids for group in optimizer.param_groups for p in group["params"]):
                if method.host.given(optimizer):
                    raise ValueError(
                        "this optimizer holds none of its compressor's parameters; build the compressor from the named "
                        "parameters of the model that is trained (not of one that was copied afterwards)"
                    )
                return
            if engine.single and seen is not None and not share_parameters(optimizer, seen):
                raise ValueError(
                    f"this compressor serves a {type(seen).__name__} already and a second optimizer "
                    f"({type(optimizer).__name__}) steps its parameters; build one compressor for each optimizer, "
                    "from that optimizer's own named parameters"
                )
            self._seen = weakref.ref(optimizer)
        engine.before_optimizer_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        seen, engine = self._seen() if self._seen is not None else None, self._engine()
        if seen is None or engine is None:
            return
        if optimizer is seen or share_parameters(optimizer, seen):  # one that wraps the other steps after it
            engine.after_optimizer_step(optimizer)
        if optimizer is seen:
            # A GradScaler lets a fused optimizer step in any case, and its kernel skips the step by this tensor.
            found_inf = getattr(optimizer, "found_inf", None)
            self._steps.append(None if found_inf is None else found_inf.detach().clone())
            self._steppers.add(optimizer)
            self._stepped.add(optimizer)
            self._trained = self._held = None

    def bypassed_by(self, optimizer: Optimizer) -> bool:
        """Whether this step of the optimizer applies gradients although the compressor has received none in this
        process. True at most once. Synchronises a GPU until then, or until the first gradient arrives."""
        if not self._may_be_bypassed or not self.applies_gradients(optimizer):
            return False
        self._may_be_bypassed = False
        return True

    def received(self) -> None:
        """The compressor has received a gradient: from now on :meth:`bypassed_by` is false."""
        self._may_be_bypassed = False

    def applies_gradients(self, optimizer: Optimizer) -> bool:
        """Whether this step applies gradients. One that only creates the optimizer's state does not:
        ``torch.distributed.checkpoint`` takes one with gradients and learning rate 0,
        ``hvd.broadcast_optimizer_state()`` with gradients 0."""
        return any(
            group.get("lr") != 0
            and any(id(p) in self.ids and p.grad is not None and local(p.grad).any() for p in group["params"])
            for group in optimizer.param_groups
        )

    @property
    def used(self) -> bool:
        """Whether an optimizer has stepped the parameters in this process."""
        return bool(self._steppers)

    @property
    def called(self) -> bool:
        """Whether an optimizer's step was called since :meth:`forget_step`, also if it was skipped."""
        return bool(self._steps)

    def stepped(self) -> bool:
        """Whether an optimizer has changed the parameters since :meth:`forget_step`. May synchronise a GPU."""
        return any(found_inf is None or not bool(found_inf) for found_inf in self._steps)

    def stepped_by(self, parameter: torch.nn.Parameter) -> bool:
        """Whether an optimizer that holds ``parameter`` has stepped since :meth:`forget_step`."""
        if self._held is None:
            self._held = parameters_of(self._stepped)
        return id(parameter) in self._held

    def left_out(self, parameter: torch.nn.Parameter) -> bool:
        """Whether optimizers have stepped, and none that holds ``parameter``: nothing applies its gradients."""
        if self._trained is None:
            self._trained = parameters_of(self._steppers)
        return bool(self._trained) and id(parameter) not in self._trained

    def forget_step(self) -> None:
        """Forgets the steps so far: from now on only new ones count."""
        self._steps: list[torch.Tensor | None] = []
        self._stepped.clear()
        self._trained = self._held = None  # groups may be added


def parameters_of(optimizers: Iterable[Optimizer]) -> set[int]:
    """The ids of what optimizers hold."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


_watches: tuple[weakref.ref[OptimizerWatch], ...] = ()


def _register(watch: OptimizerWatch) -> None:
    """Registers the global hooks, once. They serve all watches and are never removed: removing one while torch iterates
    over its hooks would raise an error."""
    global _watches
    if not _watches:  # once: from now on the tuple always holds at least the newest watch
        register_optimizer_step_pre_hook(_before_any_step)
        register_optimizer_step_post_hook(_after_any_step)
    _watches = (*(other for other in _watches if other() is not None), weakref.ref(watch))


def _before_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for watch in _watches:
        if (alive := watch()) is not None:
            alive.before_step(optimizer)


def _after_any_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for watch in _watches:
        if (alive := watch()) is not None:
            alive.after_step(optimizer)


def share_parameters(one: Optimizer, other: Optimizer) -> bool:
    """Whether two optimizers are Horovod's and the one that it wraps: different objects with the same parameter
    lists."""
    return any(a["params"] is b["params"] for a in one.param_groups for b in other.param_groups)
