"""The optimizers that take the local steps between two exchanges."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence, Set

from torch.optim import Optimizer

from ..engine.optimizer_watch import parameters_of, share_parameters
from ..hosts.horovod import is_distributed_optimizer

# After so many steps of an optimizer without LocalSteps.step() a warning says that it may have been forgotten.
_FORGOTTEN = 100


class LocalOptimizers:
    """One optimizer, or several of different parameters: for example ``torch.optim.Muon`` of matrices and AdamW of the
    rest.

    Args:
        given: by the user.
        known: the ids of the parameters that are averaged.
        before: called before each step, with the optimizer.
        warn: called with a warning.

    Raises:
        TypeError: not an optimizer, or a sequence of them.
        ValueError: none; Horovod's; and see :meth:`check`.
    """

    def __init__(
        self,
        given: Optimizer | Sequence[Optimizer],
        known: Set[int],
        before: Callable[[Optimizer], None],
        warn: Callable[[str], None],
    ) -> None:
        self._all = [given] if isinstance(given, Optimizer) else list(given)
        self._known, self._before, self._warn = known, before, warn
        self._steps = Counter[Optimizer]()
        for optimizer in self._all:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizer!r:.80}")
            if is_distributed_optimizer(optimizer):
                raise ValueError("local steps take the plain optimizer, not Horovod's: nothing averages the gradients")
        if not self._all:
            raise ValueError("local steps need an optimizer, got an empty list")
        self.check()
        for optimizer in self._all:
            optimizer.register_step_pre_hook(_weakly(self._before_step))

    def check(self) -> None:
        """Raises ``ValueError`` if an optimizer holds no known parameter or a trained unknown one, or two hold the
        same."""
        holders = Counter[int]()
        for optimizer in self._all:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            if not any(id(p) in self._known for p in held):
                which = type(optimizer).__name__ if len(self._all) > 1 else "the optimizer"
                raise ValueError(f"{which} holds none of the compressor's parameters")
            if unknown := sum(p.requires_grad and id(p) not in self._known for p in held):
                raise ValueError(
                    f"{unknown} of the optimizer's parameters would never be averaged: the compressor was not given "
                    "them, or they were frozen when LocalSteps was built"
                )
            holders.update(parameters_of([optimizer]))
        if shared := sum(count > 1 for count in holders.values()):
            raise ValueError(f"{shared} parameters are held by two of the optimizers: each one by a single optimizer")

    def check_stepping(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` for one that was not given here, and is not one that wraps one of these."""
        if not any(optimizer is own or share_parameters(optimizer, own) for own in self._all):
            raise ValueError(
                f"{type(optimizer).__name__} steps parameters of this compressor, and LocalSteps was not given it: "
                "build LocalSteps(compression, [first, second], period) with all optimizers"
            )

    def may_change(self, optimizer: Optimizer) -> Set[int]:
        """The ids of the known parameters that no other optimizer holds."""
        return self._known - parameters_of(other for other in self._all if other is not optimizer)

    def counted(self) -> None:
        """Called by LocalSteps.step(): the steps so far belong to it."""
        self._steps.clear()

    def _before_step(self, optimizer: Optimizer) -> None:
        self._before(optimizer)
        self._steps[optimizer] += 1
        if self._steps[optimizer] == _FORGOTTEN:
            self._warn(f"{_FORGOTTEN} optimizer steps without LocalSteps.step(): call it after each one")


def _weakly(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook of an optimizer that does not keep what it calls alive."""
    found = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *_: object) -> None:
        if (alive := found()) is not None:
            alive(optimizer)

    return hook
