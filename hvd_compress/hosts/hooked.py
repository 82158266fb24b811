"""What hosts have in common whose hooks a model calls, whichever optimizers step."""

from torch.optim import Optimizer

from ..engine.engine import Engine
from .horovod import was_given


class HookedHost:
    """The hooks of one engine. ``registration``: the call that registers them."""

    single, detached = False, False
    registration: str

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def given(self, optimizer: Optimizer) -> bool | None:
        """Whether an optimizer of Horovod's, which has no place here, was given this compressor; None for another."""
        return was_given(optimizer, self._engine.method)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Warns if the optimizer's step applies gradients and none has passed through the hooks."""
        if self._engine.watch.bypassed_by(optimizer):
            self._engine.warn(
                f"{type(optimizer).__name__} steps, but this compressor has received no gradient: is "
                f"{self.registration} missing?"
            )
