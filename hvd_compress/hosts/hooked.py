"""What DDP and FSDP2 have in common: whichever optimizers step, a hook of the model or one call passes gradients in."""

from torch.optim import Optimizer

from ..engine.dense import Averaging, DenseGradient
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
        self._way: str | None = None

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
                f"{self.registration} missing? (Without hooks: hvd_compress.average_gradients(compression).)"
            )

    def comes_by(self, way: str) -> None:
        """Called with what passes gradients in. Raises ``RuntimeError`` if that was something else before."""
        if self._way is None:
            self._way = way
        elif self._way != way:
            raise RuntimeError(
                f"this compressor gets its gradients by {self._way}, and now by {way}: they would be averaged twice"
            )

    def check_loop(self) -> None:
        """Raises an error if something else averages the gradients, too."""
        raise NotImplementedError

    def exchange(self, dense: list[DenseGradient]) -> None:
        """Runs the exchanges of a step to their ends, and writes the averages, with those of ``dense``."""
        engine = self._engine
        averaging = Averaging(engine.collectives, [g.payload for g in dense], f"{engine.exchanges.label}.dense")
        with self.step.exchanging():
            self.step.finish()
            for gradient, average in zip(dense, averaging.results(), strict=True):
                gradient.store(average)
                engine.method.dense_averaged(gradient.number, gradient.grad)
            for work in engine.works:
                work.bucket.write_results()
