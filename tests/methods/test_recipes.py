"""hvd_compress.recipes: local steps under their published names."""

import pytest
import torch
from harness import mixed_model
from optimizers import muon_and_adamw

from hvd_compress import LocalSteps, recipes
from hvd_compress.hosts.threads import ThreadWorld

RECIPES = [getattr(recipes, name) for name in recipes.__all__]


@pytest.mark.parametrize("recipe", RECIPES, ids=recipes.__all__)
def test_ranks_take_local_steps_and_have_the_same_weights_afterwards(recipe):
    world, models = ThreadWorld(2, timeout=20, ordered=True), [mixed_model() for _ in range(2)]

    def train(rank):
        model = models[rank]
        chosen = muon_and_adamw(model.parameters())
        local = recipe(model, chosen, period=2, seed=3, collectives=world.collectives(rank))
        generator, exchanged = torch.Generator().manual_seed(rank), []
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            for optimizer in chosen:
                optimizer.step()
            exchanged.append(local.step())
        local.finish(model)
        assert isinstance(local, LocalSteps) and exchanged == [False, True, False, True]
        return local.compression.stats()["total"]["wire_bytes"], [p.detach() for p in model.parameters()]

    (sent, one), (_, other) = world.run(train)
    assert sent > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=recipes.__all__)
def test_averages_may_arrive_later(recipe):
    world, models = ThreadWorld(2, timeout=20, ordered=True), [mixed_model() for _ in range(2)]

    def train(rank):
        model, chosen = models[rank], muon_and_adamw(models[rank].parameters())
        local = recipe(
            model, chosen, period=4, fragments=2, delay=1, bucket_mb=0.01, collectives=world.collectives(rank)
        )
        return [local.step() for _ in range(6)]

    assert world.run(train) == [[False, False, True, False, True, False]] * 2


@pytest.mark.parametrize("recipe", RECIPES, ids=recipes.__all__)
def test_the_compressor_s_arguments_are_passed_on(recipe):
    collectives = ThreadWorld(1).collectives(0)
    model = mixed_model()
    local = recipe(model, muon_and_adamw(model.parameters()), seed=7, collectives=collectives)
    assert local.compression.engine.seed == 7
    with pytest.raises(TypeError):
        recipe(mixed_model(), muon_and_adamw(model.parameters()), nonsense=1, collectives=collectives)
