"""Makes a model's buffers the same on all ranks when its weights are averaged."""

from collections.abc import Iterable

import torch
from torch import Tensor

# The class of all BatchNorms and InstanceNorms, which keep running averages.
from torch.nn.modules.batchnorm import _NormBase

from ..engine.arguments import plain_names
from ..engine.bucket import strides_of
from ..engine.collectives import Collectives, Nodes, Request
from ..engine.comparison import compare_once
from ..engine.dense import DenseAverages
from ..engine.engine import Engine
from ..engine.exchange import Exchanges
from ..engine.hashes import hash_of
from ..engine.shards import local
from ..engine.wire_stats import WireStats
from .from_rank_0 import from_rank_0


class Buffers:
    """The buffers of ``model``, for the ranks of an engine, and of its shard groups. The running averages of BatchNorm
    and InstanceNorm are averaged, all others become rank 0's, as in DistributedDataParallel.

    Raises ``ValueError`` for a buffer without values, or a quantized one. ``label``: of the collectives' names.
    """

    def __init__(self, model: torch.nn.Module, engine: Engine, label: str = "buffers") -> None:
        self._engine, levels = engine, [engine.collectives, *engine.method.shard_groups()]
        #: The ranks, one after the other, by the label of their collectives.
        self._levels = {f"{engine.exchanges.label}.{label}.{n}": one for n, one in enumerate(levels) if one.size > 1}
        self._device = engine.parameters[0].device
        self._means, self._others = dict[str, Tensor](), dict[str, Tensor]()
        found = dict(model.named_buffers())
        norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
        averages = {id(buffer) for buffer in statistics if buffer is not None and buffer.is_floating_point()}
        for name, buffer in zip(plain_names(list(found)), found.values(), strict=True):
            (self._means if id(buffer) in averages else self._others)[name] = _memory(name, buffer)

    def check_same(self) -> None:
        """Raises ``RuntimeError``, on all ranks, if buffers have other shapes on some of them. Waits."""
        layouts = {f"buffer {name}": f"{_layout(tensor)}, averaged" for name, tensor in self._means.items()}
        layouts |= {f"buffer {name}": _layout(tensor) for name, tensor in self._others.items()}
        for label, collectives in self._levels.items():
            try:
                compare_once(layouts, collectives, label, self._device)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\nWithout the model, finish() leaves buffers each rank's own") from error

    def exchange(self) -> None:
        """Makes them the same on all ranks. Waits."""
        strided = [b for b in self._others.values() if b.layout == torch.strided and b.numel()]
        for label, collectives in self._levels.items():
            # In double precision the mean of equal values is that value.
            means = [buffer.to(self._device, torch.float64, copy=True).flatten() for buffer in self._means.values()]
            for payload in means:
                self._engine.stats.count_request(Request("allreduce", payload, "dense_tensor"), collectives.size)
            average_in_place(means, collectives, f"{label}.mean")
            values = from_rank_0(strided, self._engine, collectives, f"{label}.rank0")
            for buffer, value in zip([*self._means.values(), *strided], [*means, *values], strict=True):
                with torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(value.view(buffer.shape))


def _memory(name: str, buffer: Tensor) -> Tensor:
    """The memory of a buffer: an expanded dimension is one entry of it."""
    tensor = local(buffer).detach()
    if tensor.is_meta or tensor.is_quantized:
        kind = "is quantized" if tensor.is_quantized else "has no values (meta device)"
        raise ValueError(f"buffer {name} {kind}: call finish() without the model, which leaves buffers alone")
    if tensor.layout != torch.strided:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided([min(n, 1) if stride == 0 else n for n, stride in pairs], tensor.stride())


def _layout(tensor: Tensor) -> str:
    """Returns what must be the same on all ranks: of a sparse buffer, which is not sent, the values, too."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.layout == torch.strided:
        return f"{text}, strides {strides_of(tensor)}"
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return f"{text}, {tensor.layout}, hash {hash_of(parts)} of {[tuple(part.shape) for part in parts]}"


def average_in_place(tensors: Iterable[Tensor], collectives: Collectives, label: str) -> None:
    """Replaces tensors by their averages over ranks. Waits."""
    exchanges = Exchanges(Nodes(collectives), WireStats(), label)
    averages = DenseAverages(exchanges, half=False)
    for tensor in tensors:
        averages.arrive(None, tensor, tensor)
    averages.start()
    exchanges.finish()
    averages.write(None)
