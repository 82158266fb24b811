"""The average of all weights in full precision, in place of a round: at the end, and before a test."""

from ..engine.engine import Engine
from .averaged_steps import AveragedSteps
from .buffers import average_in_place
from .common_weights import CommonWeights
from .fragments import Turns
from .round import Round, count_gradients


def average_weights(engine: Engine, common: CommonWeights, averaged: AveragedSteps, turns: Turns, now: Round) -> None:
    """Averages all weights of all ranks, which become the common weights; those with sums move by the averages of
    these, unless they are of no call so far."""
    whole = [(w.own if w.sums is None else w.sums).to(w.common.dtype, copy=True) for w in common.weights]
    for tensor in whole:
        engine.stats.count_dense(0, tensor.nbytes, engine.collectives.size, engine.nodes.ranks)
    for fragment, age in zip(turns.fragments, turns.ages, strict=True):
        count_gradients(engine, fragment, age)
    average_in_place(whole, engine.collectives, f"{engine.exchanges.label}.finish")
    averages = {weight.name: mean for weight, mean in zip(common.weights, whole, strict=True)}
    with now.applying():
        common.replace(whole)
        for fragment, age in zip(turns.fragments, turns.ages, strict=True):
            summed = {weight.name: weight.sums for weight in fragment.weights if weight.sums is not None and age}
            averaged.step({name: averages[name] for name in summed}, age)
            for sums in summed.values():
                sums.zero_()
