"""What others have to know of a method and of an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass(frozen=True)
class Traits:
    """What a method makes of gradients, as far as others have to know.

    ``linear``: everything that is passed in is applied once, without a memory of what was applied: an average that
    comes back as a part of the next gradient is then neither lost nor counted twice. ``signs``: averages are replaced
    by their signs, or by orthogonal matrices, whose size does not follow the gradients'. ``sparse``: a step's averages
    are mostly zeros. ``momentum``: gradients pass through a momentum first, in [0, 1). ``exact``: the residual and what
    was sent are together all that has arrived.
    """

    linear: bool = True
    signs: bool = False
    sparse: bool = False
    momentum: float = 0.0
    exact: bool = True


@dataclass(frozen=True)
class Facts:
    """What is known of an optimizer that is about to apply averages of a compressor.

    ``given``: whether Horovod's optimizer was given this compressor; None if it is not Horovod's. ``ours``: whether
    the gradients that it applies have come from this compressor. ``active``: whether this process exchanges gradients
    at all. ``unknown``: how many of its trained parameters the compressor was not given.
    """

    optimizer: Optimizer
    given: bool | None
    ours: bool
    active: bool
    unknown: int

    @property
    def momentum(self) -> float:
        """That of the first parameter group that has one."""
        return next(filter(None, map(momentum_of, self.optimizer.param_groups)), 0.0)


def momentum_of(group: Mapping[str, Any]) -> float:
    """The momentum of an optimizer's parameter group, or its first beta."""
    return group.get("momentum") or (group.get("betas") or (0.0,))[0]
