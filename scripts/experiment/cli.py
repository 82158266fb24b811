"""What the scripts' command lines have in common."""

from __future__ import annotations

import signal
import sys


def texts(text: str) -> list[str]:
    """The parts of `none,fp16,iwp`, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def end_by_exception() -> None:
    """A signal to end comes as SystemExit, so that the run under way is ended and what was made for it removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
