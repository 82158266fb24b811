"""Local steps under their published names: a compressor and :class:`hvd_compress.LocalSteps` in one call.

Each function takes the model, the optimizer or the list of optimizers that take the local steps, and the period. It
returns the :class:`~hvd_compress.LocalSteps`, whose ``compression`` has the statistics and the state to save. Further
arguments are the compressor's (``process_group``, ``dense_values``, ...). Errors are those of the two classes;
arguments in another order raise a ``TypeError`` that shows the call to write.

================  =======================  ====================  ========================  ============================
recipe            optimizer                exchanged             how averages are applied  bytes against dense training
================  =======================  ====================  ========================  ============================
``low_bit``       Muon; any                all, 2 bits           average, length restored  16 x period times fewer
``diloco``        AdamW, Muon              all, float32          Nesterov, 0.7 and 0.9     period times fewer
``sparseloco``    AdamW                    1/64, every rank's    plain average             grow with the ranks
================  =======================  ====================  ========================  ============================

Plain local SGD (Stich, ICLR 2019) is ``LocalSteps(NoCompression(model), optimizer, period)``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from .engine.arguments import NamedParameters, named_pairs
from .local.steps import LocalSteps
from .methods.no_compression import NoCompression
from .methods.quantized import Quantized
from .methods.topk import TopK

__all__ = ["diloco", "low_bit", "sparseloco"]

Optimizers = Optimizer | Sequence[Optimizer]
Recipe = TypeVar("Recipe", bound=Callable[..., LocalSteps])


def _in_order(recipe: Recipe) -> Recipe:
    """Decorates a recipe: it gets the optimizers as a list. Raises ``TypeError`` if it was not given a model, one or
    several optimizers, and a period, in this order."""
    name = recipe.__name__

    @wraps(recipe)
    def called(model: Any, optimizers: Any, *others: Any, **options: Any) -> LocalSteps:
        call = f"{name}(model, {{}}, period)".format
        if isinstance(model, Optimizer) or isinstance(optimizers, torch.nn.Module):
            raise TypeError(f"the model comes first, then the optimizer: {call('optimizer')}")
        given = list(optimizers) if _is_list(optimizers) else [optimizers]
        wrong = [item for item in given if not hasattr(item, "param_groups")]  # wrappers are no Optimizer
        if wrong or not given:
            got = type(wrong[0]).__name__ if wrong else "an empty list"
            raise TypeError(
                f"{name} takes a torch.optim.Optimizer, or a list of several: {call('optimizer')}; got {got}"
            )
        more = [item for other in others for item in (other if _is_list(other) else [other])]
        if more := [item for item in more if isinstance(item, Optimizer)]:
            names = ", ".join(type(item).__name__.lower() for item in [*given, *more])
            raise TypeError(f"several optimizers are given as a list: {call(f'[{names}]')}")
        if not isinstance(model, torch.nn.Module):
            model = named_pairs(model, call("optimizer"))
        return recipe(model, given, *others, **options)

    return cast(Recipe, called)


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | Mapping | torch.Tensor)


@_in_order
def low_bit(
    model: NamedParameters,
    optimizers: Optimizers,
    period: int = 3,
    *,
    bits: int = 2,
    mean_bits: int | None = None,
    decay: float = 1.0,
    restore_length: bool = True,
    fragments: int = 1,
    delay: int = 0,
    on_averaged_gradients: Optimizers = (),
    **options: Any,
) -> LocalSteps:
    """Local steps with differences of ``bits`` bits and error feedback. Ours; the first advice for transformers with
    Muon (``docs/choosing.md``).

    Example::

        matrices, others = hvd_compress.hidden_matrices(model)
        muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others.values(), lr=3e-3)
        local = hvd_compress.recipes.low_bit(model, [muon, adamw], period=3)
        local.step()  # after each muon.step() and adamw.step()
        local.finish(model)  # on all ranks, before testing

    Args:
        model: or its named parameters.
        optimizers: one optimizer, or a list of several of different parameters.
        period: steps between two exchanges. Few steps in few bits train better than many steps in more bits at the same
            bytes.
        bits, mean_bits: of an entry, and of an entry of the average (:class:`~hvd_compress.Quantized`).
        restore_length: keep the learning rate of a dense training. Without it, try 1.5 and 2 times that rate.
        decay, fragments, delay, on_averaged_gradients: see :class:`~hvd_compress.LocalSteps`. With many ranks, try
            ``low_bit(model, muon, on_averaged_gradients=adamw)``, and add ``dense_values="fp32"`` if gradients of
            vectors are below 1e-6, or, summed over a period and all ranks, above 65,504, float16's range.
        options: further arguments of the compressor.
    """
    compression = Quantized(model, bits, mean_bits=mean_bits, **{"dense_values": "fp16", **options})
    local = partial(LocalSteps, compression, optimizers, period, decay=decay, restore_length=restore_length)
    return local(fragments=fragments, delay=delay, on_averaged_gradients=on_averaged_gradients)


@_in_order
def diloco(
    model: NamedParameters,
    optimizers: Optimizers,
    period: int = 30,
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    delay: int = 0,
    **options: Any,
) -> LocalSteps:
    """DiLoCo (Douillard et al., arXiv 2311.08105): many AdamW steps, then a Nesterov step of the common weights. With
    ``fragments`` and ``delay``, Streaming DiLoCo (Douillard et al., arXiv 2501.18512). With Muon and
    ``outer_momentum=0.6``, MuLoCo (Therien et al., arXiv 2505.23725). With ``outer_lr=1.0, outer_momentum=0.0``, local
    SGD (Stich, ICLR 2019): the plain average of the weights.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        local = hvd_compress.recipes.diloco(model, optimizer, period=30)

    Args:
        model, optimizers, period, fragments, delay, options: see :func:`low_bit`. The paper's period is 500, for
            trainings of many more steps.
        outer_lr, outer_momentum: of the common weights.
    """
    local = partial(LocalSteps, NoCompression(model, **options), optimizers, period, outer_lr=outer_lr)
    return local(outer_momentum=outer_momentum, fragments=fragments, delay=delay)


@_in_order
def sparseloco(
    model: NamedParameters,
    optimizers: Optimizers,
    period: int = 15,
    *,
    density: float = 1 / 64,
    decay: float = 0.95,
    fragments: int = 1,
    delay: int = 0,
    **options: Any,
) -> LocalSteps:
    """SparseLoCo (Sarfi et al., arXiv 2508.15706): each rank sends its largest differences; the rest stays in an
    error-feedback buffer that decays, in place of outer momentum.

    Ours: the largest of every tensor, not of chunks of 4,096; float32 values and indices of four bytes, not 2 bits.

    Example::

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        local = hvd_compress.recipes.sparseloco(model, optimizer, period=15)

    Args:
        model, optimizers, period, fragments, delay, options: see :func:`low_bit`.
        density: the share of the entries that a rank sends.
        decay: of the buffer, after each exchange.
    """
    compression = TopK(model, density, **options)
    return LocalSteps(compression, optimizers, period, decay=decay, fragments=fragments, delay=delay)
