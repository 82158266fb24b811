"""What the scripts' command lines have in common."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def texts(text: str) -> list[str]:
    """The parts of `none,fp16,iwp`."""
    return text.split(",")


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A script's own arguments, and those after `--`, which go to train.py."""
    where = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:where]), list(argv[where + 1 :])


def environments(labels: Sequence[str], settings: Sequence[str]) -> dict[str, dict[str, str]]:
    """From `METHOD:NAME=VALUE`, of every label's ranks beside this program's own; ``ValueError`` says what does not
    fit."""
    chosen: dict[str, dict[str, str]] = {label: {} for label in labels}
    for setting in settings:
        label, _, text = setting.partition(":")
        name, equals, value = text.partition("=")
        if label not in chosen or not name or not equals:
            raise ValueError(f"--environment {setting!r}: expected METHOD:NAME=VALUE with one of {', '.join(chosen)}")
        chosen[label][name] = value
    return chosen


def end_by_exception() -> None:
    """A signal to end comes as SystemExit, so that the run under way is ended and what was made for it removed. One
    that is ignored stays ignored: under nohup, a terminal may go."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(143))
