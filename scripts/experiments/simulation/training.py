"""Simulates the ranks of several runs at once."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from pathlib import Path

import torch
from experiment.text import STEPS_PER_EPOCH, Text
from torch import Tensor

from simulation import optimizers
from simulation.averages import Average, Lengths
from simulation.checkpoints import Watch
from simulation.common import Common
from simulation.setting import TASKS, Setting, Task
from simulation.weights import Layout, gradients, losses


def simulate(
    settings: Sequence[Setting], device: torch.device, folder: Path | None = None, watch: Watch | None = None
) -> list[float]:
    """The loss of the mean weights at the end, of each run, in the task's metric.

    Args:
        settings: differ only in learning rate and seed, or ``ValueError``.
        folder: see :meth:`Task.text`.
        watch: may end the training early by an exception, and resumes it.
    """
    first = settings[0]
    if different := [s for s in settings if replace(s, rate=first.rate, seed=first.seed) != first]:
        raise ValueError(f"settings may differ in rate and seed only, got {first} and {different[0]}")
    task = TASKS[first.task]
    text = task.text(folder).to(device)
    common, layout = initial_weights(task, settings, device)
    train(task, settings, layout, common, batches(text, task, settings, device), watch)
    tested = [windows(batch).to(device).long() for batch in text.test_batches(256, 0, 1)]
    unit = math.log(2) if task.metric == "bits_per_byte" else 1
    return [loss / unit for loss in losses(layout, common, tested).tolist()]


def train(
    task: Task,
    settings: Sequence[Setting],
    layout: Layout,
    common: Tensor,
    tokens: Tensor,
    watch: Watch | None = None,
) -> None:
    """Moves the common weights, (runs, size), in place. No step waits for a GPU.

    Args:
        tokens: of all steps, see :func:`batches`.
    """
    first, device = settings[0], common.device
    weights = common[:, None].repeat(1, first.ranks, 1)
    others = weights[..., : layout.matrices]
    averaged = Common(first, task, others) if first.averages else None
    optimizer = optimizers.build(first.optimizer, task, layout, weights, averaged)
    # What all ranks have in common already is not rounded again.
    start = layout.compressed if first.others is None else layout.matrices
    progress = Average(weights, layout, start, first.bits, first.finer)
    shared = None if first.others is None else Average(others, layout, layout.compressed, first.others, first.finer)
    lengths = Lengths(layout, device) if first.restore_length else None
    decay = decays(task, layout, device)
    rates = torch.tensor([[task.rate(step, s.rate) for s in settings] for step in range(task.steps)], device=device)
    local_decay = decay.clone()
    if first.averages and first.own is None:
        local_decay[: layout.matrices] = 0
    last, velocity, begin, done = exchanges(task, first), torch.zeros_like(common), 0, 0
    if watch is not None and (kept := watch.resume(device)):
        done, (weights, before, velocity, optimizer, averaged, progress, shared, begin) = kept
        common.copy_(before)
    for step in range(done, task.steps):
        if watch is not None:
            watch.before(step, (weights, common, velocity, optimizer, averaged, progress, shared, begin))
        per_rank = weights.flatten(0, 1)
        gradient = gradients(layout, per_rank, tokens[step].flatten(0, 1), task.bfloat16).view_as(weights)
        if task.clip is not None:  # before the gradients of the others are averaged: ranks move these alike
            gradient *= (task.clip / (gradient.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)
        if shared is not None:
            gradient[..., : layout.matrices] = shared.mean(gradient[..., : layout.matrices])[:, None]
        rate = rates[step, :, None, None]
        weights.mul_(1 - rate * local_decay).addcmul_(rate, optimizer.update(gradient), value=-1)
        if step not in last:
            continue
        differences = weights - common[:, None]
        if averaged is not None:  # in their place, of the same message
            differences[..., : layout.matrices] = averaged.sums
        mean = progress.mean(differences)
        if lengths is not None:
            factors = lengths.factors(differences, mean)
            if averaged is not None:  # gradients are no progress
                factors[:, : layout.matrices] = 1
            mean *= factors
        if averaged is not None:
            gradients_of_others = mean[:, : layout.matrices].clone()
            mean[:, : layout.matrices] = 0
            period = slice(begin, step + 1)
            averaged.step(common[:, : layout.matrices], gradients_of_others, rates[period], decay[: layout.matrices])
        begin = step + 1
        move(common, velocity, mean, first.outer_rate, first.outer_momentum)
        weights.copy_(common[:, None].expand_as(weights))


def move(common: Tensor, velocity: Tensor, mean: Tensor, rate: float, momentum: float) -> None:
    """Moves the common weights by a mean difference, in place: a Nesterov step, as of torch.optim.SGD."""
    velocity.mul_(momentum).add_(mean)
    common.add_(mean, alpha=rate).add_(velocity, alpha=rate * momentum)


def exchanges(task: Task, setting: Setting) -> set[int]:
    """The steps after which weights are averaged; those of the warm-up count with the peak rate. ``ValueError`` if two
    averages would come after one step."""
    rates = (task.rate(max(step, task.warm_up), 1.0) for step in range(task.steps))
    shares = list(accumulate(rate**setting.power for rate in rates))
    rounds = task.steps / setting.period
    passed = [math.floor(share / shares[-1] * rounds + 1e-9) for share in shares]
    new = [later - before for before, later in pairwise([0, *passed])]
    if max(new) > 1:
        raise ValueError(f"period {setting.period} is too short for power {setting.power:g}")
    return {step for step, count in enumerate(new) if count} | {task.steps - 1}


def initial_weights(task: Task, settings: Sequence[Setting], device: torch.device) -> tuple[Tensor, Layout]:
    """Of each run: (runs, size); and their layout."""
    vectors = []
    for setting in settings:
        torch.manual_seed(setting.seed)
        model = task.build()
        layout = Layout(model)
        vectors.append(layout.flatten({name: p.detach() for name, p in model.named_parameters()}))
    return torch.stack(vectors).to(device), layout


def decays(task: Task, layout: Layout, device: torch.device) -> Tensor:
    """Of each entry: (size,)."""
    decayed = [task.norms_decay or len(shape) >= 2 for shape in layout.shapes.values()]
    return torch.tensor(decayed, device=device)[layout.numbers(device)] * task.decay


def batches(text: Text, task: Task, settings: Sequence[Setting], device: torch.device) -> Tensor:
    """Of all steps: int64 (steps, runs, ranks, n, length + 1). ``ValueError`` if ranks cannot have equally many windows
    of a step."""
    count, ranks = settings[0].windows or task.windows, settings[0].ranks
    if count % ranks:
        raise ValueError(f"{count} windows cannot be divided among {ranks} ranks: set windows to a multiple")
    drawn = {}
    for seed in {setting.seed for setting in settings}:
        epochs = range(-(-task.steps // STEPS_PER_EPOCH))
        steps = (batch for epoch in epochs for batch in text.train_batches(count, 0, 1, seed, epoch))
        drawn[seed] = torch.stack([windows(batch).byte() for batch in islice(steps, task.steps)])
    every = torch.stack([drawn[setting.seed] for setting in settings], 1).to(device).long()
    return every.unflatten(2, (-1, ranks)).transpose(2, 3).contiguous()


def windows(batch: tuple[Tensor, Tensor]) -> Tensor:
    """(n, length + 1) of the tokens of a batch, and those that follow them."""
    inputs, targets = batch
    return torch.cat([inputs, targets[:, -1:]], 1)
