"""Several optimizers as one, for trainers that take one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Steps several optimizers of different parameters, such as Muon of the hidden matrices and AdamW of the rest.

    Its ``param_groups`` are theirs, so that a learning-rate schedule changes those. Its state is theirs, too.

    Example::

        matrices, others = hvd_compress.hidden_matrices(model)
        muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(others.values(), lr=3e-3)
        optimizer = hvd_compress.trainers.CombinedOptimizer([muon, adamw])

    Args:
        optimizers: at least one.

    Raises:
        ValueError: no optimizers, a parameter that two of them hold, or a call of ``add_param_group()``.
    """

    _complete = False

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        if not self.optimizers:
            raise ValueError("CombinedOptimizer takes at least one optimizer, got an empty list")
        super().__init__([group for optimizer in self.optimizers for group in optimizer.param_groups], {})
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ``ValueError``: none of the optimizers would step the group."""
        if self._complete:
            raise ValueError(
                "CombinedOptimizer takes no parameter groups after it was built: add the group to one of its "
                "optimizers before that"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """For ``copy.deepcopy()`` and ``pickle``: the copies of the optimizers share the copied groups."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "optimizers": self.optimizers, "_complete": self._complete}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps each optimizer once. ``closure`` is called before, once; its result is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As that of one optimizer."""
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` has returned, into each optimizer."""
        super().load_state_dict(state_dict)
        groups = list(self.param_groups)
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            optimizer.param_groups[:], groups = groups[:count], groups[count:]
            held = {p for group in optimizer.param_groups for p in group["params"]}
            optimizer.state.clear()
            optimizer.state.update({p: state for p, state in self.state.items() if p in held})
