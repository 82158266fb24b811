"""Facts about a method and about an optimizer, from which others tell whether the two fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class Traits:
    """How a method's averages depend on the gradients. Asked by hosts, guards and local steps.

    ``linear``: everything that is passed in is applied once, without a memory of what was applied. An average that
    comes back in the next gradient does no harm then. ``fixed_size``: averages are replaced by signs or orthogonal
    matrices, whose size does not follow the gradients'. ``sparse``: a step's averages are mostly zeros.
    ``every_entry``: it sends all entries, whatever its options. ``momentum``: of momentum correction, in [0, 1).
    ``conserving``: the residual plus what was sent is everything that has arrived.
    """

    linear: bool = True
    fixed_size: bool = False
    sparse: bool = False
    momentum: float = 0.0
    conserving: bool = True
    every_entry: bool = True


@dataclass(frozen=True)
class OptimizerFacts:
    """Facts about an optimizer whose step begins, for the guards.

    ``given``: whether Horovod's optimizer was given this compressor; None for another optimizer. ``ours``: whether the
    gradients that it applies have come from this compressor. ``active``: whether this process exchanges gradients.
    ``unknown``: the number of its trained parameters that the compressor was not given. ``bypassing()``: the names of
    those whose gradients it applies although they have not passed through the compressor.
    """

    optimizer: Optimizer
    given: bool | None
    ours: bool
    active: bool
    unknown: int
    bypassing: Callable[[], list[str]] = list

    @property
    def momentum(self) -> float:
        """The momentum of the first parameter group that has one, or 0."""
        return next(filter(None, map(momentum_of, self.optimizer.param_groups)), 0.0)


def momentum_of(group: Mapping[str, Any]) -> float:
    """The momentum of an optimizer's parameter group, or its first beta."""
    return group.get("momentum") or (group.get("betas") or (0.0,))[0]
