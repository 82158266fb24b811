"""A warning for sparse gradients with Adam, whose cost docs/choosing.md shows."""

from torch.optim import Adam, Optimizer

from ..engine.engine import Engine


def warn_of_adam(engine: Engine, optimizer: Optimizer, sparse: bool) -> None:
    """Warns if an optimizer of Adam's family receives ``sparse`` gradients: of which a step has only a share."""
    if isinstance(optimizer, Adam) and sparse and engine.local_steps is None:
        engine.warn(
            "Adam trains badly on sparse gradients: an entry that has waited arrives as one burst, and Adam scales its "
            "steps by bursts (docs/choosing.md); use hvd_compress.DeMo with torch.optim.SGD, or "
            "hvd_compress.LocalSteps, which keeps Adam"
        )
