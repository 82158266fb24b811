"""Several optimizers for one model."""

from collections.abc import Iterable

import torch


def muon_and_adamw(parameters: Iterable[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Of matrices and of the rest."""
    parameters = list(parameters)
    matrices, rest = ([p for p in parameters if (p.dim() == 2) == muon] for muon in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
