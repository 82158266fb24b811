"""What becomes of a model's buffers when its weights are averaged."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

# The class of all BatchNorms and InstanceNorms, which keep running averages.
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from ..engine.agreement import hash_of
from ..engine.arguments import plain_names
from ..engine.bucket import strides_of
from ..engine.collectives import Collectives, Request
from ..engine.comparison import compare_once
from ..engine.dense import Averaging, as_real
from ..engine.shards import is_sharded, local
from .from_rank_0 import Count, from_rank_0

How = Literal["mean", "rank 0", "own"]

_STATISTICS = ("running_mean", "running_var")
_POWER_ITERATIONS = 50


@dataclass(frozen=True)
class _Buffer:
    """``tensor``: what is exchanged, without dimensions in which a buffer is expanded."""

    name: str
    how: How
    tensor: Tensor

    @property
    def layout(self) -> str:
        """What must be the same on all ranks."""
        tensor = self.tensor
        text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, {self.how!r}"
        if tensor.layout == torch.strided:
            return f"{text}, strides {strides_of(tensor)}"
        parts = _sparse_parts(tensor)
        return f"{text}, {tensor.layout}, hash {hash_of(parts)} of {[tuple(part.shape) for part in parts]}"

    def write(self, value: Tensor) -> None:
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.copy_(value.view(self.tensor.shape))


class Buffers:
    """The buffers of a model, and how each is made the same on all ranks.

    Args:
        model: whose buffers they are.
        how: by a pattern of names (:mod:`fnmatch`): ``"mean"``, ``"rank 0"`` or ``"own"``. Others: the running averages
            of BatchNorm and InstanceNorm are averaged, the rest is rank 0's, as in DistributedDataParallel.

    Raises:
        ValueError: a pattern that fits no buffer, or no such way; a mean of integers or of a sparse tensor; a buffer
            that cannot be exchanged.
    """

    def __init__(self, model: torch.nn.Module, how: Mapping[str, str]) -> None:
        found = dict(model.named_buffers())
        named = dict(zip(plain_names(list(found)), found.values(), strict=True))
        for pattern, way in how.items():
            if way not in get_args(How):
                raise ValueError(f"buffers[{pattern!r}] must be one of {', '.join(get_args(How))}, got {way!r}")
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ValueError(
                    f"buffers: {pattern!r} fits no buffer of the model, whose are {', '.join(named)!r:.300}"
                )
        means = set(_running_averages(model))
        self._all = []
        for name, buffer in named.items():
            default: How = "mean" if id(buffer) in means else "rank 0"
            chosen = next((way for pattern, way in how.items() if fnmatchcase(name, pattern)), default)
            if chosen != "own":
                self._all.append(_Buffer(name, chosen, _exchanged(name, buffer, chosen)))  # type: ignore[arg-type]

    def check_same(self, levels: Sequence[Collectives], label: str, device: torch.device) -> None:
        """Raises ``RuntimeError``, on all ranks, if buffers have other shapes on some of them. Waits."""
        layouts = {f"buffer {buffer.name}": buffer.layout for buffer in self._all}
        for number, collectives in enumerate(levels):
            try:
                compare_once(layouts, collectives, f"{label}.{number}", device)
            except RuntimeError as error:
                raise RuntimeError(
                    f'{error}\nGive finish(model, buffers={{"NAME": "own"}}) for a rank\'s own'
                ) from error

    def exchange(self, levels: Sequence[Collectives], label: str, device: torch.device, count: Count) -> None:
        """Makes them the same on the ranks of each level, one after the other. Waits.

        Args:
            levels: the ranks of each.
            label: of the collectives' names.
            device: of the messages, which all hosts can send.
            count: called with every request, and the number of ranks.
        """
        for number, collectives in enumerate(levels):
            self._average(collectives, f"{label}.{number}.mean", device, count)
            self._broadcast(collectives, f"{label}.{number}.rank0", device, count)

    def _average(self, collectives: Collectives, label: str, device: torch.device, count: Count) -> None:
        buffers = [buffer for buffer in self._all if buffer.how == "mean"]
        # In double precision the mean of equal values is that value.
        payloads = [as_real(buffer.tensor).double().flatten().to(device) for buffer in buffers]
        for payload in payloads:
            count(Request("allreduce", payload, "dense_tensor"), collectives.size)
        for buffer, mean in zip(buffers, Averaging(collectives, payloads, label).results(), strict=True):
            like = as_real(buffer.tensor)
            value = mean.view(like.shape)
            buffer.write(torch.view_as_complex(value) if buffer.tensor.is_complex() else value)

    def _broadcast(self, collectives: Collectives, label: str, device: torch.device, count: Count) -> None:
        strided = [b for b in self._all if b.how == "rank 0" and b.tensor.layout == torch.strided and b.tensor.numel()]
        values = from_rank_0([buffer.tensor for buffer in strided], collectives, label, device, count)
        for buffer, value in zip(strided, values, strict=True):
            buffer.write(value)


def refresh_spectral_norms(model: torch.nn.Module) -> None:
    """Fits the vectors of ``spectral_norm`` to the averaged weights, by power iterations: they were found for those of
    one rank."""
    for module in model.modules():
        old = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
        estimates: list[Callable[[], object]] = [
            partial(hook.compute_weight, module, do_power_iteration=True) for hook in old
        ]
        if isinstance(module, ParametrizationList) and any(isinstance(part, _SpectralNorm) for part in module):
            estimates.append(module)
        if not estimates or any(map(is_sharded, module.parameters())):  # of shards they are not known
            continue
        training = {part: part.training for part in module.modules()}
        try:
            for part in training:
                part.training = True  # or they would not iterate; train() may be the user's own
            for estimate in estimates:
                for _ in range(_POWER_ITERATIONS):
                    estimate()
        finally:
            for part, mode in training.items():
                part.training = mode


def _running_averages(model: torch.nn.Module) -> Iterator[int]:
    """The ids of BatchNorm's and InstanceNorm's statistics."""
    for module in model.modules():
        if isinstance(module, _NormBase):
            found = (getattr(module, name, None) for name in _STATISTICS)
            yield from (id(buffer) for buffer in found if isinstance(buffer, Tensor))


def _exchanged(name: str, buffer: Tensor, how: str) -> Tensor:
    tensor = local(buffer).detach()
    if tensor.is_meta or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else "on the meta device and has no values"
        raise ValueError(f'buffer {name}: is {kind}: give finish(model, buffers={{"{name}": "own"}})')
    if how == "mean" and (tensor.layout != torch.strided or not (tensor.is_floating_point() or tensor.is_complex())):
        raise ValueError(f"buffer {name}: a mean needs a floating-point tensor, got {tensor.dtype}, {tensor.layout}")
    if tensor.layout != torch.strided:
        return tensor
    # An expanded dimension is one entry of memory.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided([min(n, 1) if stride == 0 else n for n, stride in pairs], tensor.stride())


def _sparse_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a sparse one consists of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
    return [*indices, tensor.values()]
