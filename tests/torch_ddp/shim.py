"""What torch's tests of DistributedDataParallel need to run here: the CPU in place of GPUs, and a compressor as the
communication hook of every wrapper. Import it before ``torch.testing._internal.distributed.distributed_test``."""

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

import hvd_compress
from hvd_compress.hosts.ddp import DDPHost


class CpuForCuda(TorchFunctionMode):
    """CUDA devices in calls of torch, given by number, name or ``torch.device``, become the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if func in (Tensor.to, torch._C._nn._parse_to):
            args = tuple("cpu" if type(value) is int else value for value in args)
        if type(kwargs.get("device")) is int:
            kwargs["device"] = "cpu"
        return func(*map(_on_cpu, args), **{key: _on_cpu(value) for key, value in kwargs.items()})


def _on_cpu(value: Any) -> Any:
    name = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(name, str) and name.startswith("cuda") else value


def replace_cuda() -> None:
    """For this process: no test is skipped for lack of GPUs, and CUDA's devices and streams do nothing."""

    def always(func: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(func)(lambda *args, **kwargs: func(*args, **kwargs))

    common_distributed.skip_if_no_gpu = always
    common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: always
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])
    torch.cuda.current_device = lambda: 0
    for name in ("set_device", "manual_seed", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("device", "stream", "Stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: nullcontext())


def replace_ddp(build: Callable[..., hvd_compress.Compressor] | None, called: Callable[[], None]) -> None:
    """For this process: DistributedDataParallel takes no device, and has a compressor of its own if ``build`` is given,
    whose hook is not replaced by one that a test registers.

    Args:
        build: makes the compressor.
        called: is called with each call of the hook.
    """
    init, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    take = DDPHost.hook

    @functools.wraps(init)
    def on_cpu(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        init(self, module, None, None, *args, **kw)
        if build is not None:
            named = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
            compression = build(named, process_group=self.process_group, min_numel=1)
            self.register_comm_hook(compression, hvd_compress.ddp_hook)

    def register_first(self: Any, state: object, hook: Callable[..., Any]) -> None:
        if hvd_compress.ddp_hook not in [registered for registered, _ in self._comm_hooks]:
            register(self, state, hook)

    def counted(self: DDPHost, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        called()
        return take(self, bucket)

    DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook = on_cpu, register_first
    DDPHost.hook = counted
