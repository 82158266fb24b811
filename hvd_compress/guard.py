"""Watches which optimizer steps the parameters, since Horovod tells a compressor nothing about it."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerGuard:
    """Calls ``check(optimizer)`` before every step of an optimizer that holds one of ``parameters``.

    Raises ``ValueError`` when a second optimizer steps them: residuals and steps of two would be mixed up.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], check: "weakref.WeakMethod[Callable[[Optimizer], None]]"
    ) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._check = check
        self._seen: weakref.ref[Optimizer] | None = None
        me = weakref.ref(self)

        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            alive = me()
            if alive is not None:
                alive._before_step(optimizer)

        # torch's hook list is global: it goes when this object goes.
        weakref.finalize(self, register_optimizer_step_pre_hook(hook).remove)

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether one of the optimizer's parameters is ours."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def _before_step(self, optimizer: Optimizer) -> None:
        seen = self._seen() if self._seen is not None else None
        if optimizer is not seen:
            if not self.holds(optimizer):
                return
            if seen is not None:
                raise ValueError(
                    f"this compressor serves a {type(seen).__name__} already and a second optimizer "
                    f"({type(optimizer).__name__}) steps its parameters; build one compressor for each optimizer, "
                    "from that optimizer's own named parameters"
                )
            self._seen = weakref.ref(optimizer)
        check = self._check()
        if check is not None:
            check(optimizer)
