"""Trainings that stop before their last step: a checkpoint to resume from, and the time of a step."""

import time
from pathlib import Path
from typing import Any, Protocol

import torch

#: The state of a training, objects that torch.save can pickle.
State = tuple[Any, ...]


class Watch(Protocol):
    def resume(self, device: torch.device) -> tuple[int, State] | None:
        """The step to go on with, and the state before it; None: from the start."""

    def before(self, step: int, state: State) -> None:
        """Called before each step."""


class OutOfTime(Exception):
    """The training was cut, its checkpoint written."""


class Checkpoint:
    """Writes the state to ``file`` and raises :class:`OutOfTime` once :func:`time.monotonic` is past ``deadline``; the
    training resumes from that file. A file of another ``key`` is ignored. Only load files that you wrote: they are
    pickled."""

    def __init__(self, file: Path, key: str, deadline: float) -> None:
        self._file, self._key, self._deadline = file, key, deadline

    def resume(self, device: torch.device) -> tuple[int, State] | None:
        if not self._file.is_file():
            return None
        kept = torch.load(self._file, map_location=device, weights_only=False)
        return (kept["step"], kept["state"]) if kept["key"] == self._key else None

    def before(self, step: int, state: State) -> None:
        if time.monotonic() < self._deadline:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        torch.save({"key": self._key, "step": step, "state": state}, part)
        part.replace(self._file)
        raise OutOfTime(f"cut before step {step}: {self._file}")

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)


class Timed(Exception):
    """The steps of a probe are done."""


class Probe:
    """Times ten steps after the first two, or the last of a shorter training, then raises :class:`Timed`.

    Attributes:
        ready: seconds until the first of the timed steps, after which the device is warm.
        step: seconds of a step.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self._begin, self._end, self._device = min(2, (steps - 1) // 2), min(12, steps - 1), device
        self._start, self.ready, self.step = time.monotonic(), 0.0, 0.0

    def resume(self, device: torch.device) -> None:
        return None

    def before(self, step: int, state: State) -> None:
        if step not in (self._begin, self._end):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        passed = time.monotonic() - self._start
        if step == self._begin:
            self.ready = passed
        if step == self._end:
            self.step = (passed - self.ready) / max(1, self._end - self._begin)
            raise Timed
