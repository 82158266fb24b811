"""FSDP2 as host: replicas of two shards, or of one."""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal

import ddp_job
import torch
from ddp_job import gather, rank, size, start  # noqa: F401  # the same process group
from job import DEVICE
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import hvd_compress

name = "fsdp"


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def stop() -> None:
    distributed.barrier()  # another rank may still be in the last case
    ddp_job.stop()


@cache
def mesh_of(replicas: int) -> DeviceMesh:
    """One for all jobs, whose process groups are made once."""
    return init_device_mesh(DEVICE.type, (replicas, size() // replicas), mesh_dim_names=("replicate", "shard"))


def draw_tokens(data: torch.Generator) -> Tensor:
    """int64 (4, 6), as :class:`Net` reads them."""
    return torch.randint(0, 31, (4, 6), generator=data).to(DEVICE)


class Block(nn.Module):
    """Odd sizes: shards of rows are uneven. ``side`` is used by some passes only."""

    def __init__(self, width: int = 25) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 41), nn.Linear(41, width)
        self.side = nn.Linear(width, width)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        x = x + self.down(self.up(self.norm(x)).tanh())
        return x + self.side(x).tanh() if side else x


class Net(nn.Module):
    """A few blocks between an embedding of 31 rows and a head.

    Args:
        tied: the head's matrix is the embedding's.
        twice: every block runs twice.
        checkpointed: blocks are computed again in backward.
    """

    def __init__(self, tied: bool = False, twice: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 25)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(25, 31)
        self.scale = nn.Parameter(torch.ones(1))  # one rank of the shard group has nothing of it
        self.twice, self.checkpointed = twice, checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, side: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(1 + self.twice):
            for block in self.blocks:
                x = checkpoint(block, x, side, use_reentrant=False) if self.checkpointed else block(x, side)
        return self.head(x * self.scale)


class Job:
    """One rank of a model in training.

    Args:
        build: makes the compressor from the model; None trains with FSDP's own hybrid sharding.
        replicas: how many; the other ranks share each of them.
        optimizer: makes the optimizer from parameters.
        model: arguments of :class:`Net`. ``meta``: the model is made on the meta device first. ``trained``: part of the
            names of parameters that are; the others are frozen. ``clip``: gradients' norm, and which norm.
        passes: backward passes of a step; ``sync``: of which modules each of them is averaged, or, in all passes but
            the last, reduced in the shard group only: in ``"shards"``, ``"shards_but_first"``, of which the first block
            is averaged, and ``"shards_at_last"``, of which the first pass is not reduced; ``kept``: parameters stay
            whole between passes.
        unused: in every third step, the ``side`` layers are not used.
        to_none: whether gradients become None after a step.
        local: arguments of LocalSteps, which then exchanges in place of hooks. ``loop``: average_gradients() does.
        reduce_unused: FSDP reduces parameters that are not used; of ``unused``, rank 1 only takes notice.
        policies: of ``fully_shard``.
    """

    def __init__(
        self,
        build: Any = None,
        replicas: int = 2,
        optimizer: Any = SGD,
        model: dict[str, bool] | None = None,
        meta: bool = False,
        trained: str = "",
        clip: tuple[float, float] | None = None,
        passes: int = 1,
        sync: Literal["none", "first", "all", "shards", "shards_but_first", "shards_at_last"] = "none",
        kept: bool = False,
        unused: bool = False,
        to_none: bool = True,
        local: dict[str, Any] | None = None,
        loop: bool = False,
        reduce_unused: bool = False,
        **policies: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Net(**(model or {}))
        self.mesh = mesh_of(replicas)
        values = copy.deepcopy(self.model.state_dict())
        if meta:
            self.model.to("meta")
        for parameter_name, p in self.model.named_parameters():
            p.requires_grad_(trained in parameter_name)
        shard(self.model, self.mesh["shard"] if build else self.mesh, **policies)
        if meta:
            self.model.to_empty(device=DEVICE)
            with torch.no_grad():
                for parameter_name, p in self.model.named_parameters():
                    p.copy_(distributed.tensor.distribute_tensor(values[parameter_name], p.device_mesh, p.placements))
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.compression = None
        if build is not None:
            self.compression = build(self.model, process_group=self.mesh.get_group("replicate"), min_numel=64)
            if local is None and not loop:
                self.hooks = hvd_compress.register_fsdp_hooks(self.model, self.compression)
        self.local = hvd_compress.LocalSteps(self.compression, self.optimizer, **local) if local else None
        self.clip, self.passes, self.sync, self.kept, self.unused = clip, passes, sync, kept, unused
        self.to_none, self.loop = to_none, loop
        self.steps = 0
        self.data = torch.Generator().manual_seed(rank())
        self.without_side = range(1, 2) if reduce_unused else range(size())
        if reduce_unused:
            self.model.set_reduce_scatter_unused_params(True)

    def loss(self) -> Tensor:
        tokens = draw_tokens(self.data)
        without = self.unused and self.steps % 3 == 2 and rank() in self.without_side
        logits = self.model(tokens, side=not without)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten().roll(1) // 2)

    def backward(self) -> None:
        for number in range(self.passes):
            last = number == self.passes - 1
            self.model.set_is_last_backward(last)
            self.model.set_reshard_after_backward(last or not self.kept)
            self._set_sync(number, last)
            self.loss().backward()

    def _set_sync(self, number: int, last: bool) -> None:
        shards = self.sync.startswith("shards") and not last
        self.model.set_requires_gradient_sync(last or self.sync == "all")
        self.model.blocks[0].set_requires_gradient_sync(last or self.sync in ("all", "first"))
        if shards and (number or self.sync != "shards_at_last"):
            self.model.set_requires_gradient_sync(True)
            self.model.set_requires_all_reduce(False)
            self.model.blocks[0].set_requires_all_reduce(self.sync == "shards_but_first", recurse=False)

    def step(self) -> None:
        self.backward()
        if self.loop:
            hvd_compress.average_gradients(self.compression)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), *self.clip)
        self.optimizer.step()
        if self.local is not None:
            self.local.step()
        self.optimizer.zero_grad(set_to_none=self.to_none)
        self.steps += 1

    def train(self, steps: int) -> "Job":
        for _ in range(steps):
            self.step()
        return self

    def weights(self) -> dict[str, Tensor]:
        """Of this rank's shards: copies."""
        return {name: p.to_local().detach().clone() for name, p in self.model.named_parameters()}

    def full(self) -> dict[str, Tensor]:
        """The whole parameters. All ranks call it. In one message: ``full_tensor()`` would send one a parameter, and
        take a quarter of the time of most cases."""
        assert all(p.placements[-1] == Shard(0) for p in self.model.parameters())
        mine, group = {name: p.cpu() for name, p in self.weights().items()}, self.mesh.get_group("shard")
        shards = [mine] * distributed.get_world_size(group)
        distributed.all_gather_object(shards, mine, group)
        return {name: torch.cat([shard[name] for shard in shards]).to(DEVICE) for name in mine}

    def owed(self) -> dict[str, Tensor]:
        """The means over replicas of whole residuals, and of velocities. All ranks call it."""
        velocities = self.compression.velocities
        outer = {w.name: w.velocity for w in self.local._rounds._common.weights} if self.local else {}
        found = {}
        for number, (parameter_name, p) in enumerate(self.model.named_parameters()):
            parts = {"residual": self.compression.residual(parameter_name), "outer velocity": outer.get(parameter_name)}
            parts["velocity"] = None if velocities is None else velocities.get(number)
            for kind, part in parts.items():
                if part is not None:
                    mean = gather(part, self.mesh.get_group("replicate")).mean(0)
                    whole = DTensor.from_local(mean, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                    found[f"{kind} of {parameter_name}"] = whole.full_tensor()
        return found

    def assert_equal_replicas(self) -> "Job":
        mine = torch.cat([w.flatten() for w in self.weights().values()])
        assert mine.isfinite().all()
        everyone = gather(mine, self.mesh.get_group("replicate"))
        assert all(torch.equal(everyone[0], other) for other in everyone), "replicas differ"
        return self


@contextmanager
def shared_folder() -> Iterator[str]:
    """A temporary folder that all ranks see."""
    made = [tempfile.mkdtemp() if rank() == 0 else ""]
    distributed.broadcast_object_list(made)
    try:
        yield made[0]
    finally:
        distributed.barrier()
        if rank() == 0:
            shutil.rmtree(made[0])


def shard(model: Net, mesh: DeviceMesh, **policies: Any) -> None:
    """As users do: every block, then what is left, with which tied parameters stay together."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policies)
    fully_shard(model, mesh=mesh, **policies)
    assert isinstance(model, FSDPModule)
