"""Random-k with error feedback, and its test on 2 and 4 ranks: docs/extending.md."""

import copy

import torch
from torch import Tensor

from hvd_compress import Compressor
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.agreement import LIMIT, all_equal
from hvd_compress.engine.bucket import Bucket
from hvd_compress.engine.collectives import allreduce
from hvd_compress.engine.comparison import disagreement
from hvd_compress.engine.exchange import Exchange
from hvd_compress.engine.rng import derive
from hvd_compress.engine.state import Fixed
from hvd_compress.engine.work import Step, Work


class RandomK(Compressor):
    """Random-k with error feedback: averages one random entry of every ``group``, a divisor of 256."""

    def __init__(self, named_parameters, group: int = 64, **common) -> None:
        if group < 1 or 256 % group:
            raise ValueError(f"group must divide 256, got {group}")
        self._group = group
        super().__init__(named_parameters, **common)  # last: it calls work()

    def work(self, bucket: Bucket) -> Work:
        return RandomKWork(bucket, self._group)

    def options(self) -> dict:
        return {**super().options(), "group": self._group}

    def state(self) -> dict:
        return {"group": Fixed(self._group)}


class RandomKWork(Work):
    def __init__(self, bucket: Bucket, group: int) -> None:
        super().__init__(bucket)
        self._group = group
        self._invalid = torch.zeros((), dtype=torch.bool, device=bucket.device)
        self._sent: tuple[Tensor, Tensor] | None = None

    def begin(self, step: Step) -> None:
        super().begin(step)  # sets self.step
        self._invalid.zero_()
        self._sent = None

    def accumulate(self) -> None:
        for piece, grad in zip(self.bucket.pieces, self.bucket.gradients, strict=True):
            if grad.numel():  # else none arrived
                residual = piece.shaped(self.bucket.residual)
                total = residual + grad.float() / self.step.scale  # without the loss scale
                finite = total.isfinite()
                self._invalid |= ~finite.all()
                residual.copy_(torch.where(finite, total, residual))

    def exchange(self) -> Exchange:
        bucket, step = self.bucket, self.step
        key = derive(step.seed, step.number, bucket.index)
        same = yield from all_equal(torch.full((1,), key % LIMIT, dtype=torch.int64, device=bucket.device))
        if not bool(same):  # another seed or step on some rank; bool() synchronises a GPU
            raise disagreement()
        cpu = dict(dtype=torch.int64, device="cpu")
        first = torch.arange(0, bucket.residual.numel(), self._group, **cpu)
        random = torch.randint(self._group, first.shape, generator=torch.Generator("cpu").manual_seed(key), **cpu)
        indices = (first + random).to(bucket.device)
        values = bucket.residual[indices]
        flag = values.new_zeros(1).masked_fill_(self._invalid, torch.nan)
        total = yield allreduce(torch.cat([values, flag]))
        mean, valid = total[:-1] / step.ranks, total[-1].isfinite()  # valid on all ranks or on none
        average = torch.zeros_like(bucket.residual).index_copy_(0, indices, mean)
        sent = torch.zeros_like(bucket.residual).index_copy_(0, indices, torch.where(valid, values, 0.0))
        for piece, grad in zip(bucket.pieces, bucket.gradients, strict=True):
            if grad.numel():
                grad.copy_(torch.where(valid, piece.shaped(average) * step.scale, torch.nan))
            else:  # what was sent of it stays in the residual
                piece.of(sent).zero_()
        bucket.residual.sub_(sent)
        self._sent = indices, sent[indices]

    def undo(self) -> None:
        super().undo()
        if self._sent is not None:
            self.bucket.residual.index_add_(0, *self._sent)
            self._sent = None


def exchange(compression, collectives, named):
    """What Horovod's optimizer does with the gradients of one step."""
    pending = []
    for name, parameter in named:
        payload, context = compression.compress(parameter.grad)
        pending.append((parameter, collectives.start(allreduce(payload), name), context))
    for parameter, handle, context in pending:
        parameter.grad.copy_(compression.decompress(handle.result() / collectives.size, context))


def train(rank, world, model, steps):
    model, collectives = copy.deepcopy(model), world.collectives(rank)
    named = list(model.named_parameters())
    compression = RandomK(named, group=16, seed=1, collectives=collectives)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named}
    for step in range(steps):
        inputs = torch.randn(8, 96, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        for name, parameter in named:
            balance[name] += parameter.grad  # what this rank computed,
        exchange(compression, collectives, named)
        for name, parameter in named:
            balance[name] -= parameter.grad  # less what was applied,
        optimizer.step()
    for name, _ in named:
        balance[name] -= compression.residual(name)  # less what is kept
    return dict(named), balance


def check(ranks, steps=50):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 50))
    world = ThreadWorld(ranks)
    results = world.run(lambda rank: train(rank, world, model, steps))
    for name, weight in results[0][0].items():
        assert all(torch.equal(weight, weights[name]) for weights, _ in results), f"{name}: replicas differ"
        assert sum(balance[name] for _, balance in results).abs().max() < 1e-4, f"{name}: gradients were lost"


for ranks in (2, 4):
    check(ranks)
