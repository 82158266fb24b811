"""What hosts have in common whose hooks a model calls, whichever optimizers step."""

from torch.optim import Optimizer

from ..engine.engine import Engine
from ..gradients.step import GradientStep, GradScaler
from .horovod import was_given


class HookedHost:
    """The hooks of one engine. ``registration``: the call that registers them."""

    # All gradients of a DDP bucket have one version.
    single, detached, versions = False, False, False
    registration: str

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        self._engine, self.step = engine, GradientStep(engine, self, grad_scaler)

    def release(self) -> None:
        """Local steps take the place of this host, which has no hooks before it is registered."""
        self.step.replaced()

    def given(self, optimizer: Optimizer) -> bool | None:
        """Whether an optimizer of Horovod's, which has no place here, was given this compressor; None for another."""
        return was_given(optimizer, self._engine.method)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Warns if the optimizer's step applies gradients and none has passed through the hooks."""
        if self.step.bypassed_by(optimizer):
            self._engine.warn(
                f"{type(optimizer).__name__} steps, but this compressor has received no gradient: is "
                f"{self.registration} missing?"
            )
