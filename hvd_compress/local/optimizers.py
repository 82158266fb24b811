"""The optimizers that take the local steps between two exchanges."""

from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch.optim import Optimizer

from ..engine.optimizers import parameters_of, share_parameters, unwrapped
from ..guards.unfit_optimizer import check_kind, check_parameters


class LocalOptimizers:
    """One optimizer, or several of different parameters: for example ``torch.optim.Muon`` of matrices and AdamW of the
    rest.

    Args:
        given: by the user; those that Accelerate and Lightning wrap are taken out of their wrappers.
        known: the ids of the parameters that are averaged.

    Raises:
        TypeError: not an optimizer, or a sequence of them.
        ValueError: one that does not fit, see :mod:`hvd_compress.guards.unfit_optimizer`.
    """

    def __init__(self, given: Optimizer | Sequence[Optimizer], known: Set[int]) -> None:
        #: Without wrappers.
        listed: list[Any] = [given]
        if isinstance(given, Iterable) and not hasattr(given, "param_groups"):
            listed = list(given)
        self.all: list[Optimizer] = [unwrapped(optimizer) for optimizer in listed]
        for optimizer, wrapped in zip(self.all, listed, strict=True):
            check_kind(optimizer, wrapped)
        self._own, self._known = set(self.all), known
        check_parameters(self.all, known)

    def given(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was given here, or is one that wraps one of these."""
        return optimizer in self._own or any(share_parameters(optimizer, own) for own in self.all)

    def may_change(self, optimizer: Optimizer) -> Set[int]:
        """The ids of the known parameters that no other optimizer holds."""
        return self._known - parameters_of(other for other in self.all if other is not optimizer)
