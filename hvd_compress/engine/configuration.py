"""What must be the same on all ranks, compared before they exchange anything.

Ranks that differ would wait for collectives that others never start, or sum what does not belong together.
"""

import gc
import json
import time
import zlib
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from .bucket import strides_of
from .collectives import Handle, Request, allgather
from .exchange import POLL_INTERVAL

# So many differences are written out.
_LISTED = 6


def configuration(engine: Any) -> dict[str, object]:
    """Of an :class:`~hvd_compress.engine.engine.Engine` and its method: numbers, strings, None or frozen dataclasses,
    by name."""
    method, parameters = engine.method, {}
    for number, (name, p) in enumerate(zip(engine.names, engine.parameters, strict=True)):
        place = engine.place_of(number)
        where = "uncompressed" if place is None else f"in bucket {place.bucket.index}"
        state = "trained" if p.requires_grad else "frozen"
        text = f"number {number}, shape {tuple(p.shape)}, strides {strides_of(p)}, {p.dtype}, {state}, {where}"
        parameters[f"parameter {name}"] = text
    return {
        "version of hvd_compress": __version__,
        "method": type(method).__name__,
        **method.options(),
        **({} if engine.local_steps is None else engine.local_steps.options()),
        "grad_scaler": engine.scaler is not None,
        "seed": engine.seed,
        "step": engine.step,
        "parameters in changed groups": engine.regrouped,
        **parameters,
    }


class Comparison:
    """One engine's configuration, in comparison with the other ranks'. Starts without waiting.

    ``digest``: of the configuration.
    """

    def __init__(self, engine: Any) -> None:
        own = configuration(engine)
        self.digest = digest(own)
        self._collectives, self._label = engine.collectives, engine.exchanges.label
        self._generation, self._stage = engine.collectives.generation(), 0
        self._exchange = _compare(own, engine.parameters[0].device)
        self._handle: Handle | None = None
        self._error: RuntimeError | None = None
        self._resume(None)

    @property
    def void(self) -> bool:
        """Whether the set of ranks has changed since: nobody answers."""
        return self._collectives.generation() is not self._generation

    def advance(self) -> bool:
        """Continues as far as it can without waiting. Returns whether it has ended."""
        while self._handle is not None and self._handle.done():
            self._resume(self._handle.result())
        return self._handle is None

    def finish(self, timeout: float) -> None:
        """Waits for the end."""
        while self._handle is not None:
            self._resume(self._handle.result(timeout))

    @property
    def equal(self) -> bool:
        """After the end: whether the ranks' configurations are."""
        return self._error is None

    def check(self) -> None:
        """After the end: raises ``RuntimeError`` if the ranks differ."""
        if self._error is not None:
            raise self._error

    def _resume(self, result: Tensor | None) -> None:
        self._handle = None
        try:
            request = self._exchange.send(result)  # type: ignore[arg-type]
        except StopIteration:
            return
        except RuntimeError as error:
            self._error = error
            return
        self._handle = self._collectives.start(request, f"{self._label}.compare.{self._stage}")
        self._stage += 1


def compare_ranks(engine: Any, timeout: float) -> None:
    """Raises ``RuntimeError``, on every rank, if their configurations differ, or, after ``timeout`` seconds, if a rank
    does not take part. Waits, so nothing else of the step may have begun.

    Other ranks may begin with another compressor of this process and wait for its comparison. So, where collectives are
    matched by name, the comparisons of all compressors are started and continued.
    """
    if engine.collectives.size == 1:
        return
    begin = time.perf_counter()
    try:
        if engine.collectives.ordered:
            comparison = Comparison(engine)
            comparison.finish(timeout)
            comparison.check()
            return
        repeated = False
        while True:
            comparison = _wait(engine, begin + timeout)
            changed = comparison.digest != digest(configuration(engine))
            if not changed and (comparison.equal or repeated):
                break
            # Another compressor has started it, here or on another rank, in a state that has changed since.
            repeated = True
        comparison.check()
    except TimeoutError as error:
        raise RuntimeError(
            f"not every rank has compared its options within {timeout:g} s (start_timeout=): was a compressor given to "
            "the optimizer or to the DDP model, or load_state_dict() called, or another compressor built, on some "
            "ranks only? Does a rank wait in another collective before its first backward pass? Restart the job after "
            "this error"
        ) from error
    finally:
        engine.exchanges.seconds_waited += time.perf_counter() - begin


def _wait(engine: Any, deadline: float) -> Comparison:
    """Waits for the engine's comparison, and meanwhile continues those of the process's other engines."""
    if _not_compared(engine):
        gc.collect()  # one that was dropped may exist on some ranks still, where it would wait for ever
    others = _not_compared(engine)
    for other in others:
        other.check_generation()
    for each in (engine, *others):
        if each.comparison is None or each.comparison.void:
            each.comparison = Comparison(each)
    while not engine.comparison.advance():
        if time.perf_counter() > deadline:
            raise TimeoutError
        for other in others:
            other.comparison.advance()
        time.sleep(POLL_INTERVAL)
    ended: Comparison = engine.comparison
    engine.comparison = None
    return ended


def _not_compared(engine: Any) -> list[Any]:
    """The other engines that ranks may begin with. Those with local steps are left out: what they compare changes up to
    their first exchange, for which all ranks wait in any case."""
    return [each for each in engine.registry.others(engine) if not each.compared and each.local_steps is None]


def digest(values: Mapping[str, object]) -> int:
    """A hash of values such as :func:`configuration`'s, the same in every process."""
    return zlib.crc32(json.dumps(sorted(_plain(values).items())).encode())


def _compare(own: Mapping[str, object], device: torch.device) -> Generator[Request, Tensor, None]:
    """One collective of 16 bytes a rank, and a second one, of the texts, if they differ."""
    text = json.dumps(_plain(own)).encode()
    head = torch.tensor([[digest(own), len(text)]], dtype=torch.int64, device=device)
    heads = yield allgather(head)
    if bool((heads[:, 0] == head[0, 0]).all()):
        return
    longest = int(heads[:, 1].max())
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    texts = yield allgather(padded)
    everyone = [json.loads(bytes(row.tolist())) for row in texts.view(-1, longest).cpu()]
    raise RuntimeError(_differences(everyone))


def _plain(values: Mapping[str, object]) -> dict[str, str | bool | None]:
    """What JSON can hold. In another process, equal values are equal here."""
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
        ranks_by_value = defaultdict[object, list[int]](list)
        for rank, values in enumerate(everyone):
            ranks_by_value[values.get(name, "missing")].append(rank)
        if len(ranks_by_value) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {_ranks(r)}" for value, r in ranks_by_value.items()))
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n  ".join(["the ranks' compressors differ, and must not:", *lines[:_LISTED], *more])


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"
