"""What a comparison consists of: variants of methods, the density of each at each budget, and the runs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment import budgets, compressors
from experiment.runs import Result, Run

# A probe counts bytes. What a method sends once in a hundred steps (budgets, checks) is not in it: it is little.
PROBE = ("--max-steps", "20", "--eval-every", "1000000")


@dataclass(frozen=True)
class Variant:
    """A method with options of its own: a row of the comparison. The label is METHOD or METHOD@NAME."""

    label: str
    options: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return self.label.partition("@")[0]

    def knows(self, option: str) -> bool:
        return option in compressors.METHODS[self.method].defaults()


@dataclass(frozen=True)
class Decision:
    """A variant's density at a budget and the share of the dense bytes measured there, or why there is none."""

    density: float | None = None
    share: float | None = None
    why: str = ""


def variants(labels: Iterable[str], options: Iterable[str]) -> list[Variant]:
    """From ``--methods`` and ``--option``; ``ValueError`` says what does not fit."""
    chosen: dict[str, tuple[str, ...]] = {}
    for label in labels:
        method = label.partition("@")[0]
        if method not in compressors.METHODS:
            raise ValueError(f"unknown method {method!r}; known: {', '.join(compressors.METHODS)}")
        if not re.fullmatch(r"\w+(@[\w.+-]+)?", label):
            raise ValueError(f"{label!r}: the name after @ is of letters, digits and _.+-")
        if label in chosen:
            raise ValueError(f"{label!r} is there twice")
        chosen[label] = ()
    for option in options:
        label, colon, text = option.partition(":")
        if not colon or label not in chosen:
            raise ValueError(f"--option {option!r}: expected METHOD:OPTIONS with one of {', '.join(chosen)}")
        chosen[label] += tuple(shlex.split(text))
    return [Variant(label, own) for label, own in chosen.items()]


def arguments(args: argparse.Namespace, variant: Variant, seed: int) -> tuple[str, ...]:
    """Of train.py. Later ones win there: nothing after -- can undo what is compared, a variant's own options can."""
    own = ["--compression", variant.method, "--seed", str(seed)]
    if args.momentum_correction:
        own += ["--momentum-correction"] if variant.knows("momentum_correction") else []
        own += ["--dense-values", "fp16"] if variant.knows("dense_values") else []
    common = ["--data", args.data, "--model", args.model, "--epochs", str(args.epochs)]
    return (*args.train, *common, *own, *variant.options)


def runs(args: argparse.Namespace, chosen: Iterable[Variant], decisions: dict[str, dict[str, Decision]]) -> list[Run]:
    """All of them, seed by seed, so that there is soon something of every method.

    A variant runs once at each budget that it reaches, and once at its own ratio if it reaches none. One without a
    decision for every budget does not run: its probes failed.
    """
    found = []
    for seed in args.seeds:
        for variant in chosen:
            decided = decisions.get(variant.label, {})
            if len(decided) < len(args.budgets):
                continue
            reached = {text: decision.density for text, decision in decided.items() if decision.density is not None}
            points = [(f"-{text.replace('/', 'of')}", ("--density", f"{d:.6g}")) for text, d in reached.items()]
            for suffix, density in points or [("", ())]:
                file = args.out / "runs" / f"{variant.label}{suffix}-{seed}.json"
                found.append(Run(file, args.ranks, (*arguments(args, variant, seed), *density)))
    return found


class Densities:
    """Finds densities by short runs, and keeps what they measured in a file, so that no measurement is repeated."""

    def __init__(self, args: argparse.Namespace, execute: Callable[[Run], Result]):
        self.args, self.execute = args, execute
        self.file: Path = args.out / "densities.json"
        self.content: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def decide(self, variant: Variant) -> dict[str, Decision]:
        """The variant's decision at each budget."""
        if not variant.knows("density"):
            return {text: Decision(why="it has no density") for text in self.args.budgets}
        decided = {}
        for text in self.args.budgets:
            try:
                density, share = budgets.find(lambda density: self.share(variant, density), budgets.fraction(text))
                decided[text] = Decision(density, share)
            except budgets.Unreachable as reason:
                decided[text] = Decision(why=str(reason))
        if variant.label in self.content:
            found = {text: decision.density for text, decision in decided.items()}
            self._save({**self.content[variant.label], "found": found}, variant)
        return decided

    def share(self, variant: Variant, density: float) -> float:
        """What the variant sends at this density, as a share of the dense bytes: measured, now or earlier."""
        # In full density: a warm-up is not what a budget is about.
        steady = ("--warmup-epochs", "0") if variant.knows("warmup_epochs") else ()
        asked = [*arguments(self.args, variant, self.args.seeds[0]), *steady, *PROBE]
        entry = self.content.get(variant.label, {})
        if (entry.get("arguments"), entry.get("ranks")) != (asked, self.args.ranks):
            entry = {"arguments": asked, "ranks": self.args.ranks, "measured": {}}
        key = f"{density:.6g}"
        if key not in entry["measured"]:
            file = self.args.out / "probes" / f"{variant.label}-{key}.json"
            result = self.execute(Run(file, self.args.ranks, (*asked, "--density", key)))
            entry["measured"][key] = {
                "wire_bytes_per_step": result["wire_bytes_per_step"],
                "dense_bytes_per_step": result["dense_bytes_per_step"],
            }
            self._save(entry, variant)
        measured = entry["measured"][key]
        return float(measured["wire_bytes_per_step"] / measured["dense_bytes_per_step"])

    def _save(self, entry: dict[str, Any], variant: Variant) -> None:
        self.content[variant.label] = entry
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.content, indent=1) + "\n")
