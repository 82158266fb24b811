"""hvd_compress.recipes: local steps under their published names."""

import pytest
import torch
from harness import toy_model
from models import mixed_model
from optimizers import muon_and_adamw

from hvd_compress import LocalSteps, recipes
from hvd_compress.carriers.threads import ThreadWorld

RECIPES = [getattr(recipes, name) for name in recipes.__all__]


@pytest.mark.parametrize("recipe", RECIPES, ids=recipes.__all__)
def test_ranks_take_local_steps_and_have_the_same_weights_afterwards(recipe):
    world, models = ThreadWorld(2, ordered=True), [mixed_model() for _ in range(2)]

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
    world, models = ThreadWorld(2, ordered=True), [mixed_model() for _ in range(2)]

    def train(rank):
        model, chosen = models[rank], muon_and_adamw(models[rank].parameters())
        options = {"bucket_mb": 0.01, "collectives": world.collectives(rank)}
        local = recipe(model, chosen, period=4, fragments=2, delay=1, **options)
        return [local.step() for _ in range(6)]

    assert world.run(train) == [[False, False, True, False, True, False]] * 2


@pytest.mark.parametrize("recipe", RECIPES, ids=recipes.__all__)
def test_the_compressor_s_arguments_are_passed_on(recipe):
    collectives = ThreadWorld(1).collectives(0)
    model = mixed_model()
    local = recipe(model, muon_and_adamw(model.parameters()), seed=7, collectives=collectives)
    assert local.compression.seed == 7
    with pytest.raises(TypeError):
        recipe(mixed_model(), muon_and_adamw(model.parameters()), nonsense=1, collectives=collectives)


def sgd(model, part=slice(None)):
    return torch.optim.SGD(list(model.parameters())[part], lr=0.1)


@pytest.mark.parametrize("recipe", RECIPES, ids=recipes.__all__)
def test_wrong_arguments_raise_an_error_that_shows_the_call_to_write(recipe):
    name, collectives = recipe.__name__, ThreadWorld(1).collectives(0)
    model = toy_model()
    one, other = sgd(model, slice(2)), torch.optim.AdamW(list(model.parameters())[2:])
    schedule = torch.optim.lr_scheduler.ConstantLR(one)
    call = rf"{name}\(model, optimizer, period\)"
    both = rf"several optimizers are given as a list: {name}\(model, \[sgd, adamw\], period\)"
    takes = f"{name} takes a torch.optim.Optimizer, or a list of several: {call}; got "
    pairs = f"named_parameters must be the model or .* write {call}; got "
    for arguments, says in (
        ((model, one, other), both),
        ((model, one, other, 3), both),
        ((model, [one], [other]), both),
        ((one, model), f"the model comes first, then the optimizer: {call}"),
        ((one, model, 3), f"the model comes first, then the optimizer: {call}"),
        ((one, 3), f"the model comes first, then the optimizer: {call}"),
        ((model, one.step), f"{takes}(method|function)"),
        ((model, schedule), f"{takes}ConstantLR"),
        ((model, [one, schedule]), f"{takes}ConstantLR"),
        ((model, []), f"{takes}an empty list"),
        ((model, {"muon": one}), f"{takes}dict"),
        ((model, None), f"{takes}NoneType"),
        ((model, "sgd"), f"{takes}str"),
        ((model, 3), f"{takes}int"),
        ((model, torch.optim.SGD), f"{takes}type"),
        ((model, torch.tensor(3)), f"{takes}Tensor"),
        ((model, model.parameters()), f"{takes}Parameter"),
        ((model.parameters(), one), f"{pairs}Parameter"),
        ((model.state_dict(), one), f"{pairs}OrderedDict"),
        ((model.named_parameters, one), f"{pairs}method"),
        (("model", one), f"{pairs}'model'"),
        ((None, one), f"{pairs}NoneType"),
        (
            (model, [one, other], 3, 2),
            rf"{name}\(\) takes .*3 positional arguments but 4",
        ),
    ):
        with pytest.raises(TypeError, match=f"^{says}"):
            recipe(*arguments, collectives=collectives)


@pytest.mark.parametrize("several", [list, tuple, iter])
def test_several_optimizers_may_be_any_iterable_of_them(several):
    model = toy_model()
    chosen = [sgd(model, slice(2)), sgd(model, slice(2, None))]
    options = {"collectives": ThreadWorld(1).collectives(0)}
    assert isinstance(recipes.low_bit(model, several(chosen), 2, **options), LocalSteps)
    local = recipes.low_bit(model=model.named_parameters(), optimizers=dict(enumerate(chosen)).values(), **options)
    assert local.compression.engine.names == [name for name, _ in model.named_parameters()]
