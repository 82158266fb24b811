"""The optimizers of a training by local steps."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch.optim import Optimizer

from ..engine.optimizers import parameters_of, share_parameters
from ..engine.wrappers import inside, unwrapped
from ..guards.unfit_optimizer import check_averaged, check_kind

#: One optimizer or several, as the user has given them.
Given = Optimizer | Sequence[Optimizer]


class LocalOptimizers:
    """One optimizer, or several of different parameters: ``torch.optim.Muon`` of matrices, AdamW of the rest.

    Args:
        given: by the user; those that Accelerate and Lightning wrap are taken out of their wrappers.
        averaged: those on averaged gradients, which may be among the others or inside them.
        apart: whether shards of a parameter are in different fragments.

    Raises:
        TypeError: not an optimizer, or a sequence of them.
        ValueError: one that does not fit, see :mod:`hvd_compress.guards.unfit_optimizer`.
    """

    def __init__(self, given: Given, averaged: Given, apart: bool) -> None:
        self.averaged = [part for one in _without_wrappers(averaged) for part in check_averaged(one, apart)]
        local = _without_wrappers(given)
        inner = {part for optimizer in local for part in inside(optimizer)}
        self.all = [*local, *(optimizer for optimizer in self.averaged if optimizer not in inner)]
        self._own = set(self.all)

    def given(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was given here, or is one that wraps one of these."""
        return optimizer in self._own or any(share_parameters(optimizer, own) for own in self.all)

    def may_change(self, optimizer: Optimizer, known: Set[int]) -> Set[int]:
        """The ids, of ``known`` parameters, that no other optimizer holds."""
        return known - parameters_of(other for other in self.all if other is not optimizer)


def _without_wrappers(given: Any) -> list[Optimizer]:
    listed = list(given) if isinstance(given, Iterable) and not hasattr(given, "param_groups") else [given]
    for wrapped in listed:
        check_kind(unwrapped(wrapped), wrapped)
    return [unwrapped(wrapped) for wrapped in listed]
