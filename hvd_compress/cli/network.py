"""A network and the hosts on it: how long the collectives of a step take."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..engine.collectives import Verb, ring_bytes
from .transport import Transport
from .wire import Message, sent

#: What Ethernet, IP and TCP leave of a link: 1448 of 1538 bytes.
PAYLOAD = 0.94
#: Seconds for which Linux lets a rank compute before another one on its core has its turn.
SLICE = 3e-3
_INSIDE: tuple[Verb, Verb] = ("reduce", "broadcast")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def bandwidth(text: str) -> float:
    """Bits per second from a text such as ``100mbit``; infinity for none. ``ValueError`` for another text."""
    match = re.fullmatch(r"([0-9.]+)([kmg]bit)", text.strip().lower())
    if text != "none" and (not match or not _number(match[1]) > 0):
        raise ValueError(f"a bandwidth is none, or a number and kbit, mbit or gbit, as 100mbit; got {text!r}")
    return _number(match[1]) * _BITS[match[2]] if match else math.inf


def duration(text: str) -> float:
    """Seconds from a text such as ``50us``. ``ValueError`` for another text."""
    match = re.fullmatch(r"([0-9.]+)(us|ms|s)", text.strip().lower())
    if not match or not _number(match[1]) >= 0:
        raise ValueError(f"a duration is a number and us, ms or s, as 50us; got {text!r}")
    return _number(match[1]) * _SECONDS[match[2]]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class Network:
    """``ranks`` parties in a ring: hosts, or, without two levels, the ranks of all hosts.

    Args:
        bits: per second, of each host's link.
        latency: seconds from one host to the next, in addition to the processor's share of a message.
        per_node: ranks of a host, if they divide its exchange among them; 1 if each rank is a party of its own.
        inside_bits: per second, of the connection of each rank inside its host.
        cores: that all ranks share, as the hosts of scripts/lab/netlab.sh do; None if each rank has a core of its own.
    """

    ranks: int
    bits: float
    latency: float
    transport: Transport
    cores: int | None = None
    per_node: int = 1
    inside_bits: float = math.inf

    @property
    def flat(self) -> "Network":
        """The same without two levels. One rank of each host sends to another host: the bytes of its link are those of
        a rank."""
        return replace(self, ranks=self.ranks * self.per_node, per_node=1)

    @property
    def ranks_per_core(self) -> float:
        return 1.0 if self.cores is None else max(1.0, self.ranks * self.per_node / self.cores)

    def processor(self, messages: Sequence[Message]) -> float:
        """Seconds for which a rank's processor is busy with its share of messages."""
        busy = sum(self.transport.seconds(message, self.ranks) for message in messages)
        return self.ranks_per_core * busy / self.per_node

    def inside(self, entries: int) -> float:
        """Seconds to sum so many float32 gradients inside a host, and to send the averages to its ranks."""
        if self.per_node == 1:
            return 0.0
        bytes_sent = sum(ring_bytes(verb, 4 * entries, self.per_node) for verb in _INSIDE)
        return 8 * bytes_sent / (self.inside_bits * PAYLOAD)

    def wire(self, messages: Sequence[Message]) -> float:
        """Seconds for which the link is busy."""
        return 8 * sent(messages, self.ranks) / (self.bits * PAYLOAD)

    def turns(self, messages: Sequence[Message]) -> float:
        """Seconds that a rank waits for a core that ranks share: in each collective, one time slice for each other rank
        on the core."""
        return SLICE * (self.ranks_per_core - 1) * len(messages)

    def hops(self, messages: Sequence[Message]) -> float:
        """Seconds that empty messages would take: the latency of each hop."""
        hops = sum(2 * (self.ranks - 1) if m.verb == "allreduce" else self.ranks - 1 for m in messages)
        return hops * (self.latency + self.transport.per_hop * self.ranks_per_core)
