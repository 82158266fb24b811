"""A layer that is trained no longer comes to rest: what was not sent of it arrives, and nothing else."""

from functools import partial

import pytest
import torch
from harness import replicas
from methods import METHODS
from torch import Tensor, nn

from hvd_compress import DGC, IWP, DeMo

BUILDS = {
    **{
        name: METHODS[name]
        for name in ("iwp", "iwp-lloyd4", "fft", "fft-gather", "demo", "demo-gather", "mipd", "slimdp")
    },
    **{name: METHODS[name] for name in ("mp2", "topk", "qsgd-feedback", "terngrad-feedback", "powersgd")},
    "iwp-momentum": partial(IWP, density=1 / 16, momentum=0.9),
    "dgc-momentum": partial(DGC, density=1 / 64),
    "demo-sign": DeMo,
    "demo-orthogonal": partial(DeMo, orthogonal=True),
    "demo-sign-gather": partial(DeMo, exchange="gather"),
    "demo-sign-everything": partial(DeMo, density=1.0),
}
#: Those of which the exchange or the codec differs from another one's: with --all.
SLOW = ("iwp-lloyd4", "fft-gather", "demo-gather", "demo-sign-gather", "demo-sign-everything")
#: Those that rest after 180 steps; others after 80.
LATER = ("slimdp", "terngrad-feedback")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in BUILDS]
)
def test_a_layer_without_gradients_comes_to_rest(name):
    build, rests = BUILDS[name], 180 if name in LATER else 80
    world, ranks = replicas(2, build, nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(32, 48)), "ddp")

    def body(i: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(i)
        moves = []
        for step in range(rests + 40):
            grads = [torch.randn(p.shape, generator=generator) for p in ranks[i].model.parameters()]
            if step >= 20:
                grads[1:] = map(torch.zeros_like, grads[1:])
            moves.append(torch.stack([grad.abs().sum() for grad in ranks[i].exchange(grads)]))
        return moves

    moves = torch.stack(world.run(body)[0])
    assert moves.isfinite().all() and moves[rests:, 0].sum() > 0
    assert moves[rests:, 1].sum() < 0.2 * moves[:40, 1].sum()
