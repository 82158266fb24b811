"""torch's tests of DistributedDataParallel on this machine: with the CPU in place of GPUs, and with a compressor as the
communication hook of every model. All changes are to the process that asks for them."""

import functools
import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import hvd_compress
from hvd_compress.hosts.ddp import DDPHost

#: Some tests make groups of two ranks in each of two nodes.
RANKS = 4


def torch_tests() -> Any:
    """The module of the tests, for Gloo. No test of it is skipped for lack of GPUs; CUDA's devices and streams do
    nothing."""

    def always(test: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(test)(lambda *args, **kwargs: test(*args, **kwargs))

    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "CUDA_VISIBLE_DEVICES": ""}
    common = importlib.import_module("torch.testing._internal.common_distributed")
    common.skip_if_no_gpu, common.skip_if_lt_x_gpu = always, lambda *args, **kwargs: always
    torch.cuda.device_count, torch.cuda.current_device = lambda: RANKS, lambda: 0
    # torch.compile wants a function of its own for each name.
    for name in ("set_device", "manual_seed", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("device", "stream", "Stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: nullcontext())
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


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


def replace_ddp(build: Callable[..., hvd_compress.Compressor] | None, called: Callable[[], None]) -> None:
    """DistributedDataParallel takes no devices and, if ``build`` is given, has a compressor of its own. The hooks that
    tests register are then left out.

    Args:
        build: makes a compressor.
        called: is called with each call of the compressor's hook.
    """
    init, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook
    take = DDPHost.hook

    @functools.wraps(init)
    def on_cpu(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        init(self, module, None, None, *args, **kw)
        if build is not None:
            named = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
            compression = build(named, process_group=self.process_group, min_numel=1)
            self.register_comm_hook(compression, hvd_compress.ddp_hook)

    def register_first(self: Any, state: object, hook: Callable[..., Any]) -> None:
        self._check_comm_hook(hook)
        if hvd_compress.ddp_hook not in [registered for registered, _ in self._comm_hooks]:
            register(self, state, hook)

    def counted(self: DDPHost, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        called()
        return take(self, bucket)

    DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook = on_cpu, register_first
    DDPHost.hook = counted
