"""The rows of a comparison: methods with options and settings of their own, from the command line."""

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiment import compressors


@dataclass(frozen=True)
class Variant:
    """A method with options of its own: a row of the comparison. The label is METHOD or METHOD@NAME."""

    label: str
    method: str
    host: str
    options: tuple[str, ...]

    def has(self, option: str) -> bool:
        return option in compressors.METHODS[self.method].defaults()


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
        if not re.fullmatch(r"[\w-]+(@[\w.+-]+)?", label):
            raise ValueError(f"{label!r}: the name after @ is of letters, digits and _.+-")
        chosen[label] = ()
    for option in options:
        label, colon, text = option.partition(":")
        if not colon or label not in chosen:
            raise ValueError(f"--option {option!r}: expected METHOD:OPTIONS with one of {', '.join(chosen)}")
        chosen[label] += tuple(shlex.split(text))
    return [Variant(label, *compressors.method_and_host(label), own) for label, own in chosen.items()]


def learning_rates(labels: Sequence[str], given: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """From ``--lrs RATES`` (of every row) and ``--lrs METHOD:RATES`` (of one): what each label is trained with, nothing
    for train.py's default; ``ValueError`` says what does not fit."""
    common, own = ("",), dict[str, tuple[str, ...]]()
    for text in given:
        label, _, rates = text.rpartition(":")
        chosen = tuple(rates.split(","))
        if label and label not in labels:
            raise ValueError(f"--lrs {text!r}: expected RATES or METHOD:RATES with one of {', '.join(labels)}")
        if not all(float(rate) > 0.0 for rate in chosen) or len(set(chosen)) < len(chosen):
            raise ValueError(f"--lrs {text!r}: learning rates are above 0, and each only once")
        if label:
            own[label] = chosen
        else:
            common = chosen
    return {label: own.get(label, common) for label in labels}


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
