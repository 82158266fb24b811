"""The columns of `scripts/bench_exchange.py`: from what the ranks measured to a row, and from rows to comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import table

from hvd_compress.engine.collectives import ring_bytes

Row = dict[str, Any]


def row(method: str, rate: str, backend: str, runs: Sequence[dict[str, Any]], sent_by_ring: int) -> Row:
    """Medians over the steps of all runs, and [least, largest] beside them; ``step_ms_runs`` has each run's median.
    ``sent_by_ring``: bytes of an entry, for a method without books where there is no interface to ask.

    A step takes as long as its slowest rank; the compressor's own time is the mean over ranks.
    """
    ranks, entries, measured = runs[0]["ranks"], runs[0]["entries"], _together([run["measured"] for run in runs])
    dense = ring_bytes("allreduce", 4 * entries, ranks)
    step, backward, base = (_over_ranks(measured, key, max) for key in ("step", "backward", "base"))
    alone = statistics.median(base)
    exchange = [seconds - alone for seconds in step]
    nominal = ring_bytes("allreduce", sent_by_ring * entries, ranks)
    sent = statistics.mean(statistics.mean(rank.get("sent", [nominal])) for rank in measured)
    failures = [text for run in runs for text in run["failures"]]
    found: Row = {
        "method": method,
        "rate": rate,
        "backend": backend,
        "ranks": ranks,
        "steps": len(step),
        **_milliseconds("step", step),
        "step_ms_runs": [1e3 * statistics.median(_over_ranks(run["measured"], "step", max)) for run in runs],
        **_milliseconds("backward", backward),
        **_milliseconds("update", [a - b for a, b in zip(base, backward, strict=True)]),
        **_milliseconds("backward_with_hooks", _over_ranks(measured, "hooked", max)),
        **_milliseconds("exchange", exchange),
    }
    for key in ("compress", "decompress", "wait"):
        found |= _milliseconds(key, _over_ranks(measured, key, statistics.mean) if key in measured[0] else [])
    found |= {
        "dense_bytes": dense,
        "tx_bytes": sent,
        "wire_ratio": dense / sent,
        "bus_gbit_s": bus(dense, found["exchange_ms"]),
        "break_even_gbit_s": break_even(dense - sent, found["compress_ms"], found["decompress_ms"]),
        "settings": runs[0]["settings"],
        "wrong": len(failures),
        "failures": failures,
    }
    return found


def _together(runs: Sequence[Sequence[dict[str, list[float]]]]) -> list[dict[str, list[float]]]:
    """What each rank measured, as if every run had gone on where the one before it ended."""
    return [{key: [x for part in parts for x in part[key]] for key in parts[0]} for parts in zip(*runs, strict=True)]


def bus(dense: float, exchange_ms: float) -> float | None:
    """The bus bandwidth of nccl-tests, in Gbit/s: what a dense ring would have needed to be as fast as this."""
    return 8e-6 * dense / exchange_ms if exchange_ms > 0 else None


def break_even(saved: float, compress_ms: float | None, decompress_ms: float | None) -> float | None:
    """The bandwidth in Gbit/s at which sending ``saved`` bytes takes as long as compressing: what is slower gains, if
    nothing overlaps. None where nothing is saved or the time is not known."""
    if compress_ms is None or decompress_ms is None or saved <= 0:
        return None
    seconds = compress_ms + decompress_ms
    return 8e-6 * saved / seconds if seconds > 0 else None


def compared(rows: Sequence[Row], failed: Collection[tuple[str, str]] = ()) -> list[Row]:
    """With ``speedup_over_none`` and ``speedup_over_fp16``: of whole steps, over the fastest row of that method at the
    same rate, whatever its backend and its label's part after @. None without such a row, or if a run of that method at
    that rate, (method, rate), ``failed``: it may have been the fastest."""
    fastest: dict[tuple[str, str], float] = {}
    for one in rows:
        key = _method(one["method"]), one["rate"]
        fastest[key] = min(one["step_ms"], fastest.get(key, math.inf))
    for label, rate in failed:
        fastest.pop((_method(label), rate), None)
    done = []
    for one in rows:
        of = {base: fastest.get((base, one["rate"])) for base in _BASES}
        done.append({**one, **{f"speedup_over_{base}": ms and ms / one["step_ms"] for base, ms in of.items()}})
    return done


def _method(label: str) -> str:
    return label.partition("@")[0]


_BASES = ("none", "fp16")


def markdown(rows: Sequence[Row]) -> str:
    """The table; ms unless a column says otherwise, spreads from the fastest to the slowest step."""
    header = [
        "rate", "backend", "method", "step ms", "backward", "exchange", "compress", "decompress", "tx MB", "wire ratio",
        "bus Gbit/s", "x none", "x fp16", "even at Gbit/s", "wrong",
    ]  # fmt: skip
    lines = []
    for one in rows:
        low, high = one["step_ms_spread"]
        lines.append(
            [
                one["rate"],
                one["backend"],
                one["method"],
                f"{one['step_ms']:,.1f} ({low:,.1f} to {high:,.1f})",
                *(_text(one[f"{key}_ms"], ",.1f") for key in ("backward", "exchange", "compress", "decompress")),
                f"{one['tx_bytes'] / 1e6:,.2f}",
                f"{one['wire_ratio']:.1f}",
                _text(one["bus_gbit_s"], ".2f"),
                *(_text(one[f"speedup_over_{base}"], ".2f") for base in _BASES),
                _text(one["break_even_gbit_s"], ".2f"),
                str(one["wrong"]),
            ]
        )
    return table.markdown(header, lines, left=3)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _over_ranks(measured: Sequence[dict[str, list[float]]], key: str, how: Any) -> list[float]:
    """Step by step, ``how`` over the ranks."""
    return [how(values) for values in zip(*(rank[key] for rank in measured), strict=True)]


def _milliseconds(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """NAME_ms and NAME_ms_spread; None where nothing was measured."""
    if not seconds:
        return {f"{name}_ms": None, f"{name}_ms_spread": None}
    spread = [1e3 * min(seconds), 1e3 * max(seconds)]
    return {f"{name}_ms": 1e3 * statistics.median(seconds), f"{name}_ms_spread": spread}
