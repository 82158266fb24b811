"""The end averages weights once: not again after finish(), unless those of some rank have moved since."""

import pytest
import torch
from models import mixed_model

from hvd_compress import LocalSteps, Quantized
from hvd_compress.carriers.threads import ThreadWorld


def nothing(model, optimizer, rank):
    pass


def buffers_of_each_rank(model, optimizer, rank):
    model.norm.running_mean.fill_(rank)


def a_step_on_one_rank(model, optimizer, rank):
    if rank:
        step(model, optimizer, rank)


def weights_by_hand(model, optimizer, rank):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank)


def step(model, optimizer, rank):
    torch.manual_seed(rank)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("between", [nothing, buffers_of_each_rank, a_step_on_one_rank, weights_by_hand])
def test_the_end_after_finish(between, watch):
    if watch and between is weights_by_hand:
        pytest.skip("an error that names take_weights()")
    world, models, sent = ThreadWorld(2, timeout=20, ordered=True), [mixed_model() for _ in range(2)], {}

    def train(rank):
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compression = Quantized(model, bits=2, collectives=world.collectives(rank))
        local = LocalSteps(compression, optimizer, 2, watch_weights=watch)
        for _ in range(3):
            step(model, optimizer, rank)
            local.step()
        local.finish(model)
        between(model, optimizer, rank)
        before = local.compression.stats()["total"]["dense_tensor_bytes"]
        local.end(model)
        sent[rank] = local.compression.stats()["total"]["dense_tensor_bytes"] - before

    world.run(train)
    for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    averages = not watch or between is a_step_on_one_rank
    size = sum(p.nbytes for p in models[0].parameters())
    assert (sent[0] > size / 2) == averages
