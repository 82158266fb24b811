"""What becomes rank 0's on all ranks: buffers, and the states of optimizers when local steps end."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..engine.collectives import Collectives, Request, allgather
from ..engine.engine import Engine

Count = Callable[[Request, int], None]

# Bytes of a message, unless one tensor has more.
_MESSAGE = 2**26


def from_rank_0(
    tensors: Sequence[Tensor], collectives: Collectives, label: str, device: torch.device, count: Count
) -> Iterator[Tensor]:
    """Yields rank 0's value of each tensor. Shapes and dtypes must be the same on all ranks. Waits.

    Args:
        label: of the collectives' names.
        device: of the messages, which all hosts can send.
        count: called with every request, and the number of ranks.
    """
    first = 0
    while first < len(tensors):
        last, size = first + 1, tensors[first].nbytes
        while last < len(tensors) and size + tensors[last].nbytes <= _MESSAGE:
            last, size = last + 1, size + tensors[last].nbytes
        group, first = tensors[first:last], last
        request = Request("broadcast", torch.cat([_bytes(tensor, device) for tensor in group]), "dense_tensor")
        count(request, collectives.size)
        sent = collectives.start(request, label).result()
        for tensor, part in zip(group, torch.split(sent, [tensor.nbytes for tensor in group]), strict=True):
            yield part.clone().view(tensor.dtype).view(tensor.shape)


def share_states(optimizers: Sequence[Optimizer], engine: Engine) -> None:
    """Makes the optimizers' states and the settings of their parameter groups rank 0's; of sharded parameters, those of
    the same shard. Drops a parameter's state that not all ranks have in one form: it begins anew. Waits."""
    members, label, device = engine.collectives, f"{engine.exchanges.label}.optimizers", engine.parameters[0].device
    parts = [part for optimizer in optimizers for part in getattr(optimizer, "optimizers", [optimizer])]
    groups = [group for part in parts for group in part.param_groups]
    settings = [_Nested({key: value for key, value in group.items() if key != "params"}) for group in groups]
    held = [(part.state, p) for part in parts for group in part.param_groups for p in group["params"]]
    states = [_Nested(state.get(p)) for state, p in held]
    every = [*settings, *states]
    own = torch.tensor([[nested.form for nested in every]], dtype=torch.int64, device=device)
    request = allgather(own, "dense_tensor")
    engine.stats.count_request(request, members.size)
    forms = members.start(request, f"{label}.forms").result()
    same = (forms == forms[0]).all(0).tolist()
    tensors = [tensor for nested, shared in zip(every, same, strict=True) if shared for tensor in nested.tensors]
    values = from_rank_0(tensors, members, label, device, engine.stats.count_request)
    for group, nested, shared in zip(groups, settings, same[: len(groups)], strict=True):
        if shared:
            group.update(nested.filled(values))
    for (state, p), nested, shared in zip(held, states, same[len(groups) :], strict=True):
        if not shared:
            state.pop(p, None)
        elif p in state:
            state[p] = nested.filled(values)


class _Nested:
    """Nested values of an optimizer: the tensors and numbers in them, and a hash of all else."""

    def __init__(self, values: Any) -> None:
        self._leaves, self._spec = tree_flatten(values)
        each = [_tensors(leaf) for leaf in self._leaves]
        self.tensors = [tensor for tensors in each for tensor in tensors]
        kinds = [
            [type(leaf), *((t.shape, t.dtype) for t in tensors)] if tensors else leaf
            for leaf, tensors in zip(self._leaves, each, strict=True)
        ]
        self.form = zlib.crc32(f"{self._spec} {kinds}".encode())

    def filled(self, values: Iterator[Tensor]) -> Any:
        """Writes the next of ``values`` into the tensors. Returns the nested values with new numbers."""
        for tensor in self.tensors:
            tensor.copy_(next(values))
        numbers = iter(self.tensors)
        return tree_unflatten([_filled(leaf, numbers) for leaf in self._leaves], self._spec)


def _tensors(leaf: Any) -> list[Tensor]:
    """The plain tensors of a leaf: itself, this rank's part of a DTensor, those inside of another subclass, or one of a
    number; none of anything else."""
    if isinstance(leaf, Tensor):
        if hasattr(leaf, "__tensor_flatten__"):
            return [tensor for name in leaf.__tensor_flatten__()[0] for tensor in _tensors(getattr(leaf, name))]
        return [leaf.detach()]
    return [torch.tensor(leaf, dtype=torch.float64, device="cpu")] if type(leaf) in (int, float) else []


def _filled(leaf: Any, tensors: Iterator[Tensor]) -> Any:
    """A leaf whose tensors, the next ones, were written to."""
    own = [next(tensors) for _ in _tensors(leaf)]
    return leaf if isinstance(leaf, Tensor) or not own else type(leaf)(own[0].item())


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8).to(device)
