"""Byte accounting."""

from hvd_compress.engine.collectives import ring_bytes


def test_ring_bytes():
    assert ring_bytes("allreduce", 1000, 4) == 1500
    assert ring_bytes("allgather", 1000, 4) == 3000
    assert ring_bytes("alltoall", 1000, 4) == 750
    assert [ring_bytes(verb, 1000, 1) for verb in ("allreduce", "allgather", "alltoall")] == [0, 0, 0]
