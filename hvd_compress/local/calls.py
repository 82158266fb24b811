"""The calls that all ranks must make at the same place, compared before they exchange anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..engine.collectives import Handle, Request, rendezvous
from ..engine.comparison import COMPARES, Unexpected, disagreement, ranks_by_value, ranks_text
from ..engine.engine import Engine

#: What a rank may be in; a call is sent as its place here.
CALLS = ("step()", "finish()", "take_weights()", "state_dict()", "DCPState.state_dict()", "end()")

#: The bits of the calls since the last exchange in what must be equal; the digest of the engine's step is above.
AGES = 28


@dataclass(frozen=True)
class Row:
    """The message of one rank: 32 bytes.

    ``call``: one of :data:`CALLS`. ``must_equal``: what must be the same on all ranks: of step(), the calls since the
    last exchange, and the digest of the engine's step; of finish(), if gradients were summed. ``number``: of calls of
    step() so far, for errors. ``extra``: what the caller wants to know of each rank.
    """

    call: str
    must_equal: int = 0
    number: int = 0
    extra: int = 0

    def __str__(self) -> str:
        after = f" after step() {self.number}" if self.number else ""
        return f"step() {self.number}" if self.call == "step()" else f"{self.call}{after}"


class Different(RuntimeError):
    """Ranks are in different calls. Raised on all ranks."""


class Calls:
    """Compares the calls of all ranks by one allgather, so that ranks in different calls raise an error. They would
    exchange what does not belong together otherwise, or wait for each other."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._own = engine, Row(CALLS[0])
        self._handle: Handle | None = None

    def begin(self, row: Row, following: tuple[Request, ...] = ()) -> None:
        """Sends a row to all ranks, without waiting. ``following``: what this rank will send next."""
        engine, self._own = self._engine, row
        values = [CALLS.index(row.call), row.must_equal, row.number, row.extra]
        tensor = torch.tensor([values], dtype=torch.int64, device=engine.parameters[0].device)
        request = rendezvous(tensor, following)
        if not row.call.endswith("state_dict()"):  # a training that saves has the statistics of one that does not
            engine.stats.count_request(request, engine.collectives.size, engine.nodes.ranks)
        self._handle = engine.collectives.start(request, f"{engine.exchanges.label}.call")

    @property
    def due(self) -> bool:
        """Whether to call :meth:`check` in a call that need not wait: on torch.distributed at once, since its
        collectives are matched by order; on Horovod when the rows have arrived."""
        return self._handle is not None and (self._engine.collectives.ordered or self._handle.done())

    def check(self) -> list[Row]:
        """The rows of all ranks, for which it waits; none if that was done. Raises ``RuntimeError``, on all ranks,
        unless they are in the same call after equally many steps."""
        handle, self._handle = self._handle, None
        if handle is None:
            return []
        with self.meeting(self._own):
            rows = self._engine.exchanges.wait(handle).tolist()
        found = [Row(CALLS[call], *rest) for call, *rest in rows if call != COMPARES]
        differ = len({(row.call, row.must_equal) for row in found}) > 1
        if differ or len(found) < len(rows):
            self._engine.collectives.realign()
        if len(found) < len(rows):
            others = [rank for rank, row in enumerate(rows) if row[0] == COMPARES]
            raise Unexpected(
                f"this rank is in LocalSteps' {self._own}, and {ranks_text(others)} will compare options first: was "
                "load_state_dict() called, or a parameter group added, on some ranks only?"
            )
        if differ:
            raise _differ(found)
        return found

    @contextmanager
    def meeting(self, row: Row) -> Iterator[None]:
        """A context for collectives in which others may not take part: errors of the host say what this rank was in."""
        try:
            yield
        except RuntimeError as error:
            # Horovod's own error is one that an elastic job catches; others, such as of memory, speak for themselves.
            of_host = type(error) is RuntimeError or type(error).__name__.startswith("Dist")
            if not (of_host and self._engine.collectives.ordered):
                raise
            raise Different(
                f"the other ranks have not come to LocalSteps' {row}, in which this one waits: all ranks must call "
                f"step() equally often, and finish(), take_weights() and state_dict() at the same place ({error})"
            ) from error

    def compare(self, row: Row) -> list[Row]:
        """Sends a row, and waits for those of the others. Raises as :meth:`check`."""
        self.begin(row)
        return self.check()

    def clear(self) -> None:
        """Nobody waits for the answers any more."""
        self._handle = None


def _differ(rows: list[Row]) -> Different:
    if {row.call for row in rows} == {"take_weights()"}:
        return Different(
            "the ranks have different weights in take_weights(), or other states of optimizers on_averaged_gradients: "
            "load or broadcast the same ones on all ranks before"
        )
    if len({*map(str, rows)}) == 1 < len({row.must_equal >> AGES for row in rows}):
        return Different(f"{disagreement()}; lr and other settings of optimizers on_averaged_gradients, too")
    who = ", ".join(f"{ranks_text(ranks)} in {call}" for call, ranks in ranks_by_value(map(str, rows)).items())
    return Different(
        f"the ranks are in different calls of LocalSteps, {who}: all ranks must call step() equally often, with the "
        "same period, and finish(), take_weights() and, with a delay, state_dict() at the same place; not on one rank "
        "only, and not after unequal numbers of batches"
    )
