"""The loss of local steps by the size of the model: which runs, in which order, and their table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulation.setting import SIZES, TASKS, Setting
from simulation.tables import DENSE, Best, Row, Runs, best, fewer_bytes, over, repeated

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
#: On four ranks, as docs/choosing.md has them: 47 and 164 times fewer bytes; lengths are restored, as is the default.
LOW_BIT = Setting(4, restore_length=True)
FEWER_BITS = replace(LOW_BIT, period=8, bits=1, finer=1)
#: On a card their runs of several rates are one batch: with less to compute for each operator, that is nearly free.
SMALL = ("gpt-0.3m-20", "gpt-1m-20", "gpt-2m-20")

Batch = list[Setting]


def compared(task: str) -> list[Setting]:
    return [replace(setting, task=task) for setting in (DENSE, LOW_BIT, FEWER_BITS)]


def groups(runs: Runs, tasks: Sequence[str] = tuple(SIZES), together: Sequence[str] = SMALL) -> Iterator[list[Batch]]:
    """Batches that make an entry of the table together, in order: first those in ``together``, each at all rates, then
    all others at a first rate, at a second one, and so on. A larger size begins with the best rate of the next smaller
    one, of ``runs`` at the time."""
    for task in SIZES:
        if task in tasks and task in together:
            yield [repeated(setting, RATES, (0,)) for setting in compared(task)]
    done = set[Setting]()
    for _ in RATES:
        for task in SIZES:
            if task in tasks and task not in together:
                # What is likely may have changed since the last rate.
                every = ([replace(s, rate=rate) for rate in likely(runs, s)] for s in compared(task))
                group = [[next(s for s in batch if s not in done)] for batch in every]
                done.update(setting for (setting,) in group)
                yield group


def likely(runs: Runs, setting: Setting) -> list[float]:
    """All rates, the best of the next smaller size first; of equally near ones the one in the middle of all."""
    known = [best(runs, replace(setting, task=task), RATES, (0,)) for task in smaller(setting.task)]
    found = next((one.rate for one in known if one), RATES[1])
    return sorted(RATES, key=lambda rate: (round(abs(math.log(rate / found)), 6), abs(RATES.index(rate) - 1)))


def smaller(task: str) -> list[str]:
    """The tasks below a size, the next first."""
    names = list(SIZES)
    return names[: names.index(task)][::-1]


def parameters(task: str) -> int:
    return sum(p.numel() for p in TASKS[task].build().parameters())


def rows(runs: Runs) -> list[Row]:
    """Each at its best learning rate, which follows in brackets with the number of those run."""
    lines = []
    for task, training in SIZES.items():
        line = {"parameters": f"{parameters(task) / 1e6:.2f} M", "steps": f"{training.steps:,}"}
        line["tokens"] = f"{training.steps * training.windows * training.context / 1e6:.1f} M"
        reference = best(runs, compared(task)[0], RATES, (0,))
        for setting in compared(task):
            value = best(runs, setting, RATES, (0,))
            if setting.ranks == 1:
                line["dense"] = "-" if value is None else f"{value.mean:.3f} {of(runs, setting, value)}"
            else:
                name = f"{fewer_bytes(replace(setting, task='gpt')):.0f} times fewer bytes"
                shown = over(value, reference)
                line[name] = f"{shown} {of(runs, setting, value)}" if value and reference else shown
        lines.append(line)
    return lines


def of(runs: Runs, setting: Setting, value: Best) -> str:
    return f"({value.rate:g}, of {sum(s in runs for s in repeated(setting, RATES, (0,)))})"
