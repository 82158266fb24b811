"""Several optimizers for one model."""

from collections.abc import Iterable

import torch


def muon_and_adamw(parameters: Iterable[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Of matrices and of the rest."""
    parameters = list(parameters)
    matrices, rest = ([p for p in parameters if (p.dim() == 2) == muon] for muon in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def halves(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Two parameters and the others."""
    parameters = list(model.parameters())
    return parameters[:2], parameters[2:]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    """Steps with random gradients, which are gone afterwards."""
    for number in range(count):
        torch.manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()


class Named(torch.optim.SGD):
    """Saves by names, as optimizers of named parameters do, and has a state that is no parameter's."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step(closure)

    def state_dict(self):
        plain = super().state_dict()
        names = {f"p{key}" if isinstance(key, int) else key: value for key, value in plain["state"].items()}
        return {"by name": names, "groups": plain["param_groups"]}

    def load_state_dict(self, state_dict):
        numbers = {int(k[1:]) if k[1:].isdigit() else k: v for k, v in state_dict["by name"].items()}
        super().load_state_dict({"state": numbers, "param_groups": state_dict["groups"]})


def named_and_adamw(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    first, second = halves(model)
    return [Named(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=0.01)]


def two_named(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [Named(part, lr=0.1, momentum=0.9) for part in halves(model)]


def step(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], number: int) -> None:
    """One step by random gradients, which ``number`` decides."""
    torch.manual_seed(number)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()
