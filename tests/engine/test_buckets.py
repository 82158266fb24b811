"""Buckets: memory order and the division of parameters."""

import torch

from hvd_compress.engine.bucket import in_order_of, is_dense, make_buckets


def test_gradients_are_copied_only_if_their_memory_order_differs():
    x = torch.randn(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert is_dense(x) and is_dense(last) and is_dense(x.transpose(0, 2))
    assert not is_dense(x[:, ::2]) and not is_dense(x[:1].expand(2, 3, 4, 5))
    assert in_order_of(last, last) is last
    moved = in_order_of(last, x)
    assert torch.equal(moved, x) and moved.stride() == last.stride()
    # The stride of a dimension of length 1 is arbitrary.
    one = torch.randn(8, 1, 3, 3)
    assert in_order_of(one.contiguous(memory_format=torch.channels_last), one) is one


def test_buckets_start_with_the_last_parameter_and_respect_their_capacity():
    parameters = [(i, f"p{i}", torch.nn.Parameter(torch.zeros(size))) for i, size in enumerate((300, 70_000, 200, 10))]
    buckets = make_buckets(parameters, capacity=4 * 1024)
    assert [[p.name for p in b.pieces] for b in buckets] == [["p3", "p2"], ["p1"], ["p0"]]
    assert [p.first_block for p in buckets[0].pieces] == [0, 1] and buckets[0].blocks == 2
    assert buckets[1].residual.numel() == 274 * 256
