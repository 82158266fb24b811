"""Parameters of the model that are no longer those that the compressor was given.

People: call `load_state_dict(assign=True)`, `fully_shard()`, or `to_empty()` of a model on the meta device after the
    compressor was built, or add a layer; give `finish()` a copy of the model.
Cost: other parameters are trained than are averaged, and the ranks end apart.
Noticed: the modules' parameters are compared by identity, in the first call and before each exchange.
Message: `the model has other parameters than the compressor was given`, `the model has another parameter`,
    `this model has none of the parameters that the compressor was given` …
Cure: build compressor, optimizer and `LocalSteps` after that, and give `finish()` the model that is trained
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.arguments import plain_names
from ..engine.shards import is_sharded

Named = Sequence[tuple[str, Tensor]]


class ReplacedParameters:
    """Knows the modules that hold the parameters, and the ids of these: torch swaps no tensor with a weak reference.

    Args:
        named: names and parameters.
        model: the model that has them, if it is known.
    """

    def __init__(self, named: Named, model: torch.nn.Module | None) -> None:
        # Not sharded ones: FSDP2 replaces its modules' parameters by gathered ones, and back.
        names = {id(p): name for name, p in named if not is_sharded(p)}
        self._model = None if model is None else weakref.ref(model)
        self._places = [
            (names[id(p)], weakref.ref(module), key, id(p))
            for module in (model.modules() if model is not None else ())
            for key, p in module._parameters.items()
            if p is not None and id(p) in names
        ]

    def check(self) -> None:
        """Raises ``ValueError`` if parameters of the model were replaced."""
        places = [(name, module(), key, own) for name, module, key, own in self._places]
        moved = [(name, own) for name, m, key, own in places if m is None or id(m._parameters.get(key)) != own]
        if not moved:
            return
        model = None if self._model is None else self._model()
        held = {id(p) for p in model.parameters()} if model is not None else set[int]()  # a parametrization moves some
        if gone := [name for name, own in moved if own not in held]:
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            raise ValueError(
                f"{', '.join(gone[:3])}{more}: the model has other parameters than the compressor was given "
                "(load_state_dict(assign=True), fully_shard() or a new layer after it was built?): build the "
                "compressor, the optimizer and LocalSteps after that"
            )


def check_model(model: torch.nn.Module, known: Named) -> None:
    """Raises ``ValueError`` if a model has none of the known parameters, or others of their names."""
    named = dict(model.named_parameters())
    held = {id(p) for p in named.values()}
    if held and held.isdisjoint(id(p) for _, p in known):
        raise ValueError(
            "finish(model): this model has none of the parameters that the compressor was given (a copy, another "
            "model, or one after load_state_dict(assign=True)?)"
        )
    theirs = dict(zip(plain_names(list(named)), named.values(), strict=True))
    for name, parameter in known:
        if id(parameter) not in held and name in theirs:
            raise ValueError(
                f"finish(model): the model has another parameter {name} than the compressor was given "
                "(load_state_dict(assign=True)?): build the compressor, the optimizer and LocalSteps after that"
            )
