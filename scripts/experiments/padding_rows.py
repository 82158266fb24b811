"""How far the row of an embedding's padding_idx moves, whose gradient is always zero: its root mean square movement as
a share of the mean movement of the other rows, in per cent, after 20, 100 and 400 steps. Two ranks of torch DDP.

bash scripts/run.sh --ddp 2 scripts/experiments/padding_rows.py"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress

ROWS, WIDTH, PAD, STEPS = 300, 64, 7, (20, 100, 400)
SGD, SIGNS = partial(torch.optim.SGD, lr=1.0), partial(torch.optim.SGD, lr=1e-3)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
LLOYD = {"values": "lloyd4"}
#: Name: compressor, optimizer.
TRAININGS: dict[str, tuple[Callable[..., Any], Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = {
    "NoCompression": (hvd_compress.NoCompression, SGD),
    "TopK": (hvd_compress.TopK, SGD),
    "Quantized": (hvd_compress.Quantized, SGD),
    "FFT": (hvd_compress.FFT, SGD),
    'FFT, values="fp32"': (partial(hvd_compress.FFT, values="fp32"), SGD),
    "DeMo, sign=False": (partial(hvd_compress.DeMo, sign=False), SGD),
    "DeMo": (hvd_compress.DeMo, SIGNS),
    "DeMo, orthogonal=True": (partial(hvd_compress.DeMo, orthogonal=True), SIGNS),
    "IWP, lloyd4": (partial(hvd_compress.IWP, **LLOYD), SGD),
    "MIPD, lloyd4": (partial(hvd_compress.MIPD, **LLOYD), SGD),
    "SlimDP, lloyd4": (partial(hvd_compress.SlimDP, **LLOYD), SGD),
    "FFT, AdamW": (hvd_compress.FFT, ADAMW),
    "IWP, lloyd4, AdamW": (partial(hvd_compress.IWP, **LLOYD), ADAMW),
    "MIPD, lloyd4, AdamW": (partial(hvd_compress.MIPD, **LLOYD), ADAMW),
}


class Bag(nn.Module):
    """The mean of the rows of some words, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH, padding_idx=PAD), nn.Linear(WIDTH, 32)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(words).sum(1) / (words != PAD).sum(1, keepdim=True))
        return out


def shares(build: Callable[..., Any], optimizer: Callable[..., torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    model, truth = Bag(), torch.randn(ROWS, 32)
    begun = model.table.weight.detach().clone()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(build(model, min_numel=512), hvd_compress.ddp_hook)
    chosen, found = optimizer(model.parameters()), []
    data = torch.Generator().manual_seed(distributed.get_rank())
    for step in range(1, STEPS[-1] + 1):
        words = torch.randint(0, ROWS, (64, 8), generator=data)
        words[:, 6:][torch.rand(64, 2, generator=data) < 0.5] = PAD
        target = (truth[words] * (words != PAD)[..., None]).sum(1).argmax(1)
        chosen.zero_grad()
        nn.functional.cross_entropy(ddp(words), target).backward()
        chosen.step()
        if step in STEPS:
            moved = (model.table.weight.detach() - begun).square().mean(1).sqrt()
            others = torch.cat([moved[:PAD], moved[PAD + 1 :]])
            found.append(100 * float(moved[PAD] / others.mean()))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rows = [[name, *shares(*training)] for name, training in TRAININGS.items()]
    if distributed.get_rank() == 0:
        headers = ["method", *(f"{steps} steps" for steps in STEPS)]
        print(tabulate(rows, headers, floatfmt=".1f", tablefmt="github"))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
