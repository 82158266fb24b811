#!/usr/bin/env python3
"""Loss of local steps on four ranks, with 47 and 164 times fewer bytes, by the size of the model: GPTs of 0.3 to 10 M
parameters, 20 tokens a parameter, on the Python sources of the installed packages.

    loss_by_size.py                                          the table, of stored runs
    loss_by_size.py --train --device cuda --most-seconds 300 simulates what is not stored, smallest first
    loss_by_size.py --probe --device cuda                    seconds a step, and of all runs by that
    loss_by_size.py --text                                   bytes and checksum of the text

Simulations as those of ranks_apart.py (:mod:`simulation`); see :data:`simulation.sizes`. Runs that would not fit into
what is left of --most-seconds are skipped, by ten timed steps. A run that is cut all the same leaves a checkpoint, and
the same command goes on with it. Runs are of one text: stored ones of another are refused.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from experiment.files import script_parser
from experiment.text import sources
from ranks_apart import read, store
from simulation import sizes
from simulation.checkpoints import Checkpoint, OutOfTime, Probe, Timed
from simulation.setting import SIZES, TASKS, Setting
from simulation.training import simulate

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "results" / "loss-by-size" / "runs.jsonl"


def tell(message: object) -> None:
    print(message, file=sys.stderr, flush=True)


class Estimates:
    """Seconds of batches, from ten timed steps of one of their kind."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._probes = device, dict[tuple[str, int, int], Probe]()

    def probe(self, batch: list[Setting]) -> Probe:
        """Shared by batches of as many ranks and runs of a task: what they send takes little of a step."""
        kind = batch[0].task, batch[0].ranks, len(batch)
        if kind not in self._probes:
            probe = self._probes[kind] = Probe(TASKS[kind[0]].steps, self._device)
            with suppress(Timed):
                simulate(batch, self._device, None, probe)
            tell(f"{kind[0]}, {kind[1]} ranks, {kind[2]} runs: {probe.step:.4f} s a step, ready in {probe.ready:.1f} s")
            if self._device.type == "cuda":
                tell(f"  at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        return self._probes[kind]

    def seconds(self, batch: list[Setting], done: int = 0) -> float:
        probe = self.probe(batch)
        return probe.ready + probe.step * (TASKS[batch[0].task].steps - done)


def train(args: argparse.Namespace, deadline: float) -> None:
    device, text = torch.device(args.device), sources().checksum
    tell(sources())
    refuse_other_text(args.results, text)
    estimates, runs = Estimates(device), read(args.results)
    for group in sizes.groups(runs, args.tasks, together(device)):
        missing = [left for batch in group if (left := [s for s in batch if s not in runs])]
        if not missing:
            continue
        if time.monotonic() > deadline:
            return tell("no time is left for the other sizes")
        kept = {batch[0]: checkpoint(batch, text, args.checkpoints, deadline) for batch in missing}
        needed = 0.0
        for batch in missing:
            resumed = kept[batch[0]].resume(torch.device("cpu"))
            needed += estimates.seconds(batch, resumed[0] if resumed else 0)
        if needed > (left := deadline - time.monotonic()):
            tell(f"{group[0][0].task} at {[s.rate for s in missing[0]]}: skipped, needs {needed:.0f} s of {left:.0f} s")
            continue
        for batch in missing:
            start = time.monotonic()
            losses = simulate(batch, device, None, kept[batch[0]])
            seconds = time.monotonic() - start
            for setting, loss in zip(batch, losses, strict=True):
                runs[setting] = loss
                store(args.results, setting, loss, text=text, device=name(device), torch=torch.__version__)
            kept[batch[0]].remove()
            tell(f"{seconds:.0f} s, {[round(loss, 4) for loss in losses]}: {batch[0]}")


def together(device: torch.device) -> Sequence[str]:
    """The sizes whose rates are one batch."""
    return sizes.SMALL if device.type == "cuda" else ()


def refuse_other_text(file: Path, text: str) -> None:
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    if others := {line["text"] for line in lines} - {text}:
        raise ValueError(f"the text here is {text}, {file} has runs of {others}: pass another --results")


def checkpoint(batch: list[Setting], text: str, folder: Path, deadline: float) -> Checkpoint:
    key = f"{batch}, {TASKS[batch[0].task]}, {text}"
    return Checkpoint(folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt", key, deadline)


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def main() -> None:
    start = time.monotonic()
    parser: argparse.ArgumentParser = script_parser(__doc__)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--train", action="store_true", help="simulate what is not stored, in place of the table")
    action.add_argument("--probe", action="store_true", help="time steps, in place of the table")
    action.add_argument("--text", action="store_true", help="describe the text, in place of the table")
    parser.add_argument("--tasks", nargs="+", choices=SIZES, default=list(SIZES), help="(default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--most-seconds", type=float, default=float("inf"), help="of the call (default: no limit)")
    parser.add_argument("--results", type=Path, default=FILE, help="stored runs (default: those of docs/)")
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "build" / "loss-by-size", help="folder (default: below build/)"
    )
    parser.add_argument("--write-list", type=Path, help="with --text: the files of the text, a line each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.text:
        print(sources())
        if args.write_list:
            args.write_list.write_text("\n".join(sources().listing) + "\n")
    elif args.probe:
        device = torch.device(args.device)
        estimates = Estimates(device)
        for group in sizes.groups({}, args.tasks, together(device)):
            seconds = sum(map(estimates.seconds, group))
            print(f"{group[0][0].task} at {[s.rate for s in group[0]]}: {seconds:.0f} s", flush=True)
    elif args.train:
        try:
            train(args, start + args.most_seconds)
        except OutOfTime as cut:
            tell(cut)
    else:
        import table  # here, since it needs more than torch and numpy

        print(table.markdown(sizes.rows(read(args.results)), left=1))


if __name__ == "__main__":
    main()
