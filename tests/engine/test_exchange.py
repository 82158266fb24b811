"""Exchanges whose collectives start together."""

import pytest
import torch

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import Nodes, Request, allgather, allreduce
from hvd_compress.engine.exchange import Exchanges, together
from hvd_compress.engine.streams import stream_order
from hvd_compress.engine.wire_stats import WireStats

CPU = torch.device("cpu")


def road(seen, name, count, value=None):
    """``count`` requests; what it is sent goes to ``seen``."""
    for number in range(count):
        seen.append((name, (yield allgather(torch.full((1,), number)))))
    return value


def test_roads_go_side_by_side_and_return_their_values():
    seen = []
    exchange = together([road(seen, "short", 1, "a"), road(seen, "none", 0, "b"), road(seen, "long", 3, "c")])
    assert [request.tensor.item() for request in next(exchange)] == [0, 0]
    assert [request.tensor.item() for request in exchange.send(["x", "y"])] == [1]
    assert [request.tensor.item() for request in exchange.send(["z"])] == [2]
    with pytest.raises(StopIteration) as end:
        exchange.send(["w"])
    assert end.value.value == ["a", "b", "c"]
    assert seen == [("short", "x"), ("long", "y"), ("long", "z"), ("long", "w")]


def test_an_error_of_a_road_comes_before_the_next_one_has_seen_anything():
    def wrong():
        yield allgather(torch.zeros(1))
        raise RuntimeError("different")

    seen = []
    exchange = together([wrong(), road(seen, "other", 2)])
    next(exchange)
    with pytest.raises(RuntimeError, match="different"):
        exchange.send(["x", "y"])
    assert not seen


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32, torch.int64])
def test_sums_are_the_same_whoever_makes_them(ordered, dtype):
    """Several together, beside a gathering; of any shape. What was handed over stays as it is."""
    world, shapes = ThreadWorld(3, ordered=ordered), [(1,), (4, 2), (0,), (7,)]

    def run(rank):
        generator = torch.Generator().manual_seed(rank)
        given = [torch.randint(-100, 100, shape, generator=generator).to(dtype) for shape in shapes]
        before, found = [x.clone() for x in given], []
        exchanges = Exchanges(Nodes(world.collectives(rank)), WireStats(), "x")

        def exchange():
            own = allgather(torch.full((1,), rank))
            found.append((yield tuple([own, *(allreduce(x) for x in given)])))
            found.append((yield Request("allreduce", given[3], "dense_tensor", level="everyone")))

        exchanges.launch("0", stream_order(CPU), exchange())
        exchanges.finish()
        assert all(map(torch.equal, before, given))
        return given, found

    results = world.run(run)
    totals = [sum(given[i] for given, _ in results) for i in range(len(shapes))]
    for _, ((gathered, *sums), last) in results:
        assert gathered.tolist() == [0, 1, 2]
        for total, found in zip([*totals, totals[3]], [*sums, last], strict=True):
            assert found.dtype == dtype and torch.equal(found, total)
