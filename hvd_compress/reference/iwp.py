"""Importance-weighted pruning (Cheng & Xu, arXiv 1901.01544): the specification of :class:`hvd_compress.IWP`.

To be read, or copied into a script: it needs torch only. On rank i of N, for a parameter with weights w, gradient g_i,
residual r_i, and unsent block means u_i::

    m_i = mean of g_i over each block of 256 entries;  u_i = u_i + m_i;  r_i = r_i + (g_i - m_i)
    I_i = |r_i| / (|w| + mean|w| / 2)           importance; mean|w| of each 100th step
    S   = ``density`` of the entries, spread over the blocks; the ranks, in a random order, choose one in turn, each
          the largest of its own I_i in the block
    g   = mean_i Q(r_i[S]) on S, 0 elsewhere, plus mean_i Q(u_i) everywhere         Q: rounds to float16
    r_i = r_i - Q(r_i[S]) on S, r_i elsewhere;  u_i = u_i - Q(u_i)

Of a block of 256 entries, at density 1/32, a rank sends 8 (N - 1) / N bytes of indices by an all-gather, and
36 (N - 1) / N of values by an allreduce. The same bits as of ``IWP(model, values="fp16", explore=0, bucket_mb=1e-3)``
with ``average_gradients``: without the lanes of 4 bits, which make the values 2.5 times smaller; without entries drawn
at random; every parameter in a bucket of its own. Assumed here, and checked or provided for by the package: gradients
of all parameters, finite, float32, in the memory order of the weights, without gaps; equal weights on all ranks; N > 1;
a density from 1/1024 to 1/2; sums of values in float16's range; no momentum correction.

Example::

    iwp = IWP(model.parameters(), torch.distributed)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        iwp.average()
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


class IWP:
    """Averages gradients. ``group``: ``torch.distributed``, or an object with the functions that are called here."""

    def __init__(self, parameters: Iterable[Tensor], group: Any, density: float = 1 / 32, seed: int = 0) -> None:
        self.group, self.density, self.seed, self.steps = group, density, seed, 0
        self.ranks, self.rank = group.get_world_size(), group.get_rank()
        self.parameters = [p for p in parameters if p.requires_grad][::-1]
        large = [p for p in self.parameters if p.dim() >= 2 and p.numel() >= 1024]
        #: Residual and unsent means of each parameter, and the constant that is added to its weights.
        self.states = {p: (r := torch.zeros_like(flat(p)), r[:, 0].clone(), r[0, 0].clone()) for p in large}

    def average(self) -> None:
        """Replaces the gradients by their averages: call it before each step of the optimizer."""
        grads = [(p, p.grad) for p in self.parameters if p.grad is not None]
        for grad in (grad for p, grad in grads if p not in self.states):
            self.group.all_reduce(grad)
            grad /= self.ranks
        large = [(p, grad) for p, grad in grads if p in self.states]
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
        (residual, unsent, floor), slots = self.states[p], round(self.density * p.numel())
        position = torch.arange(residual.numel(), dtype=torch.int64, device=p.device).view(-1, 256)
        inside, sums = position < p.numel(), flat(grad)
        for half in (128, 64, 32, 16, 8, 4, 2, 1):
            sums = sums[:, :half] + sums[:, half:]
        means = sums / inside.sum(1, keepdim=True)
        unsent += means[:, 0]
        residual += torch.where(inside, flat(grad) - means, 0.0)
        if self.steps % 100 == 0:
            floor.copy_(p.detach().abs().mean() * 0.5 + 1e-12)
        importance = residual.abs() / (flat(p).abs() + floor)

        order = list(range(self.ranks))
        for i in range(self.ranks - 1, 0, -1):
            j = derive(key, i) % (i + 1)
            order[i], order[j] = order[j], order[i]
        # The first slot of each block. The key turns the remainder from step to step.
        first = torch.arange(len(unsent) + 1, dtype=torch.int64, device=p.device) * slots
        first = (first + (key & 0xFFFF) % len(unsent)) // len(unsent)
        own = ((first - order.index(self.rank) - 1) // self.ranks).diff()
        ranking = importance.sort(dim=1, descending=True, stable=True).indices
        best = position[0] < own[:, None]
        chosen = torch.zeros_like(best).scatter_(1, ranking, best).nonzero()[:, 1]
        rows = yield pad(chosen, (0, -(-slots // self.ranks) - len(chosen))).byte()
        where = position[:, 0].repeat_interleave(first.diff()) + rows[order].T.reshape(-1)[:slots]

        values = torch.cat([residual.view(-1)[where], unsent])
        mean = (yield values.half()).float() * (1.0 / self.ranks)
        residual.view(-1)[where], unsent[:] = torch.tensor_split(values - values.half(), [slots])
        average = mean[slots:].repeat_interleave(256)
        # The last of several slots of one entry counts: their sums may differ in the last bit.
        last = torch.zeros_like(position).view(-1).scatter_reduce(0, where, position.view(-1)[:slots], "amax")[where]
        average[where] += mean[last]
        yield average
