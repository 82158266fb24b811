"""Several optimizers as one, for trainers that take one."""

import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Steps several optimizers of different parameters, such as Muon of the hidden matrices and AdamW of the rest.

    Its ``param_groups`` and ``state`` are views of the optimizers' own, so that a learning-rate schedule changes them.

    Example::

        matrices, others = hvd_compress.hidden_matrices(model)
        muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others.values(), lr=3e-3)
        optimizer = hvd_compress.trainers.CombinedOptimizer([muon, adamw])

    Raises:
        ValueError: no optimizers, a parameter that two of them hold, or a call of ``add_param_group()``.
    """

    optimizers: list[Optimizer]

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        given = list(optimizers)
        if not given:
            raise ValueError("CombinedOptimizer takes at least one optimizer, got an empty list")
        held = [p for optimizer in given for group in optimizer.param_groups for p in group["params"]]
        if len(set(held)) < len(held):
            raise ValueError("CombinedOptimizer: some parameters appear in more than one parameter group")
        # Schedules look in the defaults whether all groups have a momentum.
        defaults = {key: value for key, value in given[0].defaults.items() if all(key in o.defaults for o in given)}
        self.__setstate__({"defaults": defaults, "optimizers": given})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> "_States":  # type: ignore[override]
        return _States(self.optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ValueError(
            "CombinedOptimizer takes no parameter groups after it was built: add the group to one of its "
            "optimizers before that, or now: combined.optimizers[0].add_param_group(group)"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "optimizers": self.optimizers}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps each optimizer once. ``closure`` is called once, before them; its result is returned. An optimizer that
        cannot step without one, such as LBFGS, gets it, too."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            taken = inspect.signature(optimizer.step).parameters.get("closure")
            optimizer.step(*([closure] if closure and taken and taken.default is taken.empty else []))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def train(self) -> None:
        """Switches the schedule-free optimizers to training, as :meth:`eval` does to evaluation."""
        for optimizer in self.optimizers:
            getattr(optimizer, "train", lambda: None)()

    def eval(self) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, "eval", lambda: None)()

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of one torch optimizer; states of other forms are under ``"optimizers"``, by number."""
        own = {number: o.state_dict() for number, o in enumerate(self.optimizers) if _has_own_form(o)}
        return super().state_dict() | ({"optimizers": own} if own else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict.copy()) or state_dict
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        rest, own = iter(state_dict["param_groups"]), state_dict.get("optimizers", {})
        for number, optimizer in enumerate(self.optimizers):
            groups = [next(rest) for _ in optimizer.param_groups]
            places = {key: place for place, key in enumerate(key for group in groups for key in group["params"])}
            state = {places[key]: value for key, value in state_dict["state"].items() if key in places}
            groups = [{**group, "params": [places[key] for key in group["params"]]} for group in groups]
            optimizer.load_state_dict(own.get(number, {"state": state, "param_groups": groups}))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _has_own_form(optimizer: Optimizer) -> bool:
    """Whether an optimizer saves another form than torch's numbered states of its parameters."""
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    own = getattr(optimizer.state_dict, "__func__", None) is not Optimizer.state_dict
    return bool(hooks) or own or not all(isinstance(key, torch.Tensor) for key in optimizer.state)


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers. A parameter's state is in the optimizer that holds it."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> Any:
        for optimizer in self._optimizers:
            if key in optimizer.state or any(key is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state
        return self._optimizers[0].state

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Any]:
        return iter({key: None for optimizer in self._optimizers for key in optimizer.state})

    def __len__(self) -> int:
        return sum(1 for _ in self)
