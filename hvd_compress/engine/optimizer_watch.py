"""Watches which optimizer steps the parameters, since Horovod tells a compressor nothing about it."""

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Guarded(Protocol):
    """Who wants to know."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Called before every step of an optimizer that holds one of the parameters; raises if they do not fit."""

    def formed_anew(self) -> bool:
        """Called before that: takes note, if the ranks were formed anew."""


class OptimizerGuard:
    """Tells ``owner`` of every step of an optimizer that holds one of ``parameters``. Keeps no reference to it.

    Raises ``ValueError`` when a second optimizer steps them (residuals and steps of two would be mixed up), and when an
    optimizer was given ``owner`` as its compression but holds none of them.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], owner: Guarded) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._owner = weakref.ref(owner)
        self._seen: weakref.ref[Optimizer] | None = None
        #: Whether an optimizer stepped since this was last set to False; None until one ever did.
        self.stepped: bool | None = None
        _enlist(self)

    @property
    def optimizer(self) -> Optimizer | None:
        """The one that was last seen to step the parameters."""
        return None if self._seen is None else self._seen()

    def _before_step(self, optimizer: Optimizer) -> None:
        owner = self._owner()
        if owner is None:
            return
        seen = self._seen() if self._seen is not None else None
        if optimizer is not seen:
            if not any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
                if getattr(optimizer, "_compression", None) is owner:
                    raise ValueError(
                        "this optimizer holds none of its compressor's parameters; build the compressor from the named "
                        "parameters of the very model that is trained (not of one that was copied afterwards)"
                    )
                return
            if seen is not None and not _same(optimizer, seen):
                raise ValueError(
                    f"this compressor serves a {type(seen).__name__} already and a second optimizer "
                    f"({type(optimizer).__name__}) steps its parameters; build one compressor for each optimizer, "
                    "from that optimizer's own named parameters"
                )
            self._seen = weakref.ref(optimizer)
        # hvd.broadcast_optimizer_state() steps an optimizer without a state, and that after an elastic reset: such a
        # step takes nothing of what was averaged before.
        owner.formed_anew()
        owner.check_optimizer(optimizer)
        self.stepped = True


_guards: tuple[weakref.ref[OptimizerGuard], ...] = ()


def _enlist(guard: OptimizerGuard) -> None:
    """One hook serves all and stays for good: a guard may be collected at any time, and if its own hook went with it
    while torch goes through its global hooks, torch would fail.
    """
    global _guards
    if not _guards:  # only ever once: the tuple keeps at least this one from now on
        register_optimizer_step_pre_hook(_tell_guards)
    _guards = (*(other for other in _guards if other() is not None), weakref.ref(guard))


def _tell_guards(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for guard in _guards:
        alive = guard()
        if alive is not None:
            alive._before_step(optimizer)


def _same(one: Optimizer, other: Optimizer) -> bool:
    """Whether they are Horovod's optimizer and the one it wraps: another object, with the same lists of parameters (and
    the same groups, until one of the two loads a state)."""
    return any(a["params"] is b["params"] for a in one.param_groups for b in other.param_groups)
