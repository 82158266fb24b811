"""Weights of another time than the state of local steps that was loaded.

People: load `model.load_state_dict(best)` and `local.load_state_dict(last)`, in either order; or rank 0's model on all
    ranks, from between two exchanges.
Cost: the next exchange takes the difference for progress: a part of the old weights comes back, or rank 0's progress
    counts for all ranks.
Noticed: the state has a hash of the weights with which it was saved, which the next call compares. An error on all
    ranks.
Message: `the parameters are others than those with which the loaded state` …
Cure: both from one checkpoint, every rank its own; or `local.take_weights()` on all ranks after loading
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..engine.hashes import hash_of
from ..engine.shards import local
from ..engine.state import Recorded, Tree


class LoadedWeights:
    """Compares the weights with the saved hash, once after each loading at most."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        #: The hash of the parameters that were saved with the state that was loaded, until it is compared.
        self.saved_with: int | None = None
        #: Whether the parameters are others than those.
        self.foreign = False

    def look(self) -> None:
        """Compares the parameters, before a step or a call changes them."""
        saved, self.saved_with = self.saved_with, None
        self.foreign |= bool(saved) and saved != self._hash()

    def refuse(self) -> None:
        """Called before an exchange, when all ranks know it. Raises ``RuntimeError`` for foreign weights."""
        if self.foreign:
            raise RuntimeError(
                "the parameters are others than those with which the loaded state of the local steps was saved, and "
                "the next exchange would take the difference for progress: load both from one checkpoint (every rank "
                "its own, unless it was saved after finish()), or call local.take_weights() on all ranks after loading"
            )

    def forget(self) -> None:
        """The parameters have changed."""
        self.saved_with = None

    def clear(self) -> None:
        """The parameters are the right ones, or no state is loaded."""
        self.saved_with, self.foreign = None, False

    def state(self) -> dict[str, Tree]:
        """The saved state. Each rank's own weights are in the model: while they differ between ranks,
        :func:`hvd_compress.reshard` must refuse the states."""
        recorded = Recorded(self._hash, partial(setattr, self, "saved_with"))
        return {"hash of the weights (call finish() before saving)": recorded}

    def _hash(self) -> int:
        own = (local(p).detach() for p in self._parameters)
        return hash_of(p.to(torch.promote_types(p.dtype, torch.float32)) for p in own)
