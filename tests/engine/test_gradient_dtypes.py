"""Gradients of another dtype than their parameter's (``Tensor.grad_dtype`` of torch 2.13)."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import on_hosts_in_turn, replicas, together
from methods import KINDS, SMALL
from models import compressed, gradients, mixed_model

from hvd_compress import IWP, DeMo
from hvd_compress.engine.state import same

if not hasattr(torch.Tensor, "grad_dtype"):
    pytest.skip("this torch gives a gradient its parameter's dtype", allow_module_level=True)

PAIRS = [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)]


def run(build: Any, host: str, model: torch.nn.Module, values: torch.dtype, dtype: torch.dtype) -> list[Any]:
    """Steps with gradients of ``dtype`` that are exact in ``values``, too. Returns the averages of compressed
    parameters and what the ranks have kept of them."""
    world, ranks = replicas(2, build, model, host, **SMALL)
    for rank in ranks:
        for p in rank.model.parameters():
            p.grad_dtype = dtype
    found, exact = [], mixed_model()
    for step in range(3):
        seeds = (100 * step + rank.rank for rank in ranks)
        grads = [[g.to(values).to(dtype) for g in gradients(exact, seed)] for seed in seeds]
        found.append([[g.clone() for g in mine if compressed(g)] for mine in together(world, ranks, grads, step)])
        for rank in ranks:
            rank.compression.load_state_dict(rank.compression.state_dict())
    return [found, [r.compression.state_dict()["per_rank"].get("buckets") for r in ranks]]


@on_hosts_in_turn
@pytest.mark.alternate("dtypes")
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("name", list(KINDS))
def test_the_same_as_in_float32(name: str, dtypes: tuple[torch.dtype, torch.dtype], host: str) -> None:
    """To the last bit, but for the averages' rounding."""
    of_weights, of_gradients = dtypes
    model = mixed_model().to(of_weights)
    got, kept = run(KINDS[name], host, model, of_gradients, of_gradients)
    want, want_kept = run(KINDS[name], host, model.float(), of_gradients, torch.float32)
    assert same(kept, want_kept)
    assert same(got, [[[g.to(of_gradients) for g in mine] for mine in step] for step in want])


def test_float64_gradients_of_compressed_parameters_are_refused() -> None:
    model = mixed_model()
    world, ranks = replicas(1, IWP, model)
    for p in ranks[0].model.parameters():
        p.grad_dtype = torch.float64
    with pytest.raises(TypeError, match=r"conv.weight: its gradient is of dtype torch.float64, which is not"):
        together(world, ranks, [[g.double() for g in gradients(model, 0)]])


@pytest.mark.parametrize("build", [partial(IWP, momentum=0.9), DeMo])
def test_the_velocity_of_an_uncompressed_float64_gradient_is_saved(build: Any) -> None:
    model = mixed_model()
    world, ranks = replicas(1, build, model)
    for p in ranks[0].model.parameters():
        p.grad_dtype = torch.float32 if compressed(p) else torch.float64
    together(world, ranks, [[g if compressed(g) else g.double() for g in gradients(model, 0)]])
    ranks[0].compression.load_state_dict(ranks[0].compression.state_dict())
