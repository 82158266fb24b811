"""Compares what must be the same on all ranks, before they exchange anything.

Ranks that differ would wait for collectives that others never start, or sum values of different entries.
"""

import json
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .collectives import Collectives, Handle, Request, rendezvous
from .exchange import POLL_INTERVAL

# The most differences in an error message.
_LISTED = 6

#: The first number of a comparison's first message.
COMPARES = -1

Configuration = Callable[[], Mapping[str, object]]


class Unexpected(RuntimeError):
    """Some ranks compare their configurations, and others do not: all of them raise it."""


class _Run:
    """One comparison with the other ranks. Starts without waiting.

    ``digest``: of the configuration that is compared. ``generation``: the set of ranks; in another one nobody answers.
    """

    def __init__(self, own: Mapping[str, object], collectives: Collectives, label: str, device: torch.device) -> None:
        self.digest = digest(own)
        self._collectives, self._label = collectives, label
        self.generation, self._stage = collectives.generation(), 0
        self._exchange = _compare(own, device)
        self._handle: Handle | None = None
        #: The error if the ranks differ, to be read after the end.
        self.error: RuntimeError | None = None
        self._resume(None)

    def advance(self) -> bool:
        """Continues as far as it can without waiting. Returns whether it has ended."""
        while self._handle is not None and self._handle.done():
            self._resume(self._handle.result())
        return self._handle is None

    def finish(self, timeout: float) -> None:
        """Waits until it has ended."""
        while self._handle is not None:
            self._resume(self._handle.result(timeout))

    def check(self) -> None:
        """Raises ``RuntimeError`` if the ranks differ. To be called after the end."""
        if self.error is not None:
            raise self.error

    def _resume(self, result: Tensor | None) -> None:
        self._handle = None
        try:
            request = self._exchange.send(result)  # type: ignore[arg-type]
        except StopIteration:
            return
        except RuntimeError as error:
            if isinstance(error, Unexpected):
                self._collectives.realign()
            self.error = error.with_traceback(None)  # whose frames would keep the engine
            return
        self._handle = self._collectives.start(request, f"{self._label}.compare.{self._stage}")
        self._stage += 1


class Comparison:
    """Compares the configuration of one compressor between ranks, again after each change.

    Other ranks may begin with another compressor of this process and wait for its comparison. So, where collectives are
    matched by name, the comparisons of all compressors are started and continued.

    Args:
        device: of the messages.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, collectives: Collectives, device: torch.device, timeout: float) -> None:
        self._collectives, self._device, self._timeout = collectives, device, timeout
        self._registry = collectives.registry()
        self._number = self._registry.number()
        #: Begins the names of the compressor's collectives: the same on all ranks, and another one for each compressor.
        self.label = f"hvd_compress.{self._number}"
        self._run: _Run | None = None
        #: Whether the ranks have compared their configurations since the last change.
        self.done = False

    def changed(self) -> None:
        """The configuration may have changed: the ranks compare it before their next exchange."""
        self.done = False

    def register(self, method: Any) -> None:
        """Lets the process's other compressors call this one, from now on, and again once the ranks have changed."""
        self._registry = self._collectives.registry()
        self._registry.add(method, self._number)
        self.changed()

    def others(self, method: Any) -> Iterator[Any]:
        """The other compressors of the process that exchange with other ranks."""
        for other in self._registry.others(method):
            members = other.engine.collectives
            if members.active and members.size > 1:
                yield other

    def join(self, configuration: Configuration) -> _Run:
        """The comparison in progress, which it starts if there is none. Does not wait."""
        if self._run is None or self._run.generation is not self._collectives.generation():
            self._run = self._start(configuration)
        return self._run

    def require(self, configuration: Configuration, others: "Others") -> None:
        """Raises ``RuntimeError``, on every rank, if their configurations differ, or, after the timeout, if a rank does
        not take part. Waits, so nothing else of the step may have begun.

        Args:
            configuration: returns numbers, strings, None or frozen dataclasses, by name.
            others: returns the other compressors of this process that have still to compare theirs.
        """
        if self._collectives.size == 1:
            self.done = True
            return
        absent = self._collectives.check_in()
        try:
            if self._collectives.ordered:
                run = self._start(configuration)
                run.finish(self._timeout)
            else:
                run = self._among_others(configuration, others, time.perf_counter() + self._timeout)
        except TimeoutError as error:
            raise _absence(absent(), f"within {self._timeout:g} s (start_timeout=)") from error
        except RuntimeError as error:  # by the host's own limit, or its connection is lost
            if missing := absent():
                raise _absence(missing, f"before this error of the host: {error}") from error
            raise
        run.check()
        self.done = True

    def _start(self, configuration: Configuration) -> _Run:
        return _Run(configuration(), self._collectives, self.label, self._device)

    def _among_others(self, configuration: Configuration, others: "Others", deadline: float) -> _Run:
        repeated = False
        while True:
            run = self._wait([(self, configuration), *others()], deadline)
            changed = run.digest != digest(configuration())
            if not changed and (run.error is None or repeated):
                return run
            # Another compressor has started this run, here or on another rank, in a state that has changed since.
            repeated = True

    def _wait(self, together: "list[tuple[Comparison, Configuration]]", deadline: float) -> _Run:
        *others, own = [comparison.join(configuration) for comparison, configuration in reversed(together)]
        while not own.advance():
            if time.perf_counter() > deadline:
                raise TimeoutError
            for other in others:
                other.advance()
            time.sleep(POLL_INTERVAL)
        self._run = None
        return own


Others = Callable[[], list[tuple[Comparison, Configuration]]]


def compare_once(values: Mapping[str, object], collectives: Collectives, label: str, device: torch.device) -> None:
    """Raises ``RuntimeError``, on every rank, if these values differ between the ranks. Waits."""
    run = _Run(values, collectives, label, device)
    run.finish(math.inf)
    run.check()


def disagreement() -> RuntimeError:
    """The error to raise when ranks differ in seed, step or options."""
    return RuntimeError(
        "the ranks' compressors disagree: seed, density, all other options and step must be the same on all ranks "
        "(was a state loaded on some ranks only? was the seed derived from the rank? were the parameters broadcast?)"
    )


def _absence(missing: list[int], when: str) -> RuntimeError:
    """The error to raise when ranks do not take part in the comparison."""
    have = "have" if len(missing) > 1 else "has"
    who = f"{ranks_text(missing)} {have} not" if missing else "not every rank has"
    return RuntimeError(
        f"{who} compared its options {when}: does a rank take longer to its first step (a compilation, a slow node: "
        "give a longer start_timeout=)? Was a compressor given to the optimizer or to the DDP model, or "
        "load_state_dict() called, or another compressor built, on some ranks only? Does a rank wait in another "
        "collective before? Restart the job after this error"
    )


def digest(values: Mapping[str, object]) -> int:
    """A hash of a configuration, the same in every process."""
    return zlib.crc32(json.dumps(sorted(_plain(values).items())).encode())


def _compare(own: Mapping[str, object], device: torch.device) -> Generator[Request, Tensor, None]:
    """The exchange: one collective of 32 bytes a rank, and a second one, of the texts, if they differ. The first
    message has the form of the one that LocalSteps sends before each exchange, so that ranks in different calls see
    that they differ."""
    text = json.dumps(_plain(own)).encode()
    head = torch.tensor([[COMPARES, digest(own), len(text), 0]], dtype=torch.int64, device=device)
    heads = yield rendezvous(head)
    if bool((heads[:, 0] != COMPARES).any()):
        others = [rank for rank, row in enumerate(heads.tolist()) if row[0] != COMPARES]
        raise Unexpected(
            f"this rank compares its options, and {ranks_text(others)} {'are' if len(others) > 1 else 'is'} in an "
            "exchange of LocalSteps: was load_state_dict() called, or a parameter group added, on some ranks only?"
        )
    if bool((heads[:, 1] == head[0, 1]).all()):
        return
    longest = int(heads[:, 2].max())
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = yield rendezvous(padded)
    everyone = [json.loads(bytes(row.tolist())) for row in texts.view(-1, longest).cpu()]
    raise RuntimeError(_differences(everyone))


def _plain(values: Mapping[str, object]) -> dict[str, str | bool | None]:
    """Values in types that JSON can hold; equal ones are equal in every process."""
    return {name: _plain_value(value) for name, value in values.items()}


def _plain_value(value: object) -> str | bool | None:
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int | float):  # 1 and 1.0 are equal
        return str(int(value)) if value == int(value) else repr(value)
    # Other objects' texts differ from process to process.
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    inside = ", ".join(f"{name}={_plain_value(getattr(value, name))}" for name in names)
    return f"{type(value).__name__}({inside})" if names else type(value).__name__


def _differences(everyone: list[dict[str, object]]) -> str:
    lines = []
    for name in dict.fromkeys(name for values in everyone for name in values):
        found = ranks_by_value(values.get(name, "missing") for values in everyone)
        if len(found) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {ranks_text(r)}" for value, r in found.items()))
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n  ".join(["the ranks differ, and must not:", *lines[:_LISTED], *more])


def ranks_by_value(values: Iterable[object]) -> dict[object, list[int]]:
    """The ranks that have each of the values, which are in rank order."""
    ranks = defaultdict[object, list[int]](list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks


def ranks_text(ranks: list[int]) -> str:
    """Ranks, for an error message."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"
