"""The base of the torch hosts: gradients come from a model's hooks, or from average_gradients()."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from ..carriers.torch_collectives import TorchCollectives
from ..engine.engine import Engine
from ..gradients.step import GradientStep, GradScaler

LOOP = "average_gradients()"


class TorchHost(GradientStep):
    """DDP's or FSDP2's. ``registration``: the call that registers the hooks; ``bound``: what the compressor is bound
    to; both for messages."""

    registration: str
    bound: str

    def __init__(self, engine: Engine, grad_scaler: GradScaler | None) -> None:
        super().__init__(engine, grad_scaler)
        #: What passes gradients in, once it is known.
        self.source: str | None = None

    @property
    def alone(self) -> bool:
        members = self._engine.collectives
        return isinstance(members, TorchCollectives) and members.size == 1

    @property
    def active(self) -> bool:
        """Momentum in the compressor is needed on one rank, too."""
        return not self.alone or self._engine.method.velocities is not None

    def check_optimizer(self, optimizer: Optimizer, bypassed: Callable[[], bool]) -> None:
        """Warns if the optimizer applies gradients and none has passed through the hooks."""
        if bypassed():
            self._engine.warn(
                f"{type(optimizer).__name__} steps, but this compressor has received no gradient: is "
                f"{self.registration} missing? (Without hooks: hvd_compress.average_gradients(compression).)"
            )

    def take_from(self, source: str) -> None:
        """Called with what passes gradients in. Raises ``RuntimeError`` if that was something else before."""
        if self.source not in (None, source):
            raise RuntimeError(
                f"this compressor gets its gradients from {self.source}, and now from {source}: use one of them"
            )
        if self.source is None:
            if source == LOOP:
                self.begin_loop()
            self.source = source

    def begin_loop(self) -> None:
        """Called before the first :func:`~hvd_compress.average_gradients`, on all ranks. May raise ``ValueError``."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context for a part of a step. If it fails, the step is reset."""
        with self._engine.entered:
            try:
                yield
            except BaseException:
                self._reset()
                raise

    def _reset(self) -> None:
        self.reset()

    def exchange(self) -> None:
        """Runs the exchanges of a step to their ends, and writes the averages."""
        engine = self._engine
        engine.dense.start()
        if self.collecting:
            self.finish()
        else:  # of a bucket without parameters of this compressor
            engine.exchanges.finish()
        engine.dense.write(engine.method)
        for work in engine.works:
            work.bucket.write_results()
