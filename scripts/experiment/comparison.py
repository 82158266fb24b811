"""What a comparison consists of: variants of methods, the density of each at each budget, and the runs.

What a step sends besides the selected entries (dense tensors, scales, padding) differs from method to method and from
model to model, so the density for a budget is found by short runs. Bytes are nearly affine in it: few suffice.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiment import compressors
from experiment.runs import Result, Run

# A probe counts bytes, without what a method sends once in a hundred steps (budgets, checks), which is little.
PROBE = ("--max-steps", "20", "--eval-every", "1000000")
# The densities of the first two probes: low enough for the budgets that matter, and far apart.
PROBES = (1 / 64, 1 / 8)

Point = tuple[float, float]  # density, share of the dense bytes


class Unreachable(Exception):
    """No density gives this share; says why."""


@dataclass(frozen=True)
class Variant:
    """A method with options of its own: a row of the comparison. The label is METHOD or METHOD@NAME."""

    label: str
    options: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return compressors.method_and_host(self.label)[0]

    @property
    def host(self) -> str:
        return compressors.method_and_host(self.label)[1]

    def has(self, option: str) -> bool:
        return option in compressors.METHODS[self.method].defaults()


@dataclass(frozen=True)
class Decision:
    """A variant's density at a budget and the share of the dense bytes measured there, or why there is none."""

    density: float | None = None
    share: float | None = None
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser, methods: Sequence[str]) -> None:
    """The options that select what is compared."""
    parser.add_argument("--methods", type=texts, default=methods, help="METHOD, METHOD@NAME or ddp-METHOD, with commas")
    parser.add_argument("--option", action="append", default=[], metavar="METHOD:OPTIONS", help="for one row only")


def texts(text: str) -> list[str]:
    """The parts of `none,fp16,iwp`; ``ArgumentTypeError`` if one is there twice."""
    parts = text.split(",")
    if len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text}: each only once")
    return parts


def split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """A script's own arguments, and those after `--`, which go to train.py."""
    where = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:where]), tuple(argv[where + 1 :])


def variants(labels: Iterable[str], options: Iterable[str]) -> list[Variant]:
    """From ``--methods`` and ``--option``; ``ValueError`` says what does not fit."""
    chosen: dict[str, tuple[str, ...]] = {}
    for label in labels:
        compressors.method_and_host(label)
        if not re.fullmatch(r"[\w-]+(@[\w.+-]+)?", label):
            raise ValueError(f"{label!r}: the name after @ is of letters, digits and _.+-")
        chosen[label] = ()
    for option in options:
        label, colon, text = option.partition(":")
        if not colon or label not in chosen:
            raise ValueError(f"--option {option!r}: expected METHOD:OPTIONS with one of {', '.join(chosen)}")
        chosen[label] += tuple(shlex.split(text))
    return [Variant(label, own) for label, own in chosen.items()]


def environments(labels: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """From ``--environment METHOD:NAME=VALUE``: what each label's ranks get in addition to this program's environment;
    ``ValueError`` says what does not fit."""
    chosen: dict[str, dict[str, str]] = {label: {} for label in labels}
    for setting in settings:
        label, _, text = setting.partition(":")
        name, equals, value = text.partition("=")
        if label not in chosen or not name or not equals:
            raise ValueError(f"--environment {setting!r}: expected METHOD:NAME=VALUE with one of {', '.join(chosen)}")
        chosen[label][name] = value
    return chosen


def arguments(args: argparse.Namespace, variant: Variant, seed: int) -> tuple[str, ...]:
    """Of train.py, where later ones win: a variant's own options override what is compared, those after -- do not."""
    own = ["--compression", variant.method, "--host", variant.host, "--seed", str(seed)]
    if args.momentum_correction:
        own += ["--momentum-correction"] if variant.has("momentum_correction") else []
        own += ["--dense-values", "fp16"] if variant.has("dense_values") else []
    common = ["--data", args.data, "--model", args.model, "--epochs", str(args.epochs)]
    return (*args.train, *common, *own, *variant.options)


def runs(args: argparse.Namespace, decisions: dict[str, dict[str, Decision]]) -> list[Run]:
    """All of them, seed by seed.

    A variant runs once at each budget that it reaches, and once at its own ratio if it reaches none. One without a
    decision for every budget does not run: its probes failed.
    """
    found = []
    for seed in args.seeds:
        for variant in args.variants:
            decided = decisions.get(variant.label, {})
            if len(decided) < len(args.budgets):
                continue
            reached = {text: decision.density for text, decision in decided.items() if decision.density is not None}
            points = [(f"-{text.replace('/', 'of')}", ("--density", f"{d:.6g}")) for text, d in reached.items()]
            for suffix, density in points or [("", ())]:
                file = args.out / "runs" / f"{variant.label}{suffix}-{seed}.json"
                found.append(Run(file, args.ranks, (*arguments(args, variant, seed), *density)))
    return found


def budget(text: str) -> float:
    """A budget such as 1/64 or 0.01; ``ValueError`` if it is no share."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise ValueError(f"a budget is a share of the dense bytes, as 1/64 or 0.01; got {text!r}")
    return value


def find(measure: Callable[[float], float], target: float, tolerance: float = 0.01) -> Point:
    """The density that gives the share ``target`` of the dense bytes, and the share measured there.

    It is corrected once if it is off by more than ``tolerance`` of the target; the better of the two is returned.
    """
    low, high = ((density, measure(density)) for density in PROBES)
    density = _solve(low, high, target)
    guess = (density, measure(density))
    if abs(guess[1] - target) <= tolerance * target:
        return guess
    nearer = min(low, high, key=lambda point: abs(point[1] - guess[1]))
    try:
        density = _solve(nearer, guess, target)
    except Unreachable:
        return guess
    return min(guess, (density, measure(density)), key=lambda point: abs(point[1] - target))


def _solve(one: Point, other: Point, target: float) -> float:
    """Where the line through two points reaches ``target``; to four digits, so that it can be read and typed."""
    slope = (other[1] - one[1]) / (other[0] - one[0]) if other[0] != one[0] else 0.0
    if not slope > 0.0:
        raise Unreachable("its bytes do not grow with the density")
    density = one[0] + (target - one[1]) / slope
    if density > 1.0:
        raise Unreachable("all entries together are fewer bytes")
    if density <= 0.0:
        raise Unreachable("what it sends besides the selected entries is more")
    return float(f"{density:.4g}")


class Densities:
    """Finds densities by short runs, and keeps their measurements in a file, so that none is repeated."""

    def __init__(self, args: argparse.Namespace, execute: Callable[[Run], Result]):
        self.args, self.execute = args, execute
        self.file: Path = args.out / "densities.json"
        self.content: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def decide(self, variant: Variant) -> dict[str, Decision]:
        """The variant's decision at each budget."""
        if not variant.has("density"):
            return {text: Decision(why="it has no density") for text in self.args.budgets}
        decided = {}
        for text in self.args.budgets:
            try:
                decided[text] = Decision(*find(lambda density: self.share(variant, density), budget(text)))
            except Unreachable as reason:
                decided[text] = Decision(why=str(reason))
        return decided

    def share(self, variant: Variant, density: float) -> float:
        """What the variant sends at this density, as a share of the dense bytes: measured, now or earlier."""
        # At its final density: a warm-up is not part of the budget.
        steady = ("--warmup-steps", "0") if variant.has("warmup_steps") else ()
        asked = [*arguments(self.args, variant, self.args.seeds[0]), *steady, *PROBE]
        entry = self.content.get(variant.label, {})
        if (entry.get("arguments"), entry.get("ranks")) != (asked, self.args.ranks):
            entry = {"arguments": asked, "ranks": self.args.ranks, "measured": {}}
        key = f"{density:.6g}"
        if key not in entry["measured"]:
            file = self.args.out / "probes" / f"{variant.label}-{key}.json"
            result = self.execute(Run(file, self.args.ranks, (*asked, "--density", key)))
            entry["measured"][key] = result["wire_bytes_per_step"] / result["dense_bytes_per_step"]
            self.content[variant.label] = entry
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.content, indent=1) + "\n")
        return float(entry["measured"][key])
