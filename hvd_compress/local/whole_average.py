"""The average of all weights in full precision, in place of a round: at the end, and before a test."""

from ..engine.dense import Averaging, dense_gradient
from ..engine.engine import Engine
from .common_weights import CommonWeights
from .fragments import Turns
from .round import count_gradients


def average_weights(engine: Engine, common: CommonWeights, turns: Turns) -> None:
    """Averages all weights of all ranks, which become the common weights."""
    whole = [
        dense_gradient(weight.number, weight.parameter, weight.own.to(weight.common.dtype, copy=True), False, 1.0)
        for weight in common.weights
    ]
    payloads = [weight.payload for weight in whole]
    for payload in payloads:
        engine.stats.count_dense(0, payload.nbytes, engine.collectives.size, engine.nodes.ranks)
    for fragment, age in zip(turns.fragments, turns.ages, strict=True):
        count_gradients(engine, fragment, age)
    averages = Averaging(engine.collectives, payloads, f"{engine.exchanges.label}.finish").results()
    for weight, average in zip(whole, averages, strict=True):
        weight.store(average)
    common.replace(weight.grad for weight in whole)
