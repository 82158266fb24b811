"""FSDP2's modules: their all-reduce hooks, and the parts of their state that have no public interface."""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

# A mark in FSDP's attribute for gradients that are kept apart on a 2-D mesh. On a 1-D mesh FSDP only sets it to None:
# after each reduce-scatter, and in reset_iter_state().
_KEPT_APART = torch.empty(0, dtype=torch.float32, device="cpu")


class ModuleHook:
    """The all-reduce hook of the modules that share one group of parameters.

    Args:
        module, group: one of them, and its group.
        reduced: called with this object after each reduce-scatter, and after an all-reduce hook that was set before.
        sums: whether FSDP is told to sum and divide (:func:`hvd_compress.hosts.fsdp.reduces_to_averages`).
    """

    def __init__(self, module: Any, group: Any, reduced: "Callable[[ModuleHook], None]", sums: bool) -> None:
        self._module, self.group, self._reduced = module, group, reduced
        self._own = group._all_reduce_hook
        self._summed = group.force_sum_reduction_for_comms if sums else None
        #: The name of the module's class.
        self.name = type(module).__name__
        #: The numbers of the parameters of which something is kept apart between backward passes.
        self.kept = set[int]()
        module.set_all_reduce_hook(self)
        if sums:
            module.set_force_sum_reduction_for_comms(True)

    def __call__(self, flat: Tensor) -> None:
        if self._own is not None:
            self._own(flat)
        self._reduced(self)

    @property
    def replaced(self) -> bool:
        """Whether another hook was set in its place."""
        return self.group._all_reduce_hook is not self

    @property
    def all_reduces(self) -> bool:
        """False after ``set_requires_all_reduce(False)``."""
        return bool(self.group.all_reduce_grads)

    @property
    def reduces_unused(self) -> bool:
        """Whether ``set_reduce_scatter_unused_params(True)`` was called: a module that runs twice is then reduced
        twice, the first time of zeros."""
        return bool(getattr(self.group, "reduce_scatter_unused_params", False))

    def keep(self) -> None:
        """Called at the end of a backward pass: marks in FSDP whether something is kept apart."""
        if self.kept:
            self.group._partial_reduce_output = _KEPT_APART
        elif self.group._partial_reduce_output is _KEPT_APART:
            self.group._partial_reduce_output = None

    @property
    def discarded(self) -> bool:
        """Whether what was kept apart is void: FSDP's ``reset_iter_state()`` was called."""
        return bool(self.kept) and self.group._partial_reduce_output is not _KEPT_APART

    def remove(self) -> None:
        """Restores the module. A hook that was set in the place of this one stays."""
        self.kept.clear()
        self.keep()
        if not self.replaced:
            self._module.set_all_reduce_hook(self._own)
        if self._summed is not None:
            self._module.set_force_sum_reduction_for_comms(self._summed)


def remember(modules: Iterable[Any], compression: object) -> None:
    """Keeps a compressor as long as the modules exist, in place of the last one; None for none."""
    for module in modules:
        cast(Any, module._get_fsdp_state())._hvd_compress = compression


def remembered(modules: Iterable[Any]) -> list[Any]:
    """The compressors that :func:`remember` has given the modules, each once."""
    found = (getattr(module._get_fsdp_state(), "_hvd_compress", None) for module in modules)
    return list({id(each): each for each in found if each is not None}.values())
