"""NoCompression: the averages of a plain allreduce to the last bit, under both hosts and in local steps."""

import functools
import operator

import pytest
import torch
from harness import HOSTS, random_steps, replicas, together
from models import equal, gradients, mixed_model

from hvd_compress import IWP, NoCompression
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.collectives import ring_bytes

on_both_hosts = pytest.mark.parametrize("host", HOSTS)
on_both_values = pytest.mark.parametrize(("values", "sent"), [("fp32", torch.float32), ("fp16", torch.float16)])


def averages(grads, sent):
    """Of every gradient, summed in the order of the ranks in the dtype ``sent``, as threads do."""
    return [
        (functools.reduce(operator.add, [g.to(sent) for g in each]) * (1.0 / len(each))).to(each[0].dtype)
        for each in zip(*grads, strict=True)
    ]


@on_both_hosts
@on_both_values
@pytest.mark.parametrize("size", [1, 3])
def test_averages_are_those_of_a_plain_allreduce_to_the_last_bit(size, values, sent, host):
    world, ranks = replicas(size, NoCompression, host=host, values=values)
    for step in range(3):
        grads = [gradients(r.model, seed=10 * step + r.rank) for r in ranks]
        want = averages(grads, sent)
        for applied in together(world, ranks, grads, shuffle=step):
            assert equal(applied, want)


@on_both_hosts
@pytest.mark.parametrize("values, width", [("fp32", 4), ("fp16", 2)])
def test_bytes_are_those_of_a_ring_allreduce(values, width, host):
    world, ranks = replicas(3, NoCompression, host=host, values=values)
    random_steps(world, ranks, range(4))
    entries = sum(p.numel() for p in ranks[0].model.parameters())
    stats = ranks[0].compression.stats()
    weights = len([*ranks[0].model.parameters()])  # compared in two of the four steps: two numbers of each
    for part, steps, compared in ((stats["last"], 1, 0), (stats["total"], 4, 2)):
        # Under DDP, each bucket's sum is made of three equal parts.
        padding = 0.0 if host == "horovod" else 3 * 2 * 4 / 3 * width * steps
        whole = pytest.approx(steps * ring_bytes("allreduce", width * entries, 3), rel=1e-12, abs=padding)
        assert part["budget_bytes"] == compared * ring_bytes("allgather", 16 * weights, 3)
        assert part["wire_bytes"] - part["budget_bytes"] == whole and part["dense_tensor_bytes"] == whole
        assert part["dense_bytes"] == pytest.approx(steps * ring_bytes("allreduce", 4 * entries, 3), rel=1e-12)
    assert stats["last"]["wire_ratio"] == pytest.approx(4 / width, rel=1e-6 if host == "horovod" else 1e-3)
    assert stats["steps"] == 4 and stats["residual_norm"] == 0.0


def test_horovod_averages_each_gradient_itself():
    """The compressor starts no collective of its own after the first steps' comparisons of the ranks."""
    world, ranks = replicas(2, NoCompression)
    random_steps(world, ranks, [0, 1])
    seen = spy(ranks[0])
    random_steps(world, ranks, [2])
    assert sorted(seen) == sorted(f"horovod.2.{number}" for number in range(9))


def test_ddp_has_one_sum_for_each_of_its_buckets():
    """Each starts in its bucket's hook; the answers follow in the last one."""
    world, ranks = replicas(2, NoCompression, host="ddp")
    random_steps(world, ranks, [0, 1])
    seen, finish, after = spy(ranks[0]), ranks[0].compression.engine.finish, []
    ranks[0].compression.engine.finish = lambda: after.append(len(seen)) or finish()
    buckets = len(ranks[0].buckets(gradients(ranks[0].model, 0), shuffle=2))
    random_steps(world, ranks, [2])
    assert len(seen) == 2 * buckets > 4 and after == [buckets]


def spy(rank):
    """The names of the collectives that a rank starts."""
    seen, start = [], rank.collectives.start

    def noted(request, name):
        seen.append(name)
        return start(request, name)

    rank.collectives.start = noted
    return seen


@on_both_hosts
def test_float16_is_of_unscaled_gradients(host):
    """A loss scale of 65536 would leave float16 no range."""
    world = ThreadWorld(2, ordered=host == "ddp")
    kind = type(replicas(1, NoCompression, host=host)[1][0])
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    ranks = [kind(world, r, mixed_model(), NoCompression, values="fp16", grad_scaler=scaler) for r in range(2)]
    grads = [[torch.full_like(p, (3.0 + r.rank) * 65536.0) for p in r.model.parameters()] for r in ranks]
    for applied in together(world, ranks, grads):
        assert all((g == 3.5 * 65536.0).all() for g in applied)


@on_both_values
def test_other_dtypes(values, sent):
    dtypes = (torch.float64, torch.complex64, torch.bfloat16, torch.float16)
    model = torch.nn.ParameterList(torch.zeros(40, 40, dtype=dtype) for dtype in dtypes)
    world, ranks = replicas(2, NoCompression, model=model, values=values)
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in r.model.parameters()] for r in ranks]
    double, pairs, brain, half = zip(*grads, strict=True)
    (real,) = averages([[torch.view_as_real(g)] for g in pairs], sent)
    want = [
        *averages([[g] for g in double], torch.float64),
        torch.view_as_complex(real),
        *averages([[g] for g in brain], sent),
        *averages([[g] for g in half], torch.float16),
    ]
    for applied in together(world, ranks, grads):
        assert [g.dtype for g in applied] == list(dtypes)
        assert equal(applied, want)


def test_repr_has_the_option_and_no_compressed_tensor():
    text = repr(replicas(1, NoCompression, values="fp16", seed=3)[1][0].compression)
    assert text == "NoCompression(values='fp16'; 0 of 9 tensors compressed (0 of 20,939 entries), 0 buckets)"


def test_a_method_says_which_parameters_it_compresses():
    class Square(IWP):
        def compresses(self, parameter):
            return parameter.shape[0] == parameter.shape[1]

    world, ranks = replicas(2, Square)
    assert [piece.name for bucket in ranks[0].compression.buckets for piece in bucket.pieces] == ["deep.weight"]
    grads = [gradients(r.model, seed=r.rank) for r in ranks]
    want = averages(grads, torch.float32)
    for (name, _), got, mean in zip(
        mixed_model().named_parameters(), together(world, ranks, grads)[0], want, strict=True
    ):
        assert torch.equal(got, mean) == (name != "deep.weight")
