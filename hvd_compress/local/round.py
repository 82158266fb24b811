"""One round of one fragment of the weights: its progress goes to the compressor, and averages come back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.place import check_gradient
from ..engine.state import load
from .common_weights import CommonWeights, Weight
from .fragments import Fragment
from .lengths import Lengths


class Round:
    """A fragment from its progress to its new weights. One list of tensors, by weight, is three things in turn:

    ``progress``
        d, how far each weight of this rank has come. The compressor gets it as a gradient.
    ``averages``
        u, after :meth:`receive`: the average as far as it was sent, in the same memory.
    ``left``
        what :meth:`land` adds to the new weights besides the common ones: of u, what is not finite, so that all ranks
        see it; 0 elsewhere. After a failure, the progress that was not compressed.

    Args:
        age: local steps that the progress is of.
        keep: whether the parameters keep the progress that they make meanwhile.
        lengths: restores the length of the averages, or None.
    """

    def __init__(
        self,
        engine: Engine,
        common: CommonWeights,
        fragment: Fragment,
        age: int,
        keep: bool,
        lengths: Lengths | None,
    ) -> None:
        self._engine, self._common, self.fragment, self.age = engine, common, fragment, age
        self._tensors = common.progress(fragment.weights)
        self._lengths = lengths
        self._squares = [] if lengths is None else [lengths.squares(fragment.weights, self._tensors)]
        # By weight, what its average is to be multiplied by; None: nothing.
        self._factors: Sequence[Tensor | None] = [None] * len(fragment.weights)
        # By weight, w(0) and the place of w'.
        self._pairs = [_pair(weight) if keep else None for weight in fragment.weights]

    def send(self) -> None:
        """Starts to exchange the progress."""
        engine = self._engine
        # The last parameters first: their buckets come first.
        for weight, progress in reversed(list(zip(self.fragment.weights, self._tensors, strict=True))):
            check_gradient(weight.name, progress, weight.place)
            engine.arrive(weight.number, progress)
        count_gradients(engine, self.fragment, self.age - 1)  # arrive() has counted one
        for squares in self._squares:
            engine.stats.count_dense(0, squares.nbytes, engine.collectives.size, engine.nodes.ranks)
            engine.dense.arrive(None, squares, squares)
        engine.dense.start(f"local.{self.fragment.number}")

    def receive(self) -> None:
        """Waits for the averages."""
        self._engine.finish()

    def store(self) -> None:
        """The averages count."""
        self._engine.dense.write(self._engine.method)
        for work in self.fragment.works:
            work.bucket.write_results()
            work.bucket.clear()  # or it would hold the averages until its next exchange
        if self._lengths is not None:
            self._factors = self._lengths.factors(self.fragment.weights, self._tensors, self._squares[0])

    def withdraw(self) -> list[tuple[Weight, Tensor]]:
        """The averages that were received do not count here, and what was compressed stays sent for now. Returns the
        progress that was not compressed, by weight; nothing is left of it here."""
        for work in self.fragment.works:
            work.bucket.clear()
        load(self._engine.state(), self._engine.step - 1)
        pairs = zip(self.fragment.weights, self._tensors, strict=True)
        kept = [(weight, tensor.clone()) for weight, tensor in pairs if weight.place is None]
        for weight, tensor in zip(self.fragment.weights, self._tensors, strict=True):
            with weight.order:
                tensor.zero_()
        return kept

    def land(self, received: bool) -> dict[str, Tensor]:
        """Moves the common weights by the averages, if they were ``received``, and makes the new weights of this rank.
        They are written to the parameters, or returned, by name, with those at the beginning: w(0) and w', float32 or
        wider, (2, *shape)."""
        weights, waiting = self.fragment.weights, dict[str, Tensor]()
        if received:
            self._common.move(weights, self._tensors, self._factors)
        self._common.end(weights)
        for weight, left, pair in zip(weights, self._tensors, self._pairs, strict=True):
            with weight.order:
                self._common.write_after(weight, left, weight.own if pair is None else pair[1])
            if pair is not None:
                waiting[weight.name] = pair
        return waiting

    def clear(self) -> None:
        """The parameters are other ones: nothing is written."""
        self._common.end(self.fragment.weights)


def _pair(weight: Weight) -> Tensor:
    """The weight as it is now, and memory for the weight after the exchange: float32 or wider, (2, *shape), both in its
    memory order."""
    common = weight.common
    shape, strides = (2, *common.shape), (common.numel(), *common.stride())
    with weight.order:
        pair = torch.empty_strided(shape, strides, dtype=common.dtype, device=common.device)
        pair[0].copy_(weight.own)
    return pair


def count_gradients(engine: Engine, fragment: Fragment, steps: int) -> None:
    """Counts a dense exchange of the gradients of so many steps. In nodes, this rank's share of it."""
    nodes = engine.nodes
    for weight in fragment.weights:
        owner = None if weight.place is None else weight.place.work.bucket.owner
        share = 1.0 / nodes.ranks if owner is None else float(owner == nodes.rank)
        engine.stats.count_gradient(steps * weight.own.numel(), engine.collectives.size, share)
