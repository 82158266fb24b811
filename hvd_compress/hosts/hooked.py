"""What DDP and FSDP2 have in common: the model calls their hooks, whichever optimizers step."""

from torch.optim import Optimizer

from ..engine.engine import Engine
from ..gradients.step import GradientStep, GradScaler
from .horovod import was_given


class HookedHost:
    """The base of both. ``registration``: the call that registers the hooks; ``bound``: what the compressor is bound
    to; both for messages."""

    # All gradients of a DDP bucket have one version.
    single, detached, versions = False, False, False
    registration: str
    bound: str

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        self._engine, self.step = engine, GradientStep(engine, self, grad_scaler)

    def release(self) -> None:
        """Called when local steps take the place of this host. It has no hooks of its own to remove."""
        self.step.replaced()

    def given(self, optimizer: Optimizer) -> bool | None:
        """Whether ``DistributedOptimizer``, which does not fit here, was given this compressor; None for another
        optimizer."""
        return was_given(optimizer, self._engine.method)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Warns if the optimizer applies gradients and none has passed through the hooks."""
        if self.step.bypassed_by(optimizer):
            self._engine.warn(
                f"{type(optimizer).__name__} steps, but this compressor has received no gradient: is "
                f"{self.registration} missing?"
            )
