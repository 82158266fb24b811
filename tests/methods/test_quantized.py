"""Quantized: its levels, its scales, its bytes, and what error feedback leaves unsent."""

from functools import partial

import gradient_errors
import pytest
import torch
from harness import random_steps, replicas, residuals, together
from models import gradients

from hvd_compress import Quantized, ops
from hvd_compress.codecs.coded_ring import CodedRing
from hvd_compress.codecs.packed import WideLloyd


def matrix(rows: int = 64, columns: int = 512) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(columns, rows, bias=False)


def relative_error(bits: int, grad: torch.Tensor, **options) -> float:
    """Of one exchange of equal gradients on two ranks without a residual."""
    world, ranks = replicas(2, partial(Quantized, bits=bits, error_feedback=False, **options), model=matrix())
    applied = together(world, ranks, [[grad.clone()] for _ in ranks])[0][0]
    return float((applied - grad).norm() / grad.norm())


@pytest.mark.parametrize(
    ("bits", "most"), [(1, 0.75), (2, 0.55), (3, 0.32), (4, 0.19), (5, 0.11), (6, 0.06), (7, 0.05), (8, 0.03)]
)
def test_gaussian_gradients_have_the_error_of_lloyd_max(bits, most):
    grad = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    # Max 1960: the squared error of 2**bits levels. One encoding has at least about this; two at most about twice.
    lloyd_max = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499, 6: 6.4e-4, 7: 1.63e-4, 8: 4.1e-5}[bits]
    assert 0.95 * lloyd_max**0.5 < relative_error(bits, grad) < most


def test_what_was_sent_is_subtracted_once_also_if_an_operator_fails_before(monkeypatch):
    def fail(*_):
        raise OSError

    found = []
    for fails in (False, True):
        world, ranks = replicas(2, Quantized)
        random_steps(world, ranks, range(3))
        if fails:
            with monkeypatch.context() as broken, pytest.raises(OSError):
                broken.setattr(ops, "accumulate", fail)
                random_steps(world, ranks, range(3, 4))
        found.append([residual for rank in ranks for residual in residuals(rank).values()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_rows_of_different_size_do_not_share_a_scale():
    grad = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    grad *= (10.0 ** -(torch.arange(64) % 4)).unsqueeze(1)
    world, ranks = replicas(2, partial(Quantized, bits=4), model=matrix())
    applied = together(world, ranks, [[grad.clone()] for _ in ranks])[0][0]
    errors = (applied - grad).norm(dim=1) / grad.norm(dim=1)
    assert errors.max() < 0.25
    # The first and the last runs of the parts are cut; others are not.
    assert relative_error(4, grad, run=512) < relative_error(4, grad, run=4096) < 1.0


def test_zeros_stay_zeros_nearly():
    grad = torch.zeros(64, 512)
    grad[0, 0] = 1.0
    world, ranks = replicas(3, Quantized, model=matrix())
    applied = together(world, ranks, [[grad.clone()] for _ in ranks])[0][0]
    assert applied[1:].abs().max() < 1e-19 and applied[0, 0] > 0.05


@pytest.mark.parametrize(("bits", "most"), [(1, 1.9), (2, 0.8), (4, 0.2)])
def test_what_is_unsent_stays_bounded_on_16_ranks(bits, most):
    generator = torch.Generator().manual_seed(0)
    exchanges = [torch.randn(16, 4096, generator=generator) + torch.randn(4096, generator=generator) for _ in range(80)]
    early, late = (
        {key: float(value) for key, value in gradient_errors.feedback(CodedRing(WideLloyd(bits)), part, [4096]).items()}
        for part in (exchanges[:20], exchanges)
    )
    for key in ("unsent", "residual"):
        assert late[key] < 1.3 * early[key]
    assert late["unsent"] < most


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bytes_hardly_depend_on_the_ranks(bits):
    each = []
    for ranks in (4, 8, 16):
        world, group = replicas(ranks, partial(Quantized, bits=bits), model=matrix(300, 500))
        together(world, group, [gradients(group[0].model, seed=i) for i in range(ranks)])
        sent = [r.compression.stats()["last"]["wire_bytes"] for r in group]
        assert len(set(sent)) == 1
        each.append(sent[0] / (2 * (ranks - 1) / ranks * bits / 8 * 300 * 500))
    assert all(1.0 < factor < 1.1 for factor in each), each


def test_a_channel_holds_nothing_from_step_to_step():
    _, ranks = replicas(2, Quantized, model=matrix())
    state = ranks[0].compression.state_dict()
    assert "buckets" not in state["shared"]
    assert [list(bucket) for bucket in state["per_rank"]["buckets"].values()] == [["residual"]]


@pytest.mark.parametrize("ranks", [1, 3, 16])
@pytest.mark.parametrize("sizes", [[1024], [256, 1280, 256], [8]])
def test_messages_have_room_for_the_runs_of_every_part(sizes, ranks):
    codec = CodedRing(WideLloyd(3), 100, WideLloyd(5))
    channels = [codec.channel(len(sizes), ranks, rank, torch.device("cpu")) for rank in range(ranks)]
    for channel in channels:
        channel.set_group_sizes(sizes)
        assert len(channel.own_runs) - 1 <= channel.columns
        assert channel.own_runs.diff().max() <= 100 if len(channel.own_runs) > 1 else channel.begin == channel.end
    messages = [c.first_requests()[0] for c in channels]
    assert len({(m.tensor.shape, m.following[0].tensor.shape) for m in messages}) == 1
    assert sum(c.end - c.begin for c in channels) == sum(sizes)
    assert channels[0].place.unique().numel() == channels[0].place.numel()  # no two runs at one place
