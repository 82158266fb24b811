"""Ranks of one node."""

from collections import defaultdict
from collections.abc import Sequence

from ..engine.arguments import check_integer


def divided(nodes: object, ranks: int) -> list[int]:
    """The node of each rank, if a number of ``nodes`` divides so many ranks in order."""
    number = check_integer("nodes", nodes, other="True, or, with torch, a DeviceMesh of the dimensions node and GPU")
    if number < 1 or ranks % number:
        raise ValueError(f"nodes must be a divisor of the number of ranks, {ranks}, got {number}")
    return [rank * number // ranks for rank in range(ranks)]


def groups(node_of: Sequence[object], rank: int) -> tuple[list[int], list[int]]:
    """The ranks of the node of ``rank``, and the ranks that have its place in their nodes. ``node_of``: the node of
    each rank. Raises ``ValueError``, on every rank, if the nodes have unequal numbers of ranks."""
    rows = table(node_of)
    inside = next(row for row in rows if rank in row)
    return inside, [row[inside.index(rank)] for row in rows]


def table(node_of: Sequence[object]) -> list[list[int]]:
    """The ranks by node. Raises as :func:`groups`."""
    found = defaultdict[object, list[int]](list)
    for rank, node in enumerate(node_of):
        found[node].append(rank)
    rows = list(found.values())
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1:
        raise ValueError(f"nodes must have equally many ranks, these have {', '.join(map(str, counts))}")
    return rows
