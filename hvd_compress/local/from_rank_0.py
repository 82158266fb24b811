"""Copies to all ranks of what rank 0 has: buffers, and the states of optimizers when local steps end."""

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine.collectives import Collectives, Request, allgather
from ..engine.engine import Engine
from ..engine.wrappers import inside, leaves, mapped

# Bytes of a message, unless one tensor has more.
_MESSAGE = 2**26
# Python's numbers that are sent, and the dtype of each.
_DTYPES = {int: torch.int64, float: torch.float64}


def from_rank_0(tensors: Sequence[Tensor], engine: Engine, collectives: Collectives, label: str) -> Iterator[Tensor]:
    """Yields rank 0's value of each tensor. Shapes and dtypes must be the same on all ranks. Waits.

    Args:
        engine: counts the bytes, and has the messages' device.
        collectives: the ranks.
        label: of the collectives' names.
    """
    first, device = 0, engine.parameters[0].device  # all hosts can send what is there
    while first < len(tensors):
        last, size = first + 1, tensors[first].nbytes
        while last < len(tensors) and size + tensors[last].nbytes <= _MESSAGE:
            last, size = last + 1, size + tensors[last].nbytes
        group, first = tensors[first:last], last
        request = Request("broadcast", torch.cat([_bytes(tensor, device) for tensor in group]), "dense_tensor")
        engine.stats.count_request(request, collectives.size)
        sent = collectives.start(request, label).result()
        for tensor, part in zip(group, torch.split(sent, [tensor.nbytes for tensor in group]), strict=True):
            yield part.clone().view(tensor.dtype).view(tensor.shape)


def share_states(optimizers: Sequence[Optimizer], engine: Engine) -> None:
    """Makes the optimizers' states, and the settings of their parameter groups, rank 0's; of sharded parameters, those
    of the same shard. What not all ranks have in one form stays the rank's own, with a warning; a parameter's state is
    dropped then, and begins anew. Waits."""
    # By parameter, in the engine's order, so that the order of optimizers and of groups may differ between ranks.
    numbers = {id(p): number for number, p in enumerate(engine.parameters)}
    states: list[list[_Nested]] = [[] for _ in numbers]
    settings: list[list[_Nested]] = [[] for _ in numbers]
    for part in (part for optimizer in optimizers for part in inside(optimizer)):
        own = {key: value for key, value in part.state.items() if not isinstance(key, Tensor)}
        for group in part.param_groups:
            held = [p for p in group["params"] if id(p) in numbers]
            for p in held:
                states[numbers[id(p)]].append(_Nested({p: part.state[p]} if p in part.state else {}, part.state))
            if held:
                first = min(numbers[id(p)] for p in held)
                settings[first].append(_Nested({k: v for k, v in group.items() if k != "params"}, group))
                settings[first].append(_Nested(own, part.state))
    places = [*states, *settings]
    same = _same_forms([zlib.crc32(repr([n.form for n in place]).encode()) for place in places], engine)
    shared = [nested for place, is_same in zip(places, same, strict=True) if is_same for nested in place]
    tensors = [tensor for nested in shared for tensor in nested.tensors]
    values = from_rank_0(tensors, engine, engine.collectives, f"{engine.exchanges.label}.optimizers")
    for nested in shared:
        nested.fill(values)
    for p, place, is_same in zip(engine.parameters, states, same[: len(states)], strict=True):
        for nested in () if is_same else place:
            nested.owner.pop(p, None)
    if not all(same):
        engine.warn("the ranks' optimizers have states or settings of different forms, which are not made the same")


def _same_forms(forms: list[int], engine: Engine) -> list[bool]:
    """Whether all ranks have the same form at each place. Waits."""
    members, label, device = engine.collectives, f"{engine.exchanges.label}.forms", engine.parameters[0].device
    request = allgather(torch.tensor([forms], dtype=torch.int64, device=device), "dense_tensor")
    engine.stats.count_request(request, members.size)
    found = members.start(request, label).result()
    return [bool(same) for same in (found == found[0]).all(0).tolist()]


class _Nested:
    """Nested values of an optimizer, which belong into ``owner``: the tensors and numbers in them, and their form.
    Keys that are parameters do not count in it."""

    def __init__(self, values: dict[Any, Any], owner: Any) -> None:
        self.owner, self._values = owner, values
        found = [(path, leaf, _tensors(leaf)) for path, leaf in leaves(values)]
        self._each = [tensors for *_, tensors in found]
        self.tensors = [tensor for tensors in self._each for tensor in tensors]
        self.form = [
            (path, type(leaf), *((t.shape, t.dtype) for t in tensors), leaf if isinstance(leaf, str | bool) else None)
            for path, leaf, tensors in found
        ]

    def fill(self, values: Iterator[Tensor]) -> None:
        """Writes the next of ``values`` into the tensors, and the numbers to the owner."""
        for tensor in self.tensors:
            tensor.copy_(next(values))
        each = iter(self._each)

        def filled(leaf: Any) -> Any:
            return own[0].item() if (own := next(each)) and not isinstance(leaf, Tensor) else leaf

        self.owner.update(mapped(filled, self._values))


def _tensors(leaf: Any) -> list[Tensor]:
    """The plain tensors of a leaf: itself, a DTensor's local one, those in a subclass, or one of a number; or none."""
    if isinstance(leaf, Tensor):
        if hasattr(leaf, "__tensor_flatten__"):
            return [tensor for name in leaf.__tensor_flatten__()[0] for tensor in _tensors(getattr(leaf, name))]
        return [leaf.detach()]
    if type(leaf) not in _DTYPES or (type(leaf) is int and not -(2**63) <= leaf < 2**63):
        return []
    return [torch.tensor(leaf, dtype=_DTYPES[type(leaf)], device="cpu")]


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).to(device)
