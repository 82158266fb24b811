"""Ranks that differ, on real ranks: all raise the same error before anything is exchanged, so the job can go on."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import job
import torch
from cases import Cases, register
from job import DEVICE, Branches

import hvd_compress

CASES: Cases = {}
#: Makes a compressor on the last rank: from the model.
Odd = Callable[[Any], Any]


def differs(says: str) -> Callable[[Odd], Odd]:
    """The last rank builds its compressor as the decorated function does, the others with IWP's defaults: the first
    backward raises an error that contains ``says`` on every rank."""

    def add(odd: Odd) -> Odd:
        def run() -> None:
            torch.manual_seed(0)
            model = Branches().to(DEVICE)
            odd_one = job.host.rank() == job.host.size() - 1
            compression = odd(model) if odd_one else hvd_compress.IWP(model.named_parameters())
            text = _first_step(model, compression)
            assert says in text and "must not" in text, text
            everyone = job.host.gather(torch.tensor([hash_of(text)]))
            assert (everyone == everyone[0]).all(), "ranks raise different errors"

        run.__name__ = odd.__name__
        register(CASES, named=True)(run)
        return odd

    return add


def hash_of(text: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(text))


def _first_step(model: Any, compression: Any) -> str:
    """The text of the error that the first backward pass raises."""
    trained = SimpleNamespace(model=model, compression=compression, passes=1, unused=False, group=None, observe=None)
    trained.plain_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.host.wrap(trained)
    try:
        trained.forward(torch.randn(4, 3, 6, 6, device=DEVICE), range(6)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@differs("density: 0.03125 on rank")
def another_density(model):
    return hvd_compress.IWP(model.named_parameters(), density=1.0)


@differs("min_numel: 1024 on rank")
def another_min_numel(model):
    return hvd_compress.IWP(model.named_parameters(), min_numel=16)


@differs("method: IWP on rank")
def mipd_on_one_rank(model):
    return hvd_compress.MIPD(model.named_parameters())


@differs("method: IWP on rank")
def qsgd_on_one_rank(model):
    return hvd_compress.QSGD(model.named_parameters())


@differs("method: IWP on rank")
def terngrad_on_one_rank(model):
    return hvd_compress.TernGrad(model.named_parameters())


@differs("parameter stem.weight: number 0")
def another_order(model):
    return hvd_compress.IWP(list(model.named_parameters())[::-1])


@differs("parameter stem.weight: number 0")
def other_names(model):
    return hvd_compress.IWP([(f"network.{name}", p) for name, p in model.named_parameters()])


@differs("frozen")
def bias_frozen_before(model):
    model.head.bias.requires_grad_(False)
    return hvd_compress.IWP(model.named_parameters())


@differs("frozen")
def bias_frozen_between_compressor_and_optimizer(model):
    compression = hvd_compress.IWP(model.named_parameters())
    model.head.bias.requires_grad_(False)
    return compression


@differs("step: 0 on rank")
def state_loaded_on_one_rank(model):
    compression = hvd_compress.IWP(model.named_parameters())
    compression.load_state_dict({**compression.state_dict(), "step": 3})
    return compression


@register(CASES, named=True)
def one_rank_without_a_compressor():
    """The last case of a job: collectives stay open in which not all ranks take part."""
    torch.manual_seed(0)
    model, last = Branches().to(DEVICE), job.host.rank() == job.host.size() - 1
    begin = time.perf_counter()
    text = _first_step(model, None if last else hvd_compress.IWP(model.named_parameters(), start_timeout=2.0))
    if last:
        time.sleep(6.0)  # at the end of its process Horovod would end, too, on all ranks
    who = f"rank {job.host.size() - 1}" if job.host.name == "ddp" else "not every rank"
    assert last or (f"{who} has" in text and "compared its options within 2 s" in text), text
    assert last or time.perf_counter() - begin < 10.0
