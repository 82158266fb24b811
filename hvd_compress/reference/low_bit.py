"""Local steps in few bits, with error feedback both ways: the specification of :func:`hvd_compress.recipes.low_bit`.

To be read, or copied into a script: it needs torch only. The recipe's ``restore_length`` is False here. After every
``period`` optimizer steps, on rank i of N, with its weights w_i, its residual r_i, and the common weights A, which have
the same bits on all ranks::

    a_i = r_i + (w_i - A)
    s   = rms(a_i)**(1 - p) (max |a_i| / max L)**p     p = 1/2 - 2**-bits; bfloat16, one for each run
    Q(x) = s L[c]                                      the level nearest to x / s; L: Lloyd-Max levels of a Gaussian
    m   = (a_o + sum Q(a_i)) / N                       on the owner o of this part of the entries; i: the others
    r_i = a_i - Q(a_i);  r_o = N (m - Q'(m))
    A   = A + Q'(m);  w_i = A                          Q': Q with ``mean_bits``

A bucket is consecutive parameters, last one first, each padded with zeros to a multiple of 256 entries. It is cut into
N parts of a multiple of eight entries, and these into runs: at most ``run`` entries of one parameter. For each bucket:

1. Rank i encodes a_i. Its message to rank j: the scales of the runs of part j, then the codes of the entries.
2. ``all_to_all``: rank i receives all ranks' messages of part i, decodes the others', and averages with its own a_i: m.
3. Rank i encodes m in the same way. Its residual: the errors of a_i in the other parts, N times that of m in its own.
4. ``all_gather``: all ranks receive the messages of all parts and decode them: Q'(m), which moves A.

5. Tensors of one dimension or less than 1024 entries: A moves by the mean of w_i - A, float16, with ``all_reduce``.
6. Parameters of ``averaged``, an AdamW that the script does not step: in place of w_i - A, the sum of the gradients
   that ``step()`` finds in a period. ``averaged`` takes one step by the mean over ranks and calls, with lr * period and
   betas ** period. (In the package, ``on_averaged_gradients``, whose step() takes the gradients.)

A rank sends ``(N - 1) / N ((bits + mean_bits) / 8 + 4 / run)`` bytes an entry. Assumed here, and checked or provided
for by the package: float32 parameters without gaps in memory, the same on all ranks at the beginning; N > 1; finite
differences.

Example::

    class Group:  # of torch.distributed
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()

        def all_to_all(self, rows):  # uint8, (size, bytes): row j is for rank j
            received = torch.empty_like(rows)
            torch.distributed.all_to_all_single(received, rows)
            return received

        def all_gather(self, row):  # uint8, (bytes,)
            rows = row.new_empty(self.size, len(row))
            torch.distributed.all_gather(list(rows), row)
            return rows

        def all_reduce(self, values):  # float16 or float32, (n,): their sum
            torch.distributed.all_reduce(values)
            return values

    local = LowBit(model.parameters(), 3, Group())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()
        optimizer.step()
        local.step()
    local.finish()  # on all ranks, before testing
"""

import math
from collections.abc import Iterable
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence


def lloyd_max(bits: int) -> Tensor:
    """The ``2**bits`` levels of least squared error for a Gaussian, ascending; rounded, to be equal on all machines."""
    half = 2 ** (bits - 1)
    levels = torch.erfinv((torch.arange(half, dtype=torch.float64, device="cpu") + 0.5) / half) * math.sqrt(6)
    for _ in range(4000):
        edges = torch.cat([levels.new_zeros(1), (levels[1:] + levels[:-1]) / 2, levels.new_full((1,), math.inf)])
        density, mass = torch.exp(-edges * edges / 2) * math.sqrt(2 / math.pi), torch.erf(edges / math.sqrt(2))
        before, levels = levels, -density.diff() / mass.diff()
        if torch.allclose(levels, before, rtol=0, atol=1e-9):
            break
    return torch.cat([-levels.flip(0), levels]).mul(2**14).round().div(2**14).float()


def parts_of(sizes: list[int], run: int, ranks: int) -> list[Tensor]:
    """The lengths of the runs in each rank's part of parameters of these padded sizes: int64, (runs,)."""
    ends = [min(-(-sum(sizes) // (8 * ranks)) * 8 * rank, sum(sizes)) for rank in range(ranks + 1)]
    starts = [start for begin, end in pairwise(accumulate(sizes, initial=0)) for start in range(begin, end, run)]
    edges = torch.tensor(sorted({*starts, *ends}), dtype=torch.int64, device="cpu")
    return [edges[(edges >= begin) & (edges <= end)].diff() for begin, end in pairwise(ends)]


def regroup(numbers: Tensor, bits: int, into: int) -> Tensor:
    """The bits of numbers of ``bits`` bits, from the lowest on, as numbers of ``into`` bits: int64."""
    shift = torch.arange(8, dtype=torch.int64, device=numbers.device)
    stream = (numbers.long()[:, None] >> shift[:bits]) & 1
    return (stream.view(-1, into) << shift[:into]).sum(1)


def encode(values: Tensor, lengths: Tensor, levels: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the message, uint8: ``most`` scales, zeros after the last run's, and the codes; and Q(values)."""
    bits, run = len(levels).bit_length() - 1, torch.repeat_interleave(lengths)  # the number of each value's run
    zeros, power = values.new_zeros(len(lengths), dtype=torch.float64), 0.5 - 2.0**-bits
    rms = (zeros.index_add(0, run, values.double() ** 2) / lengths).sqrt()
    peak = zeros.scatter_reduce(0, run, values.double().abs(), "amax") / levels[-1]
    scales = (rms ** (1 - power) * peak**power).clamp(1e-20, 1e20).bfloat16()
    codes = torch.bucketize(values * (1 / scales.float())[run], (levels[1:] + levels[:-1]) * 0.5)
    message = torch.cat([pad(scales, (0, most - len(scales))).view(torch.uint8), regroup(codes, bits, 8).byte()])
    return message, levels[codes] * scales.float()[run]


def decode(message: Tensor, lengths: Tensor, levels: Tensor, most: int) -> Tensor:
    """Returns Q(values)."""
    scales = message[: 2 * most].clone().view(torch.bfloat16)[: len(lengths)].float().repeat_interleave(lengths)
    return levels[regroup(message[2 * most :], 8, len(levels).bit_length() - 1)[: len(scales)]] * scales


def flat(parameter: Tensor) -> Tensor:
    """The weights in memory order: a view, (numel,)."""
    return parameter.detach().as_strided((parameter.numel(),), (1,))


class LowBit:
    """Local steps, as above. ``mean_bits``: None for ``bits``. ``bucket``: entries, unless one tensor has more."""

    def __init__(
        self, parameters: Iterable[Tensor], period: int, group: Any, bits: int = 2, mean_bits: int | None = None,
        run: int = 512, bucket: int = 2**23, averaged: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        self.period, self.group, self.run, self.calls = period, group, run, 0
        self.levels, self.mean_levels = lloyd_max(bits), lloyd_max(mean_bits or bits)
        self.common = {p: flat(p).clone() for p in reversed([p for p in parameters if p.requires_grad])}
        self.groups, self.averaged = averaged.param_groups if averaged else [], averaged
        self.sums = {p: torch.zeros_like(flat(p)) for group in self.groups for p in group["params"]}
        self.small = [p for p in self.common if p.dim() < 2 or p.numel() < 1024]
        self.buckets, filled = list[dict[Tensor, Tensor]](), bucket  # of parameters and their residuals
        for p in [p for p in self.common if p.dim() >= 2 and p.numel() >= 1024]:
            residual = p.new_zeros(-(-p.numel() // 256) * 256)
            if filled + len(residual) > bucket:
                self.buckets, filled = [*self.buckets, {}], 0
            self.buckets[-1][p], filled = residual, filled + len(residual)

    def step(self) -> bool:
        """Call it after each step of the optimizer. Returns whether the ranks have exchanged."""
        for p in [p for p in self.sums if p.grad is not None]:
            self.sums[p] += flat(p.grad)
        self.calls = (self.calls + 1) % self.period
        if self.calls:
            return False
        for residuals in self.buckets:
            self.move(residuals, self.exchange(residuals))
        if self.small:  # 5
            differences = torch.cat([self.progress(p) for p in self.small]).half()
            means = self.group.all_reduce(differences) / self.group.size
            self.move(self.small, torch.split(means, [p.numel() for p in self.small]))
        self.step_averaged(self.period)  # 6
        return True

    def progress(self, p: Tensor) -> Tensor:
        """How far a parameter has come, or the sum of its gradients."""
        return self.sums[p] if p in self.sums else flat(p) - self.common[p]

    def exchange(self, residuals: dict[Tensor, Tensor]) -> list[Tensor]:
        """Returns Q(m) of each parameter of a bucket, padded, and updates the residuals."""
        group, sizes = self.group, [len(residual) for residual in residuals.values()]
        a = torch.cat([r + pad(self.progress(p), (0, len(r) - p.numel())) for p, r in residuals.items()])
        parts = [lengths.to(a.device) for lengths in parts_of(sizes, self.run, group.size)]
        own, most = parts[group.rank], max(map(len, parts))
        code, of_mean = ((levels.to(a.device), most) for levels in (self.levels, self.mean_levels))
        values = torch.split(a, [int(lengths.sum()) for lengths in parts])  # 1
        rows, sent = zip(*[encode(x, lengths, *code) for x, lengths in zip(values, parts, strict=True)], strict=True)
        messages = group.all_to_all(pad_sequence(list(rows), batch_first=True))  # 2
        decoded = [values[i] if i == group.rank else decode(row, own, *code) for i, row in enumerate(messages)]
        m = reduce(torch.add, decoded) * (1.0 / group.size)
        row, average = encode(m, own, *of_mean)  # 3
        a -= torch.cat(sent)
        values[group.rank].copy_((m - average) * group.size)
        residuals.update(zip(residuals, torch.split(a, sizes), strict=True))
        longest = max(map(len, values)) // 8 * (len(self.mean_levels).bit_length() - 1) + 2 * most
        messages = group.all_gather(pad(row, (0, longest - len(row))))  # 4
        means = torch.cat([decode(row, lengths, *of_mean) for row, lengths in zip(messages, parts, strict=True)])
        return list(torch.split(means, sizes))

    def move(self, parameters: Iterable[Tensor], averages: Iterable[Tensor]) -> None:
        """Moves the common weights by the averages, which may be padded. The parameters become the common weights. Sums
        become their averages."""
        for p, average in zip(parameters, averages, strict=True):
            if p in self.sums:
                self.sums[p].copy_(average[: p.numel()])
            else:
                flat(p).copy_(self.common[p].add_(average[: p.numel()]))

    def step_averaged(self, calls: int) -> None:
        """Takes one step by the averages of sums of so many calls, and in place of so many steps."""
        before = [dict(group) for group in self.groups]
        for group in self.groups:
            group.update(lr=group["lr"] * calls, betas=tuple(beta**calls for beta in group["betas"]))
        for p, average in self.sums.items():
            p.grad = torch.empty_like(p)
            flat(p.grad).copy_(average / calls)
            average.zero_()
        if self.averaged:
            for state in self.averaged.state.values():
                state["step"] = state["step"] / calls
            self.averaged.step()
            for state in self.averaged.state.values():
                state["step"] = state["step"] * calls
        for group, settings in zip(self.groups, before, strict=True):
            group.update(settings)

    def finish(self) -> None:
        """Averages the weights and the sums uncompressed. The residuals stay."""
        for p, common in self.common.items():
            own = self.sums.get(p, flat(p))
            own.copy_(common.copy_(self.group.all_reduce(own.clone()) / self.group.size))
        if self.calls:
            self.step_averaged(self.calls)
        self.calls = 0
