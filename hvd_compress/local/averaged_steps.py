"""Optimizers that step on averaged gradients: once a round, alike on all ranks, in place of local steps."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from ..engine.engine import Engine
from ..engine.hashes import hash_of
from ..engine.membership import Membership
from ..engine.modes import modes_off
from ..engine.optimizers import parameters_of
from ..engine.shards import any_in_shards, local
from ..engine.wrappers import leaves
from .common_weights import Weight, parted


class AveragedSteps:
    """The optimizers whose weights and states are common to all ranks, and move once a round.

    The user's step adds the gradients to the sums of the weights, and moves nothing. A round averages the sums; then
    the optimizer takes one step by the mean gradient, for as many calls as the sums are of (:func:`_for_several`).

    Args:
        optimizers: without wrappers.
        weights: all of the training.
        engine: of the compressor.
    """

    def __init__(self, optimizers: Sequence[Optimizer], weights: Sequence[Weight], engine: Engine) -> None:
        ids = {optimizer: parameters_of([optimizer]) for optimizer in optimizers}
        self._weights = {one: [w for w in weights if id(w.parameter) in held] for one, held in ids.items()}
        self._hooks = dict[Optimizer, tuple[RemovableHandle, ...]]()
        self._withheld: dict[Tensor, Tensor] = {}
        # Optimizers that the user has stepped since the last round, or may have.
        self._called, self._engine = set(optimizers), engine
        # By optimizer whose last step was by gradients of 0, the hash of the state that this has created, at its end.
        self._created = dict[Optimizer, int | None]()
        # Peers that come and go are at other places of a schedule.
        self._uncompared = {"params", "lr"} if isinstance(engine.collectives, Membership) else {"params"}

    def restart(self) -> None:
        """Other ranks, or another state."""
        self._created.clear()
        for optimizer in self._weights:
            self.after_step(optimizer)
        self._called.update(self._weights)

    def before_step(self, optimizer: Optimizer, begun: bool) -> None:
        """The user's step of an optimizer begins. Its own hooks come first, which may clip. A step that may only create
        a state is left alone, see :meth:`drop_created`."""
        own = [weight.parameter for weight in self._weights.get(optimizer, ())]
        if any(p in self._withheld for p in own) and all(p.grad is None for p in own):
            return  # super().step() of one whose gradients are withheld already
        if optimizer in self._created:
            self.drop_created(optimizer)
        self.after_step(optimizer)
        if not own:
            return
        self.refuse_counts(optimizer)
        if not optimizer.state and not (begun and any(group.get("lr") for group in optimizer.param_groups)):
            grads = [p.grad for p in own if p.grad is not None]
            if grads and not any(map(any_in_shards, grads)):  # or Muon would wait for ranks that do not step
                self._created[optimizer] = None
                return
        pre, post = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks[optimizer] = pre(self._take), post(modes_off(self._give_back))
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[optimizer][1].id, last=False)  # type: ignore[attr-defined]

    def refuse_counts(self, optimizer: Optimizer) -> None:
        """Raises ``ValueError`` for an optimizer on averaged gradients that counts calls in its groups."""
        if optimizer in self._weights and any("step" in group for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__} of on_averaged_gradients counts steps in its parameter groups: take one "
                "that counts in the states of parameters, as torch.optim.AdamW does, also with fused=True"
            )

    @modes_off
    def _take(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds the gradients to the sums, and withholds them from the step."""
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ValueError(
                f"{type(optimizer).__name__} of on_averaged_gradients takes no closure: call backward() before step(), "
                "or step it in a hvd_compress.trainers.CombinedOptimizer, which does so"
            )
        self._called.add(optimizer)
        # Of a GradScaler with a fused optimizer: the step itself divides by the scale, or does nothing.
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for weight in self._weights[optimizer]:
            if (grad := weight.parameter.grad) is None or weight.sums is None:
                continue
            self._withheld[weight.parameter] = grad
            if overflow is None or not bool(overflow):
                with weight.order:
                    weight.sums.add_(local(grad).detach() if scale is None else local(grad).detach() / scale)
        _give(self._withheld, {})

    def after_step(self, optimizer: Optimizer) -> None:
        """The user's step has ended, or was interrupted. Hooks of others stay: one of these may have called this."""
        for hook in self._hooks.pop(optimizer, ()):
            hook.remove()
        self._give_back()
        if optimizer in self._created:
            self._created[optimizer] = self._hash_of_states([optimizer])

    def drop_created(self, *optimizers: Optimizer) -> list[Weight]:
        """Drops the state that a last step by gradients of 0 has created, unless one was loaded since: other ranks may
        not have it. Returns the weights that this step may have moved. ``optimizers``: none for all."""
        found = [one for one in optimizers or [*self._created] if self._created.pop(one) == self._hash_of_states([one])]
        for optimizer in found:
            optimizer.state.clear()
        return [weight for optimizer in found for weight in self._weights[optimizer]]

    def _give_back(self, *_: object) -> None:
        """The gradients are the user's, unless there are new ones: before its other hooks, which may clear them."""
        _give([p for p in self._withheld if p.grad is None], self._withheld)
        self._withheld.clear()

    def step(self, averages: Mapping[str, Tensor], calls: int, rates: Tensor | None = None) -> bool:
        """Moves weights and states by the averages of sums of ``calls``, by name. Where an average is not finite, the
        optimizer gets 0, and the parameter becomes NaN or infinite. ``rates``: the mean of the ranks' :meth:`rates`.
        Returns whether there was a call; without one, averages are of residuals."""
        self._give_back()
        mean, *each = [float(calls)] if rates is None else rates.tolist()
        calls, given = max(1, round(mean)), iter(each)
        for optimizer, held in self._weights.items() if mean else ():
            gradients, left = dict[Tensor, Tensor](), list[Tensor]()
            weights = [weight for weight in held if weight.name in averages and weight.parameter.requires_grad]
            for weight in weights:
                gradient = gradients[weight.parameter] = torch.zeros_like(weight.parameter)
                with weight.order:
                    finite, unusable = parted(averages[weight.name])
                    weight.own.copy_(weight.common)
                    local(gradient).copy_(finite / mean)
                    left.append(unusable)
            parameters = [p for group in optimizer.param_groups for p in group["params"]] if weights else []
            before = {p: p.grad for p in parameters}
            try:
                with _for_several(optimizer, gradients, calls):
                    for group, rate in zip(optimizer.param_groups, given, strict=False):
                        group["lr"] = rate
                    _give(parameters, gradients)
                    if weights:
                        # Without torch's wrapper, which calls hooks and tells compressors.
                        unwrap(type(optimizer).step, stop=lambda step: not hasattr(step, "hooked"))(optimizer)
            finally:
                _give(parameters, before)
            for weight, unusable in zip(weights, left, strict=True):
                with weight.order:
                    weight.common.copy_(weight.own)
                    weight.own.add_(unusable)
        return bool(mean)

    def rates(self, calls: int) -> Tensor:
        """The calls, and each group's learning rate times these, float64: averaged by peers, whose calls differ."""
        each = [float(group.get("lr", 0.0)) for optimizer in self._weights for group in optimizer.param_groups]
        return torch.tensor([1.0, *each], dtype=torch.float64, device=self._engine.parameters[0].device) * calls

    def begin(self, calls: int) -> int:
        """A round begins, of so many calls. Returns :meth:`digest`."""
        for optimizer in self._weights.keys() - self._called if calls else ():
            self._engine.warn(
                f"{type(optimizer).__name__}.step() was not called since the last exchange: with "
                "on_averaged_gradients, too, it belongs in each iteration, where it takes the gradients (unless a "
                "GradScaler skips it)"
            )
        self._called.clear()
        return self.digest()

    def digest(self, *facts: object) -> int:
        """32 bits of the settings of the groups and of ``facts``, which must be the same on all ranks; 0 if there are
        no optimizers. Synchronises a GPU if settings are on it."""
        values = [v for o in self._weights for g in o.param_groups for k, v in g.items() if k not in self._uncompared]
        plain = [value.tolist() if isinstance(value, Tensor) else value for value in values]
        settings = [value for value in plain if isinstance(value, int | float | str | tuple | list | None)]
        return zlib.crc32(repr((facts, settings)).encode()) if self._weights else 0

    def digest_of_all(self) -> int:
        """:meth:`digest` with the optimizers' parameters and states. Synchronises a GPU."""
        numbers = [weight.number for weights in self._weights.values() for weight in weights]
        return self.digest(numbers, self._hash_of_states(self._weights))

    def _hash_of_states(self, optimizers: Iterable[Optimizer]) -> int:
        held = [(optimizer, weight) for optimizer in optimizers for weight in self._weights[optimizer]]
        states = leaves([optimizer.state.get(weight.parameter, {}) for optimizer, weight in held])
        return hash_of(local(leaf) for _, leaf in states if isinstance(leaf, Tensor))


def _give(parameters: Iterable[Tensor], gradients: Mapping[Tensor, Tensor | None]) -> None:
    for p in parameters:
        p.grad = gradients.get(p)


#: Optimizers whose step stands for several now.
_stepping = set[Optimizer]()


@dataclass(frozen=True)
class _Paused:
    """A hook that does not run in a step that stands for several. Its place in torch's dicts stays: another thread may
    iterate over these, and its optimizer's hooks run."""

    hook: Callable[..., Any]

    def __call__(self, optimizer: Optimizer, *given: Any) -> Any:
        return None if optimizer in _stepping else self.hook(optimizer, *given)


@contextmanager
def _for_several(optimizer: Optimizer, gradients: Mapping[Tensor, Tensor], calls: int) -> Iterator[None]:
    """A context in which one step of an optimizer stands for H = ``calls`` by equal gradients g, which it scales::

        lr = H lr;   momentum, betas, RMSprop's alpha = these to the power H;   steps so far = steps so far / H
        g = (1 + m + ... + m**(H - 1)) g for a momentum m with dampening, which sums; SGD's weight_decay, too

    Moments and counts become those of H steps (first steps of SGD with dampening: nearly), and the weight moves by H
    times the last of these. Other settings are as they are: most decays of weights are factors of the learning rate.
    No hooks of the user run in it: they have seen the gradients of each call, and would clip again, or count twice.
    """
    settings = list[tuple[dict[str, Any], dict[str, Any]]]()
    own: list[dict[int, Any]] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        hooks.update({key: _Paused(hook) for key, hook in [*hooks.items()] if not isinstance(hook, _Paused)})
    counts = {p: state["step"] for p in gradients if "step" in (state := optimizer.state.get(p, {}))}
    try:
        _stepping.add(optimizer)
        for group in optimizer.param_groups:
            summing = group.get("momentum") if "dampening" in group else None
            factor = sum((summing or 0.0) ** number for number in range(calls))
            for p in filter(gradients.__contains__, group["params"] if factor != 1.0 else ()):
                gradients[p].mul_(factor)
            powers = ("momentum", "betas", *(["alpha"] if "centered" in group else []))
            found = {key: value for key in powers if (value := group.get(key))}
            new = {k: tuple(b**calls for b in v) if isinstance(v, tuple | list) else v**calls for k, v in found.items()}
            scaled = {"lr": calls, **({"weight_decay": factor} if isinstance(optimizer, SGD) else {})}
            new |= {key: group[key] * by for key, by in scaled.items() if key in group}
            settings.append((group, {key: group[key] for key in new}))
            group.update(new)
        for p, steps in counts.items():
            optimizer.state[p]["step"] = steps // calls if isinstance(steps, int) else steps / calls
        yield
        first = {p: optimizer.state[p]["step"] * calls for p in gradients if "step" in optimizer.state.get(p, {})}
        counts = first | {p: steps + calls for p, steps in counts.items()}
    finally:
        _stepping.discard(optimizer)
        for p, steps in counts.items():
            optimizer.state[p]["step"] = steps
        for group, before in settings:  # not those that the optimizer has changed itself
            group.update(before)
