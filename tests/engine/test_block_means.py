"""Block means, sent in every step beside the selected entries."""

import pytest
import torch
from harness import random_steps, replicas, residuals, together, without_loss
from models import equal, gradients, mixed_model

from hvd_compress import IWP
from hvd_compress.reference import BLOCK


def flat(tensor):
    """In memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def compressed(model):
    """The numbers of the compressed parameters."""
    return [i for i, p in enumerate(model.parameters()) if p.dim() >= 2 and p.numel() >= 1024]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_entry_moves_by_its_blocks_mean(momentum):
    """With momentum correction as with plain momentum, since means are not delayed."""
    world, ranks = replicas(3, IWP, density=1 / 256, values="fp32", momentum=momentum, budget_interval=0)
    velocity = {}
    for step in range(3):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        given = [[g.clone() for g in grad] for grad in grads]
        applied = together(world, ranks, grads)[0]
        for i in compressed(ranks[0].model):
            mean = torch.stack([flat(grad[i]) for grad in given]).mean(0)
            for number, block in enumerate(mean.split(BLOCK)):
                now = velocity[i, number] = momentum * velocity.get((i, number), 0.0) + block.mean()
                # Selected entries differ from it; all others are equal to it.
                torch.testing.assert_close(flat(applied[i]).split(BLOCK)[number].median(), now, rtol=0, atol=1e-6)


def test_equal_gradients_of_a_block_are_never_delayed():
    world, ranks = replicas(2, IWP, density=1 / 64, values="fp32")
    for _ in range(3):
        grads = [[torch.ones_like(p) * (1 + r.rank) for p in r.model.parameters()] for r in ranks]
        applied = together(world, ranks, grads)[0]
        for gradient in applied:
            torch.testing.assert_close(gradient, torch.full_like(gradient, 1.5))
    for rank in ranks:
        for residual in residuals(rank).values():
            assert residual.abs().max() < 1e-6


def test_quantization_errors_of_means_are_kept():
    """With 2 bits per value, most of a mean is rounded off; over many steps all of it is applied."""
    world, ranks = replicas(2, IWP, density=1 / 256, values="lanes2", budget_interval=0)
    steps, total = 20, [torch.zeros_like(p) for p in ranks[0].model.parameters()]
    for _ in range(steps):
        grads = [gradients(r.model, seed=r.rank) for r in ranks]
        mean = [(a + b) / 2 for a, b in zip(*grads, strict=True)]
        for sum_, gradient in zip(total, together(world, ranks, grads)[0], strict=True):
            sum_ += gradient
    rounded = False
    for bucket in range(len(ranks[0].compression.buckets)):
        means = [r.compression.works[bucket].parts["block_means"] for r in ranks]
        unsent = (means[0].unsent + means[1].unsent) / 2
        rounded = rounded or bool(unsent.any())
        for piece in ranks[0].compression.buckets[bucket].pieces:
            number = [name for name, _ in ranks[0].model.named_parameters()].index(piece.name)
            blocks = zip(flat(total[number]).split(BLOCK), flat(mean[number]).split(BLOCK), strict=True)
            for (got, want), rest in zip(blocks, piece.of_blocks(unsent), strict=True):
                # Most entries were never selected: they got the means only.
                torch.testing.assert_close(got.median() + rest, steps * want.mean(), rtol=0, atol=1e-4)
    assert rounded


def swinging(step):
    """Sends all entries in steps 3 to 5."""
    return 1.0 if 3 <= step < 6 else 1 / 64


def like(model, values):
    return [torch.full_like(p, values) for p in model.parameters()]


def test_equal_gradients_move_as_with_plain_momentum_while_the_density_changes():
    world, ranks = replicas(2, IWP, density=swinging, values="fp32", momentum=0.9)
    velocity = 0.0
    for _ in range(9):
        velocity = 0.9 * velocity + 1.0
        for gradient in together(world, ranks, [like(r.model, 1.0) for r in ranks])[0]:
            torch.testing.assert_close(gradient, torch.full_like(gradient, velocity))


def test_no_entry_is_lost_when_the_density_changes():
    world, ranks = replicas(2, IWP, density=swinging, values="lanes2")
    for step in range(9):
        without_loss(world, ranks, [gradients(r.model, seed=2 * step + r.rank) for r in ranks])


def test_the_means_of_a_failed_step_are_sent_in_the_next():
    """Also with a checkpoint between them."""
    _, (rank,) = replicas(1, IWP, density=1 / 64, values="fp32", momentum=0.9)
    _, (other,) = replicas(1, IWP, density=1 / 64, values="fp32", momentum=0.9)
    number = compressed(rank.model)[0]
    parameter = list(rank.model.parameters())[number]
    parameter.grad = torch.ones_like(parameter)
    rank.compression.compress(parameter.grad)
    rank.compression.reset()
    other.compression.load_state_dict(rank.compression.state_dict())
    for one in (rank, other):
        (applied,) = together(one.world, [one], [like(one.model, 1.0)])
        torch.testing.assert_close(applied[number], torch.full_like(parameter, 2.0))


def test_a_state_loads_into_a_compressor_at_another_density():
    """It continues as in a new compressor."""
    world, ranks = replicas(2, IWP, density=swinging, momentum=0.9)
    random_steps(world, ranks, range(3))
    states = [r.compression.state_dict() for r in ranks]
    random_steps(world, ranks, range(3, 5))
    fresh_world, fresh = replicas(2, IWP, density=swinging, momentum=0.9)
    results = []
    for one_world, group in ((world, ranks), (fresh_world, fresh)):
        for rank, state in zip(group, states, strict=True):
            rank.compression.load_state_dict(state)
        results.append(random_steps(one_world, group, range(10, 15))[0])
    assert equal(*results)


def test_a_huge_gradient_enters_neither_its_blocks_mean_nor_the_residuals_of_its_neighbours():
    """The mean of its block would be finite, and not even large, and be subtracted from 255 other entries."""
    model = torch.nn.Linear(256, 4, bias=False)
    world, ranks = replicas(1, IWP, model=model, density=1 / 64, values="fp32", momentum=0.9)
    grads = like(model, 1.0)
    grads[0][2, 7] = 2.0**64
    together(world, ranks, [grads])
    means = ranks[0].compression.works[0].parts["block_means"]
    assert means.unsent.tolist() == means.velocity.tolist() == [1.0, 1.0, 0.0, 1.0]
    held = residuals(ranks[0])["weight"]
    assert held[2, 7] == 0.0 and held[2, 8] == 1.0 and held.sum() == 4 * 256 - 1


def test_training_on_positive_inputs_diverges_without_block_means():
    """All gradients of a unit's weights then have one sign; applied late and at once, they overshoot."""

    def loss_after(**options):
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 8, bias=False)
        world, ranks = replicas(2, IWP, model=model, momentum=0.9, **options)
        optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.001) for r in ranks]
        target = torch.randn(256, 8, generator=torch.Generator().manual_seed(5)) / 16

        def train(i):
            rank, generator = ranks[i], torch.Generator().manual_seed(i)
            for _ in range(150):
                x = torch.rand(32, 256, generator=generator)
                loss = (rank.model(x) - x @ target).square().sum(1).mean()
                rank.exchange(list(torch.autograd.grad(loss, list(rank.model.parameters()))))
                optimizers[i].step()
            return loss.item()

        return max(world.run(train))

    dense = loss_after(density=1.0, values="fp32")
    assert loss_after() < 2 * dense < 2
    assert loss_after(block_means=False) > 100


def test_the_model_of_these_tests_has_partial_blocks():
    assert any(p.numel() % BLOCK for p in mixed_model().parameters() if p.dim() >= 2 and p.numel() >= 1024)
