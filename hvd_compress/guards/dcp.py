"""A compressor that is given to torch.distributed.checkpoint (DCP).

People: put a compressor or local steps into the state that DCP saves.
Cost: one rank's residuals are saved for all ranks.
Noticed: `state_dict()` looks at its callers. In an object of the user's, only a warning.
Message: `torch.distributed.checkpoint would save one rank's state for all`, `torch.distributed.checkpoint saves one
    rank's state_dict() for all` …
Cure: [`DCPState`](checkpoints.md)
"""

import sys
from collections.abc import Iterator
from traceback import walk_stack

from ..engine.engine import Engine

#: Begins the names of DCP's modules that save and load. (Its "state_dict" is for models and optimizers.)
SAVERS = "torch.distributed.checkpoint.state_dict_"


def refuse_dcp(engine: Engine) -> None:
    """Called by ``Compressor.state_dict()``. Raises ``TypeError`` if torch.distributed.checkpoint has called that, and
    warns if it has called an object of the user's that did: under one key it saves one rank's state."""
    frames = callers()
    if next(frames, "").startswith(SAVERS):
        raise TypeError(
            "torch.distributed.checkpoint would save one rank's state for all: give it hvd_compress.DCPState("
            "compression) in place of the compressor"
        )
    if any(caller.startswith(SAVERS) for caller in frames):
        engine.warn(
            "torch.distributed.checkpoint saves one rank's state_dict() for all, unless every rank gives it another "
            "key: use hvd_compress.DCPState(compression).state_dict(), and its load_state_dict()"
        )


def callers() -> Iterator[str]:
    """The modules of the frames outside this package, innermost first."""
    package = __name__.partition(".")[0]
    for frame, _ in walk_stack(sys._getframe()):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != package:
            yield module
