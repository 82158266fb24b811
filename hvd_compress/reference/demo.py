"""Decoupled momentum (Peng, Quesnelle & Kingma, arXiv 2411.19870): the specification of :class:`hvd_compress.DeMo`.

To be read, or copied into a script: it needs torch only. On rank i of N, for a parameter with gradient g_i and m_i, the
coefficients of its momentum; H is the Walsh-Hadamard transform of blocks of 256 entries, orthonormal::

    m_i = decay m_i + H g_i
    S   = ``density`` of the coefficients, spread over the blocks; the ranks, in a random order, choose one in turn,
          each the largest of its own |m_i| in the block
    q   = mean_i Q(m_i[S]) on S, 0 elsewhere                    Q: rounds to float16
    m_i = m_i - Q(m_i[S]) on S, m_i elsewhere
    w   = w - lr (sign(H q) + weight_decay w)                   by the optimizer

Tensors of one dimension or below 1024 entries move by the sign of a momentum of their averages. Of a block of 256
entries, at density 1/16, a rank sends 16 (N - 1) / N bytes of indices by an all-gather, and 64 (N - 1) / N of values by
an allreduce. The same bits as of ``DeMo(model, values="fp16", bucket_mb=1e-3)`` with ``average_gradients``: without the
ring of 4-bit codes, which make the values four times smaller; every parameter in a bucket of its own. Assumed here, and
checked or provided for by the package: gradients of all parameters, finite, float32, not zero on all ranks, in the
memory order of the weights, without gaps; N > 1; a density from 1/1024 to 1/2; sums of values in float16's range.

Example::

    demo = DeMo(model.parameters(), torch.distributed)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, weight_decay=0.01)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        demo.average()
        optimizer.step()
"""

from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


def derive(*counters: int) -> int:
    """A 31-bit random key, the same on all ranks: SplitMix64."""
    state = 0
    for counter in counters:
        state = ((state ^ counter) + 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ (state >> shift)) * factor % 2**64
        state ^= state >> 31
    return state >> 33


def flat(tensor: Tensor) -> Tensor:
    """The entries in memory order, padded with zeros to blocks: (blocks, 256)."""
    return pad(tensor.detach().as_strided((tensor.numel(),), (1,)), (0, -tensor.numel() % 256)).view(-1, 256)


def hadamard(entries: Tensor) -> Tensor:
    """The transform of each block, which is its own inverse: (blocks, 256)."""
    for half in (1, 2, 4, 8, 16, 32, 64, 128):
        lower, upper = entries.view(-1, 128 // half, 2, half).unbind(2)
        entries = torch.stack([lower + upper, lower - upper], 2)
    return entries.view(-1, 256) / 16


class DeMo:
    """Averages gradients. ``group``: ``torch.distributed``, or an object with the functions that are called here."""

    def __init__(
        self, parameters: Iterable[Tensor], group: Any, density: float = 1 / 16, seed: int = 0, decay: float = 0.999,
        dense_momentum: float = 0.9,
    ) -> None:  # fmt: skip
        self.group, self.density, self.seed, self.decay, self.steps = group, density, seed, decay, 0
        self.ranks, self.rank, self.dense_momentum = group.get_world_size(), group.get_rank(), dense_momentum
        self.parameters = [p for p in parameters if p.requires_grad][::-1]
        large = [p for p in self.parameters if p.dim() >= 2 and p.numel() >= 1024]
        self.momenta = {p: torch.zeros_like(flat(p)) for p in large}  # coefficients
        self.velocities = {p: torch.zeros_like(p) for p in self.parameters if p not in self.momenta}

    def average(self) -> None:
        """Replaces the gradients by signs: call it before each step of the optimizer."""
        grads = [(p, p.grad) for p in self.parameters if p.grad is not None]
        for p, grad in ((p, grad) for p, grad in grads if p in self.velocities):
            self.group.all_reduce(grad)
            grad.copy_(self.velocities[p].mul_(self.dense_momentum).add_(grad / self.ranks).sign())
        large = [(p, grad) for p, grad in grads if p in self.momenta]
        running = [self.exchange(*pair, derive(self.seed, self.steps, i)) for i, pair in enumerate(large)]
        row = torch.cat(chosen := [next(exchange) for exchange in running])  # all parameters' messages in one
        self.group.all_gather(list(rows := row.new_empty(self.ranks, len(row))), row)
        received = torch.split(rows, [*map(len, chosen)], dim=1)
        values = [exchange.send(part) for exchange, part in zip(running, received, strict=True)]
        self.group.all_reduce(sums := torch.cat(values))
        for (_, grad), exchange, part in zip(large, running, torch.split(sums, [*map(len, values)]), strict=True):
            grad.as_strided((grad.numel(),), (1,)).copy_(exchange.send(part)[: grad.numel()])
        self.steps += 1

    def exchange(self, p: Tensor, grad: Tensor, key: int) -> Generator[Tensor, Tensor, None]:
        """Yields this rank's indices, is sent all ranks'; yields values, is sent their sums; yields the average."""
        momentum, slots = self.momenta[p], round(self.density * p.numel())
        momentum.mul_(self.decay).add_(hadamard(flat(grad)))

        order = list(range(self.ranks))
        for i in range(self.ranks - 1, 0, -1):
            j = derive(key, i) % (i + 1)
            order[i], order[j] = order[j], order[i]
        # The first slot of each block. The key turns the remainder from step to step.
        first = torch.arange(len(momentum) + 1, dtype=torch.int64, device=p.device) * slots
        first = (first + (key & 0xFFFF) % len(momentum)) // len(momentum)
        own = ((first - order.index(self.rank) - 1) // self.ranks).diff()
        ranking = momentum.abs().sort(dim=1, descending=True, stable=True).indices
        position = torch.arange(momentum.numel(), dtype=torch.int64, device=p.device)
        best = position[:256] < own[:, None]
        chosen = torch.zeros_like(best).scatter_(1, ranking, best).nonzero()[:, 1]
        rows = yield pad(chosen, (0, -(-slots // self.ranks) - len(chosen))).byte()
        where = position[::256].repeat_interleave(first.diff()) + rows[order].T.reshape(-1)[:slots]

        values, q = momentum.view(-1)[where], torch.zeros_like(momentum)
        mean = (yield values.half()).float() * (1.0 / self.ranks)
        momentum.view(-1)[where] = values - values.half()
        # The last of several slots of one coefficient counts: their sums may differ in the last bit.
        last = torch.zeros_like(position).scatter_reduce(0, where, position[:slots], "amax")[where]
        q.view(-1)[where] = mean[last]
        yield hadamard(q).sign().view(-1)
