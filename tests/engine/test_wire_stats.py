"""Byte accounting."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from hvd_compress.engine.collectives import Category, Level, Nodes, Request, broadcast, ring_bytes
from hvd_compress.engine.wire_stats import WireStats


def test_ring_bytes():
    assert ring_bytes("allreduce", 1000, 4) == 1500
    assert ring_bytes("allgather", 1000, 4) == 3000
    assert ring_bytes("alltoall", 1000, 4) == 750
    assert [ring_bytes(verb, 1000, 1) for verb in ("allreduce", "allgather", "alltoall")] == [0, 0, 0]


@pytest.mark.parametrize("category", get_args(Category))
@pytest.mark.parametrize("level", get_args(Level))
def test_the_level_of_a_request_decides_where_it_travels_and_only_its_category_where_it_is_counted(category, level):
    """A new category must not change the way of the bytes."""
    between, inside = (SimpleNamespace(size=size, rank=0) for size in (4, 2))
    request = Request("allreduce", torch.zeros(250), category, level=level)
    nodes = Nodes(everyone := SimpleNamespace(size=8, rank=0), between, inside)
    assert nodes.level(request) is {"everyone": everyone, "between": between, "inside": inside}[level]
    stats = WireStats()
    stats.begin_step()
    stats.count_request(request, nodes.level(request).size)
    stats.end_step()
    last = stats.report()["last"]
    counted = {name: last[f"{name}_bytes"] for name in (*get_args(Category), "inside") if last[f"{name}_bytes"]}
    expected = {"everyone": {category: 1750}, "between": {category: 1500}, "inside": {"inside": 1000}}[level]
    assert counted == expected
    assert last["wire_bytes"] == expected.get(category, 0)


def test_a_request_inside_a_node_without_nodes_raises_an_error():
    nodes = Nodes(SimpleNamespace(size=8, rank=0))
    with pytest.raises(ValueError, match="broadcast inside a node: the compressor was built without nodes="):
        nodes.level(broadcast(torch.zeros(2), 0))
