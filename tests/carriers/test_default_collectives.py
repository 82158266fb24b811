"""Which host a compressor is bound to, and torch.distributed with one process."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from harness import toy_model
from models import equal
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import DGC, IWP, DeMo, PowerSGD, Quantized, TopK, average_gradients, ddp_hook
from hvd_compress.carriers import default_collectives
from hvd_compress.carriers.torch_collectives import TorchCollectives
from hvd_compress.engine.collectives import allgather, allreduce, alltoall


@pytest.fixture
def one_process():
    """torch.distributed with one rank, in this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def horovod(monkeypatch):
    """Horovod, initialised, as far as the choice of the host is concerned."""
    monkeypatch.setitem(sys.modules, "horovod.torch", SimpleNamespace(is_initialized=lambda: True))


def test_no_initialised_host_raises_an_error():
    with pytest.raises(ValueError, match=r"after hvd.init\(\) \(Horovod\) or torch.distributed.init_process_group\(\)"):
        IWP(toy_model().named_parameters())


def test_two_initialised_hosts_raise_an_error(one_process, horovod):
    with pytest.raises(ValueError, match="both Horovod and torch"):
        IWP(toy_model().named_parameters())
    assert isinstance(default_collectives(None, distributed.group.WORLD), TorchCollectives)


def test_a_process_set_and_a_process_group_raise_an_error(one_process):
    with pytest.raises(ValueError, match="not both"):
        IWP(toy_model().named_parameters(), process_set=object(), process_group=distributed.group.WORLD)


def test_torch_distributed_is_the_default_if_only_it_is_initialised(one_process):
    collectives = IWP(toy_model().named_parameters()).engine.collectives
    assert isinstance(collectives, TorchCollectives)
    assert (collectives.rank, collectives.size, collectives.ordered) == (0, 1, True)


def test_torch_collectives_do_not_modify_their_input(one_process):
    collectives, x = TorchCollectives(), torch.arange(6.0)
    for verb in (allreduce, allgather, alltoall):
        handle = collectives.start(verb(x), verb.__name__)
        assert not handle.done(), "with Gloo, the order of collectives must not depend on timing"
        result = handle.result()
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("method", [IWP, PowerSGD])
def test_ddp_with_one_process_and_no_sync(one_process, method):
    """Density 1 and fp32, or no matrix that gets smaller: as without compression."""
    model, reference = toy_model(), toy_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    options = {"density": 1.0} if method is IWP else {"rank": 64}
    ddp.register_comm_hook(method(model.named_parameters(), values="fp32", **options), ddp_hook)
    for _ in range(3):
        x = torch.randn(8, 32)
        with ddp.no_sync():
            ddp(x).square().mean().backward()
        ddp(-x).square().mean().backward()
        (reference(x).square().mean() + reference(-x).square().mean()).backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    assert equal(model.parameters(), reference.parameters())


def _ddp(model, compression):
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(compression, ddp_hook)
    return ddp, lambda: None


def _loop(model, compression):
    return model, partial(average_gradients, compression)


def _one_rank(wrap, build, take=False, in_optimizer=0.9, **options):
    """The weights after training with momentum on one rank, and the compressor."""
    model = toy_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=in_optimizer)
    compression = build and build(model.named_parameters(), **options)
    wrapped, average = wrap(model, compression) if build else (model, lambda: None)
    if take:
        assert compression.take_momentum(optimizer) == 0.9 == optimizer.param_groups[0]["momentum"]
    for seed in range(4):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        wrapped(torch.randn(8, 32)).square().mean().backward()
        average()
        optimizer.step()
    return list(model.parameters()), compression


@pytest.mark.parametrize("wrap", [_ddp, _loop])
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (IWP, {"density": 1 / 64}),
        (IWP, {"density": 1 / 64, "take": True}),
        (DGC, {"take": True}),
        (TopK, {"dense_values": "fp16"}),
        (Quantized, {"bits": 2}),
        (PowerSGD, {}),
    ],
)
def test_one_rank_keeps_its_gradients(one_process, wrap, build, options):
    trained, compression = _one_rank(wrap, build, **options)
    plain, _ = _one_rank(wrap, None)
    assert equal(trained, plain)
    compression.discard_step()
    found = compression.stats()
    assert found["steps"] == 4 and found["residual_norm"] == found["total"]["wire_bytes"] == 0.0
    compression.load_state_dict(compression.state_dict())


@pytest.mark.parametrize("wrap", [_ddp, _loop])
def test_one_rank_does_not_lose_the_momentum_of_its_compressor(one_process, wrap):
    exact = {"density": 1.0, "values": "fp32", "momentum": 0.9}
    trained, compression = _one_rank(wrap, IWP, in_optimizer=0.0, **exact)
    plain, _ = _one_rank(wrap, None)
    torch.testing.assert_close(trained, plain, rtol=1e-5, atol=1e-6)
    assert compression.stats()["steps"] == 4


@pytest.mark.parametrize("wrap", [_ddp, _loop])
def test_one_rank_has_signs(one_process, wrap):
    """DeMo's optimizer, with AdamW's learning rate, needs them."""
    model = toy_model()
    wrapped, average = wrap(model, DeMo(model.named_parameters()))
    wrapped(torch.randn(8, 32)).square().mean().backward()
    average()
    assert {*model[0].weight.grad.unique().tolist()} <= {-1.0, 0.0, 1.0}
