"""The average of all weights in full precision, in place of a round: at the end, and before a test."""

from ..engine.dense import average_in_place
from ..engine.engine import Engine
from .common_weights import CommonWeights
from .fragments import Turns
from .round import count_gradients


def average_weights(engine: Engine, common: CommonWeights, turns: Turns) -> None:
    """Averages all weights of all ranks, which become the common weights."""
    whole = [weight.own.to(weight.common.dtype, copy=True) for weight in common.weights]
    for tensor in whole:
        engine.stats.count_dense(0, tensor.nbytes, engine.collectives.size, engine.nodes.ranks)
    for fragment, age in zip(turns.fragments, turns.ages, strict=True):
        count_gradients(engine, fragment, age)
    average_in_place(whole, engine.collectives, f"{engine.exchanges.label}.finish")
    common.replace(whole)
