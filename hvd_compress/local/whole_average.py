"""The average of all weights in full precision, in place of a round: at the end, and before a test."""

import torch

from ..engine.arguments import plain_names
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


def check_model(model: torch.nn.Module, common: CommonWeights) -> None:
    """Raises ``ValueError`` if the model has none of the parameters of the local steps, or others of their names."""
    named = dict(model.named_parameters())
    held = {id(p) for p in named.values()}
    if held and held.isdisjoint(common.ids):
        raise ValueError(
            "finish(model): this model has none of the parameters that the compressor was given (a copy, another "
            "model, or one after load_state_dict(assign=True)?)"
        )
    theirs = dict(zip(plain_names(list(named)), named.values(), strict=True))
    for weight in common.weights:
        if id(weight.parameter) not in held and weight.name in theirs:
            raise ValueError(
                f"finish(model): the model has another parameter {weight.name} than the compressor was given "
                "(load_state_dict(assign=True)?): build the compressor, the optimizer and LocalSteps after that"
            )
