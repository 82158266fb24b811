"""DeMo with its decay and its sign; as an exchange without them it is among the methods of the invariants."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from harness import HOSTS, Rank, random_steps, replicas, residuals, together, toy_model, train
from methods import SMALL
from models import compressed, equal, gradients, mixed_model

from hvd_compress import DeMo, TernGrad, reference
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.methods.orthogonal import orthogonalize
from hvd_compress.reference import BLOCK

EXCHANGES = ("ring", "gather")
VARIANTS = [
    dict(exchange="ring"),
    dict(exchange="gather"),
    dict(orthogonal=True),
    dict(orthogonal=["wide.weight"]),
    dict(orthogonal=True, subtract=0.25),
    dict(exchange="gather", subtract=0.25),
]


def coefficients(grad: torch.Tensor) -> torch.Tensor:
    """The transform of a gradient: (blocks, 256)."""
    flat = torch.nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % BLOCK))
    reference.hadamard(flat)
    return flat.view(-1, BLOCK)


@pytest.mark.parametrize("subtract", [1.0, 0.25])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_parameter_against_the_paper(exchange: str, subtract: float) -> None:
    """Two ranks and exact values, step by step, in plain torch. The ring's leaders send the same coefficients from both
    ranks, the gather every rank's own."""
    model = torch.nn.Linear(64, 48, bias=False)
    values = "fp32" if exchange == "ring" else "fp32-gather"
    options = dict(density=1 / 32, values=values, exchange=exchange, decay=0.9, subtract=subtract)
    world, ranks = replicas(2, DeMo, model=model, **options)
    momenta = [torch.zeros(12, BLOCK) for _ in ranks]
    for step in range(6):
        grads = [gradients(r.model, seed=100 * step + r.rank)[0] for r in ranks]
        momenta = [m * 0.9 + coefficients(g) for m, g in zip(momenta, grads, strict=True)]
        applied = together(world, ranks, [[g.clone()] for g in grads])
        # Which coefficients were sent: those that have left the momentum, or a share of them.
        after = [coefficients(r.compression.residual("weight")) for r in ranks]
        sent = [(a - m).abs() > 1e-4 for a, m in zip(after, momenta, strict=True)]
        largest = [torch.zeros_like(sent[0]).scatter_(1, m.abs().topk(8).indices, True) for m in momenta]
        if exchange == "gather":
            assert equal(sent, largest)
        else:
            assert torch.equal(*sent) and not (sent[0] & ~(largest[0] | largest[1])).any()
            assert (sent[0].sum(1) >= 4).all() and (sent[0].sum(1) <= 8).all(), "4 slots for each leader, some shared"
        mean = sum(m * s for m, s in zip(momenta, sent, strict=True)) / 2
        want = coefficients(mean).view(48, 64)
        clear = want.abs() > 1e-4
        assert clear.float().mean() > 0.95
        for result in applied:
            assert torch.equal(result[0][clear], want.sign()[clear])
        momenta = [torch.where(s, m * (1 - subtract), m) for m, s in zip(momenta, sent, strict=True)]
        for momentum, held in zip(momenta, after, strict=True):
            torch.testing.assert_close(held, momentum, rtol=0, atol=1e-5)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("options", [{}, dict(exchange="gather"), dict(values="range8"), dict(density=1.0)], ids=str)
def test_a_share_of_what_is_sent_leaves_the_momentum(options: dict, host: str) -> None:
    """With quantization errors: sum of (held before + gradient) = ranks * subtract * applied + sum of held after."""
    method = partial(DeMo, sign=False, decay=1.0, subtract=0.25, **{**SMALL, **options})
    world, ranks = replicas(3, method, host=host)
    for step in range(4):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        before = [residuals(r) for r in ranks]
        given = [sum(g.double() for g in of_all) for of_all in zip(*grads, strict=True)]
        applied = together(world, ranks, grads, shuffle=step)
        assert all(equal(applied[0], other) for other in applied)
        after = [residuals(r) for r in ranks]
        for (name, p), got, total in zip(ranks[0].model.named_parameters(), applied[0], given, strict=True):
            if compressed(p):
                change = sum(b[name] - a[name] for b, a in zip(before, after, strict=True)) + total
                torch.testing.assert_close(0.25 * 3 * got.double(), change, rtol=0, atol=1e-4)


def test_uncompressed_gradients_are_signs_of_a_momentum() -> None:
    world, ranks = replicas(2, DeMo, dense_momentum=0.5)
    velocity = None
    for step in range(4):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        means = [(a + b) / 2 for a, b in zip(*grads, strict=True)]
        velocity = means if velocity is None else [v * 0.5 + g for v, g in zip(velocity, means, strict=True)]
        applied = together(world, ranks, [[g.clone() for g in mine] for mine in grads])
        for p, got, want in zip(ranks[0].model.parameters(), applied[0], velocity, strict=True):
            if not compressed(p):
                assert torch.equal(got, want.sign())


@pytest.mark.parametrize("options", VARIANTS)
def test_what_is_not_finite_reaches_all_ranks_and_no_momentum(options: dict) -> None:
    world, ranks = replicas(2, DeMo, **options, **SMALL)
    random_steps(world, ranks, range(2))
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    for grad in grads[1]:
        grad[(0,) * grad.dim()] = float("inf")
    applied = together(world, ranks, grads)
    for p, one, other in zip(ranks[0].model.parameters(), *applied, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert one.isnan().all() if compressed(p) else not one.isfinite().all()
    later = random_steps(world, ranks, range(3, 5))
    assert all(grad.isfinite().all() for grad in later[0]) and equal(*later)


class Scaler:
    def get_scale(self) -> float:
        return 1024.0


@pytest.mark.parametrize("options", [{}, dict(orthogonal=True), dict(subtract=0.25)], ids=str)
def test_signs_are_scaled_and_a_discarded_step_returns(options: dict) -> None:
    """Signs times the loss scale, momentum in unscaled units."""
    options = {"values": "fp32", **options}
    world, ranks = replicas(2, DeMo, grad_scaler=Scaler(), **options)
    plain_world, plain = replicas(2, DeMo, **options)
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    applied = together(world, ranks, [[g * 1024.0 for g in mine] for mine in grads])
    wanted = together(plain_world, plain, [[g.clone() for g in mine] for mine in grads])
    assert equal(applied[0], [grad * 1024.0 for grad in wanted[0]])
    for name, p in ranks[0].model.named_parameters():
        if compressed(p):
            assert torch.equal(ranks[0].compression.residual(name), plain[0].compression.residual(name))
    ranks[0].compression.discard_step()
    for (name, p), grad in zip(ranks[0].model.named_parameters(), grads[0], strict=True):
        if compressed(p):
            torch.testing.assert_close(ranks[0].compression.residual(name), grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("orthogonal", [True, ["wide.weight", "wide.bias"]])
def test_orthogonal_averages(orthogonal: Any, host: str) -> None:
    """In place of the signs of compressed gradients; of the same averages as without the sign."""
    world, ranks = replicas(3, partial(DeMo, orthogonal=orthogonal, decay=0.9, **SMALL), host=host)
    other_world, others = replicas(3, partial(DeMo, sign=False, decay=0.9, **SMALL), host=host)
    for step in range(3):
        results = random_steps(world, ranks, range(step, step + 1))
        assert all(equal(results[0], result) for result in results)
        averages = random_steps(other_world, others, range(step, step + 1))[0]
        for (name, p), got, average in zip(ranks[0].model.named_parameters(), results[0], averages, strict=True):
            if compressed(p) and (orthogonal is True or name in orthogonal):
                want = average.clone()
                orthogonalize(want, 1.0)
                assert torch.equal(got, want)
            else:
                assert set(got.unique().tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("orthogonal", [False, True])
def test_it_trains_without_another_momentum(orthogonal: bool) -> None:
    world, ranks = replicas(2, partial(DeMo, orthogonal=orthogonal), model=toy_model())
    losses = train(world, ranks, 300)
    assert max(losses) < 0.15  # 0.5 before
    assert equal(*(list(r.model.parameters()) for r in ranks))


@pytest.mark.parametrize(
    "build", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1)]
)
def test_refuses_a_second_momentum(build) -> None:
    world, ranks = replicas(2, DeMo)
    random_steps(world, ranks, range(1))
    with pytest.raises(ValueError, match="momentum would count twice: DeMo has one"):
        build(ranks[0].model.parameters()).step()
    with pytest.raises(ValueError, match="momentum is what was not sent"):
        ranks[0].compression.take_momentum(torch.optim.SGD(ranks[0].model.parameters(), lr=0.1, momentum=0.9))


class Signs(TernGrad):
    """A method of one's own that says that its averages are signs."""

    @property
    def traits(self):
        return replace(super().traits, fixed_size=True)


def test_a_method_of_ones_own_with_signs_refuses_a_second_momentum() -> None:
    world, ranks = replicas(2, Signs)
    random_steps(world, ranks, range(1))
    with pytest.raises(ValueError, match="momentum would count twice"):
        torch.optim.SGD(ranks[0].model.parameters(), lr=0.1, momentum=0.9).step()


@pytest.mark.parametrize("orthogonal", [False, True])
def test_warns_of_clipped_signs(orthogonal: bool) -> None:
    world, ranks = replicas(2, partial(DeMo, orthogonal=orthogonal))
    random_steps(world, ranks, range(1))
    torch.nn.utils.clip_grad_norm_(ranks[0].model.parameters(), 1.0)
    optimizers = [torch.optim.SGD(r.model.parameters(), lr=0.1, weight_decay=0.1) for r in ranks]
    with pytest.warns(UserWarning, match="(signs|matrices) after the exchange, and their largest entry is 0.0"):
        optimizers[0].step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizers[1].step()


def test_an_optimizer_that_does_not_fit_is_an_error_before_the_warning_of_clipped_signs() -> None:
    world, ranks = replicas(2, DeMo)
    random_steps(world, ranks, range(1))
    torch.nn.utils.clip_grad_norm_(ranks[0].model.parameters(), 1.0)
    optimizer = torch.optim.SGD(ranks[0].model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="momentum would count twice"):
            optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.warns(UserWarning, match="signs after the exchange, and their largest entry is 0.0"):
        optimizer.step()


def test_no_warning_before_the_exchange() -> None:
    """Horovod's optimizer begins its step with this rank's own gradients, and a job that is resumed has steps."""
    world, ranks = replicas(2, DeMo)
    random_steps(world, ranks, range(1))
    world, again = replicas(2, DeMo)
    for old, new in zip(ranks, again, strict=True):
        new.compression.load_state_dict(old.compression.state_dict())
    optimizer = torch.optim.SGD(again[0].model.parameters(), lr=0.1)
    for p, grad in zip(again[0].model.parameters(), gradients(again[0].model, seed=1, scale=0.01), strict=True):
        p.grad = grad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    random_steps(world, again, range(1, 2))
    torch.nn.utils.clip_grad_norm_(again[0].model.parameters(), 1.0)
    with pytest.warns(UserWarning, match="signs after the exchange"):
        optimizer.step()


def test_refuses_an_optimizer_whose_gradients_are_not_signs() -> None:
    _, (rank, _) = replicas(2, DeMo)
    head = torch.nn.Linear(64, 2)
    optimizer: Any = torch.optim.SGD([*rank.model.parameters(), *head.parameters()], lr=0.1)
    optimizer._compression = object()
    with pytest.raises(ValueError, match="was not given this compressor"):
        optimizer.step()
    optimizer._compression = rank.compression
    with pytest.raises(ValueError, match="2 of the optimizer's parameters were not given"):
        optimizer.step()
    head.requires_grad_(False)
    optimizer.step()


def test_other_dtypes_are_computed_in_float32() -> None:
    """Tiny float16 gradients keep their signs."""
    model = mixed_model().to(torch.float16)
    options = dict(orthogonal=["wide.weight"], values="fp32", density=1.0)
    world, ranks = replicas(2, partial(DeMo, **options), model=model)
    signs_world, signs = replicas(2, partial(DeMo, values="fp32", density=1.0), model=model)
    grads = [[g * 1e-6 for g in gradients(r.model, seed=r.rank)] for r in ranks]
    applied = together(world, ranks, [[g.clone() for g in mine] for mine in grads])
    other = together(signs_world, signs, [[g.clone() for g in mine] for mine in grads])
    for (name, _), got, want in zip(ranks[0].model.named_parameters(), applied[0], other[0], strict=True):
        if name != "wide.weight":
            assert torch.equal(got, want), name
    got, again = applied[0][list(dict(ranks[0].model.named_parameters())).index("wide.weight")], None
    again = sum(mine[list(dict(model.named_parameters())).index("wide.weight")].float() for mine in grads) / 2
    orthogonalize(again, 1.0)
    torch.testing.assert_close(got.float(), again, rtol=0, atol=2e-2)


def test_sparse_gradients_have_no_sign() -> None:
    _, (rank,) = replicas(1, DeMo)
    with pytest.raises(ValueError, match="sparse gradients have no sign"):
        rank.compression.passed(torch.eye(3).to_sparse())


def test_ranks_must_agree_on_orthogonal_parameters() -> None:
    """A list of names is compared, too."""
    world = ThreadWorld(2)

    def begin(rank: int) -> None:
        mine = Rank(world, rank, mixed_model(), DeMo, orthogonal=[["wide.weight"], ["deep.weight"]][rank])
        mine.exchange(gradients(mine.model, seed=0))

    with pytest.raises(RuntimeError, match=r"orthogonal: 1 parameters, checksum .* on rank 0; 1 .* on rank 1"):
        world.run(begin)


IDLE = [*VARIANTS, dict(density=1.0), dict(density=0.2, exchange="gather"), dict(budget_interval=2)]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("options", IDLE, ids=str)
def test_what_no_rank_has_a_gradient_for_does_not_move(options: dict, host: str) -> None:
    """Compressed or not, alone in its bucket or not; it keeps its momentum, and moves if one rank has a gradient."""
    world, ranks = replicas(2, DeMo, host=host, decay=1.0, **options, **SMALL)
    random_steps(world, ranks, range(3))
    names = [name for name, _ in ranks[0].model.named_parameters()]
    idle = [names.index(name) for name in ("conv.weight", "wide.weight", "wide.bias")]
    held = [{names[n]: r.compression.residual(names[n]) for n in idle} for r in ranks]
    for step in range(10, 14):
        grads = [gradients(r.model, seed=step * 10 + r.rank) for r in ranks]
        for n, grad in ((n, grad) for n in idle for grad in grads):
            grad[n] = torch.zeros_like(grad[n]) if step % 2 else None  # used on no rank, or frozen
        applied = together(world, ranks, grads, shuffle=step)
        for number, grad in enumerate(applied[0]):
            assert bool(grad.any()) == (number not in idle), names[number]
    for rank, before in zip(ranks, held, strict=True):
        for name, residual in before.items():
            torch.testing.assert_close(rank.compression.residual(name), residual, rtol=0, atol=1e-4)
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    for n in idle:
        grads[0][n] = None
    applied = together(world, ranks, grads)
    assert equal(*applied) and all(applied[0][n].any() for n in idle)


def test_matrices_are_all_compressed_parameters_but_embeddings() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False))
    model.add_module("head", torch.nn.Linear(32, 64, bias=False))
    model.head.weight = model[0].weight  # tied
    collectives = ThreadWorld(1).collectives(0)
    found = DeMo(model, orthogonal="matrices", collectives=collectives).options()
    assert found == DeMo(model, orthogonal=["1.weight"], decay=0.95, subtract=0.2, collectives=collectives).options()
    others = DeMo(model, orthogonal=True, collectives=collectives).options()
    assert (others["decay"], others["subtract"]) == (0.999, 1.0)
    with pytest.raises(ValueError, match="needs the model"):
        DeMo(model.named_parameters(), orthogonal="matrices", collectives=collectives)
    with pytest.raises(TypeError, match='must be a bool, "matrices" or a list of names'):
        DeMo(model, orthogonal="weight", collectives=collectives)
