"""A model of a network: how long its links take for the collectives of a step."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..engine.collectives import Verb, ring_bytes

#: The share of a link beyond the headers of Ethernet, IP and TCP: 1448 of 1538 bytes.
PAYLOAD = 0.94
_INSIDE: tuple[Verb, Verb] = ("reduce", "broadcast")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def bandwidth(text: str) -> float:
    """Bits per second from a text such as ``100mbit``; infinity for ``none``. ``ValueError`` for another text."""
    bits = math.inf if text == "none" else _quantity(text, _BITS)
    if not bits:
        raise ValueError(f"a bandwidth is none, or a number and kbit, mbit or gbit, as 100mbit; got {text!r}")
    return bits


def duration(text: str) -> float:
    """Seconds from a text such as ``50ms``. Raises ``ValueError`` for another text."""
    seconds = _quantity(text, _SECONDS)
    if seconds is None:
        raise ValueError(f"a duration is a number and us, ms or s, as 50ms; got {text!r}")
    return seconds


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-z]+)", text.strip().lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


@dataclass(frozen=True)
class Network:
    """Links of hosts.

    Args:
        bits: per second, of each host's link.
        round_trip: seconds of the smallest message from one host to another one and back, as ping measures it.
        per_node: ranks of a host that share its exchange; 1 without two levels.
        inside_bits: per second, of the connection of each rank inside its host.
    """

    bits: float
    round_trip: float
    per_node: int = 1
    inside_bits: float = math.inf

    def seconds(self, sent: float, trips: int = 0) -> float:
        """The time of an exchange that sends so many bytes over a link, with ``trips`` messages in a chain."""
        return 8 * sent / (self.bits * PAYLOAD) + self.round_trip / 2 * trips

    def inside(self, entries: int) -> float:
        """Seconds to sum ``entries`` of float32 gradients inside a host, and to send the averages to its ranks."""
        if self.per_node == 1:
            return 0.0
        bytes_sent = sum(ring_bytes(verb, 4 * entries, self.per_node) for verb in _INSIDE)
        return 8 * bytes_sent / (self.inside_bits * PAYLOAD)
