"""Whether numbers are the same on all ranks, found by one allgather."""

from collections.abc import Generator

import torch
from torch import Tensor

from .collectives import Request
from .comparison import disagreement
from .work import Part, Step

#: Numbers to compare must be below this.
LIMIT = 2**20
# Steps between two looks at the comparison's result on a GPU.
_CHECK_INTERVAL = 100


def all_equal(numbers: Tensor, name: str = "step") -> Generator[Request, Tensor, Tensor]:
    """An exchange that returns, for each of ``numbers`` (integers in [0, LIMIT), (n,)), whether it is the same on all
    ranks: bool, (n,). In one trip, where an allreduce of few bytes takes as many as one of many."""
    rows = (yield Request("allgather", numbers.int(), "budget", name, "encode")).view(-1, len(numbers))
    return (rows == rows[0]).all(0)


class Agreement(Part):
    """Remembers whether the ranks have differed in seed, step or options."""

    def __init__(self, device: torch.device) -> None:
        self._differ = torch.zeros(1, dtype=torch.bool, device=device)
        #: Whether nobody has looked since the ranks or their state changed.
        self._unchecked = True

    def begin(self, step: Step) -> None:
        # On a GPU, looking synchronises.
        self._looks = self._differ.is_cpu or self._unchecked or step.number % _CHECK_INTERVAL == 0
        self._unchecked = False

    def restart(self) -> None:
        self._differ.zero_()
        self._unchecked = True

    def compare(self, number: Tensor) -> Generator[Request, Tensor, None]:
        """Compares a number, (1,), by :func:`all_equal`, and notes whether the ranks differ."""
        same = yield from all_equal(number)
        self.note(~same)

    def note(self, differ: Tensor) -> None:
        """Notes whether the ranks differ: bool. Raises ``RuntimeError`` if they do now or did before; on a GPU, in some
        of the steps."""
        self._differ.logical_or_(differ)
        if self._looks and bool(self._differ):
            raise disagreement()
