"""Ranks that differ, on real ranks: all raise the same error before anything is exchanged, so the job can go on."""

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import job
import torch
from cases import Cases, register
from job import DEVICE, Branches

import hvd_compress

CASES: Cases = {}


def frozen_before(model):
    model.head.bias.requires_grad_(False)
    return hvd_compress.IWP(model.named_parameters())


def frozen_after(model):
    compression = hvd_compress.IWP(model.named_parameters())
    model.head.bias.requires_grad_(False)
    return compression


def loaded(model):
    compression = hvd_compress.IWP(model.named_parameters())
    compression.load_state_dict({**compression.state_dict(), "step": 3})
    return compression


def reordered(model):
    return hvd_compress.IWP(list(model.named_parameters())[::-1])


def renamed(model):
    return hvd_compress.IWP([(f"network.{name}", p) for name, p in model.named_parameters()])


#: What makes the last rank's compressor from its model, and what the error says; the others have IWP's defaults.
DIFFERENCES = {
    "another_density": (partial(hvd_compress.IWP, density=1.0), "density: 0.03125 on rank"),
    "another_min_numel": (partial(hvd_compress.IWP, min_numel=16), "min_numel: 1024 on rank"),
    "mipd_on_one_rank": (hvd_compress.MIPD, "method: IWP on rank"),
    "qsgd_on_one_rank": (hvd_compress.QSGD, "method: IWP on rank"),
    "terngrad_on_one_rank": (hvd_compress.TernGrad, "method: IWP on rank"),
    "another_order": (reordered, "parameter stem.weight: number 0"),
    "other_names": (renamed, "parameter stem.weight: number 0"),
    "bias_frozen_before": (frozen_before, "frozen"),
    "bias_frozen_between_compressor_and_optimizer": (frozen_after, "frozen"),
    "state_loaded_on_one_rank": (loaded, "step: 0 on rank"),
}


def _differs(name: str) -> None:
    """The first backward raises the same error on every rank."""
    odd, says = DIFFERENCES[name]
    torch.manual_seed(0)
    model = Branches().to(DEVICE)
    build = odd if job.host.rank() == job.host.size() - 1 else hvd_compress.IWP
    text = _first_step(model, build(model))
    assert says in text and "must not" in text, text
    everyone = job.host.gather(torch.tensor([hash_of(text)]))
    assert (everyone == everyone[0]).all(), "ranks raise different errors"


for _name in DIFFERENCES:
    _run = partial(_differs, _name)
    _run.__name__ = _name
    register(CASES, named=True)(_run)


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


@register(CASES, named=True)
def one_rank_without_a_compressor():
    """The last case of a job: collectives stay open in which not all ranks take part."""
    torch.manual_seed(0)
    model, last = Branches().to(DEVICE), job.host.rank() == job.host.size() - 1
    text = _first_step(model, None if last else hvd_compress.IWP(model.named_parameters(), start_timeout=2.0))
    who = f"rank {job.host.size() - 1}" if job.host.name == "ddp" else "not every rank"
    assert last or (f"{who} has" in text and "compared its options within 2 s" in text), text
    # The others are told while the last rank still runs: at the end of its process Horovod would end on all ranks.
    folder, end = Path(os.environ["HVD_COMPRESS_TEST_LOGS"]), time.monotonic() + 200
    (folder / f"told-{job.host.rank()}").touch()
    while last and len(list(folder.glob("told-*"))) < job.host.size():
        assert time.monotonic() < end, "the other ranks were not told"
        time.sleep(0.05)
