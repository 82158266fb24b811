#!/usr/bin/env python3
"""Train the GPT of docs/choosing.md on torchft, with peers that die or that are of different speed: what is lost?

    peers_quality.py            the table in docs/torchft.md, of stored runs
    peers_quality.py --train    first trains what is not stored, one run after the other, on two cores

Four peers, 1,500 steps of 4 x 8 windows in total, Muon, local steps in 2 bits, on average four steps a round. Steps of
unequal peers take 80, 80, 40 and 20 ms, those of equal ones 40 ms, beside the computing. All runs have as many rounds
and as many windows in a round; only those that die take their share with them.
"""

import argparse
import random
import signal
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "lab"))

import peer
import table
import torch
import torch.nn.functional as F
from experiment import data, metrics, models, optimizers
from experiment.files import script_parser
from experiment.quality import BITS_PER_BYTE
from experiment.result_file import read_runs, write_run
from fleet import Fleet

from hvd_compress import LocalSteps, Quantized
from hvd_compress.cli.processes import exit_on_signals

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "peers-quality" / "runs.jsonl"
STEPS, EACH_ROUND, WINDOWS, CONTEXT, RATE, WARM_UP = 1500, 4, 8, 64, 3e-3, 100


@dataclass(frozen=True)
class Setting:
    """A row. ``milliseconds``, ``periods``: of each peer's step, and its steps in a round. ``kill_every``: steps after
    which one is killed and replaced."""

    title: str
    milliseconds: tuple[int, ...] = (40, 40, 40, 40)
    periods: tuple[int, ...] = (EACH_ROUND,) * 4
    kill_every: int | None = None


SETTINGS = {
    "equal": Setting("equal peers"),
    "kills": Setting("one of them killed and back every 100 steps", kill_every=100),
    "slowest": Setting("unequal, all wait for the slowest", milliseconds=(80, 80, 40, 20)),
    "ranks": Setting("unequal, nobody waits", (80, 80, 40, 20), (2, 2, 4, 8)),
}


class GPT(peer.Training):
    """In a peer. Further settings: ``rounds``, and ``seed`` of the weights."""

    def build(self):
        self.text = data.load("text", None, CONTEXT)
        self.batches = (
            batch
            for epoch in range(10**6)
            for batch in self.text.train_batches(WINDOWS, 0, 1, self.data.initial_seed(), epoch)
        )
        torch.manual_seed(self.settings["seed"])
        model = models.build("gpt", *self.text.shape)
        args = Namespace(optimizer="muon", lr=None, weight_decay=None, momentum=None)
        optimizers.complete(args)
        return model, optimizers.build(args, model)

    def local_steps(self):
        compression = Quantized(self.model, 2, dense_values="fp16", process_group=self.manager)
        return LocalSteps(compression, self.optimizer, self.settings["period"])

    def loss(self):
        total = EACH_ROUND * self.settings["rounds"]
        rate = optimizers.learning_rate(EACH_ROUND * self.manager.current_step(), RATE, WARM_UP, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = next(self.batches)
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def result(self):
        self.local.finish(self.model)
        score, count = 0.0, 0
        for inputs, targets in self.text.test_batches(250, 0, 1):
            score, count = score + self.text.metric.score(self.model(inputs), targets).item(), count + targets.numel()
        return {BITS_PER_BYTE.key: score / count}


def kills_of(setting, steps):
    """Rounds after which a peer is killed: a third of a training at most lies between two."""
    every = min(setting.kill_every or steps, steps // 3) // EACH_ROUND
    return list(range(every, steps // EACH_ROUND - every // 2, every)) if setting.kill_every else []


def train(setting, steps, seed):
    """Trains; the content of its line in the file."""
    chance, rounds = random.Random(seed), steps // EACH_ROUND
    given = {"timeout": 10.0, "seed": seed, "rounds": rounds}
    with Fleet(Path(__file__), **given) as fleet:
        places = [{"period": p, "pause": m / 1000} for p, m in zip(setting.periods, setting.milliseconds, strict=True)]
        for place in places:
            fleet.add(**place)
        kills = kills_of(setting, steps)
        for kill in kills:
            fleet.wait(lambda kill=kill: max(p.step for p in fleet.staying) >= kill, 3600, f"round {kill}")
            victim = chance.choice([p for p in fleet.staying if p.alive])
            victim.send(signal.SIGKILL)
            fleet.add(**places[fleet.peers.index(victim) % len(places)])
        fleet.wait(lambda: any(p.events("end") for p in fleet.peers), 7200, "the end of the training")
        ended = next(p for p in fleet.peers if p.events("end"))
        times = [event["at"] for peer in fleet.peers for event in peer.events("round")]
        return {
            **asdict(setting),
            "steps": steps,
            "seed": seed,
            "kills": len(kills),
            "rounds_taken_back": max(len(p.events("taken back")) for p in fleet.peers),
            "replicas_equal": not fleet.different(),
            "seconds": max(times) - min(times),
            BITS_PER_BYTE.key: ended.events("end")[0][BITS_PER_BYTE.key],
            "config": metrics.environment(),
        }


def rows(runs, steps):
    """Of the table; "-" where there is no run. The mean over the seeds."""
    lines = []
    for name, setting in SETTINGS.items():
        found = [run for key, run in runs.items() if run["steps"] == steps and key.startswith(f"{name}-")]

        def mean(key, form, found=found):
            return format(sum(run[key] for run in found) / len(found), form) if found else "-"

        line = {"peers": setting.title, BITS_PER_BYTE.label: mean(BITS_PER_BYTE.key, ".3f")}
        line |= {"s": mean("seconds", ".0f"), "killed": mean("kills", ".0f")}
        lines.append({**line, "rounds taken back": mean("rounds_taken_back", ".0f")})
    return lines


def main():
    parser: argparse.ArgumentParser = script_parser(__doc__)
    parser.add_argument("--train", action="store_true", help="train what is not stored")
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="of these")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=FILE, help="of the runs")
    parser.add_argument("--peers", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peers:
        peer.serve(GPT)
        return
    with exit_on_signals():
        for name in args.only if args.train else ():
            path = args.file / f"{name}-{args.steps}-{args.seed}"
            if not args.file.exists() or path.name not in read_runs(args.file):
                print(path.name, file=sys.stderr, flush=True)
                write_run(path, train(SETTINGS[name], args.steps, args.seed))
    print(table.markdown(rows(read_runs(args.file) if args.file.exists() else {}, args.steps)))


if __name__ == "__main__":
    main()
