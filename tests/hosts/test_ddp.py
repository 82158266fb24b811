"""DistributedDataParallel's hook, without processes."""

import gc
import linecache
import warnings
import weakref
from functools import partial

import pytest
import torch
from harness import DDPRank, FakeBucket, in_backward, random_steps, replicas, residuals, together
from methods import METHODS, SMALL, TRAINED, WITHOUT_RESIDUAL
from models import compressed, equal, gradients, mixed_model
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hvd_compress import IWP, QSGD, LocalSteps, ddp_hook
from hvd_compress.carriers.threads import ThreadWorld

ddp = partial(replicas, host="ddp")


def test_a_call_outside_of_backward_raises_an_error():
    """So DDP's join() calls a hook."""
    _, (rank,) = ddp(1, IWP)
    bucket = rank.buckets(gradients(rank.model, 0))[0]
    with pytest.raises(RuntimeError, match=r"does not support DistributedDataParallel.join\(\)"):
        ddp_hook(rank.compression, bucket)
    assert not rank.compression.engine.clock.collecting


def test_a_compressor_of_one_host_cannot_be_used_with_the_other():
    _, (rank,) = ddp(1, IWP)
    with pytest.raises(RuntimeError, match=r"bound to torch\.distributed"):
        rank.compression.compress(torch.zeros(64, 64))
    _, (other,) = replicas(1, IWP)
    with pytest.raises(RuntimeError, match="bound to Horovod"):
        ddp_hook(other.compression, None)


def _step_without_hook(rank):
    """One optimizer step with gradients that no hook has passed on. Returns its warnings."""
    for p in rank.model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return caught


def test_a_forgotten_hook_is_one_warning_that_points_at_the_users_line():
    _, (rank,) = ddp(1, IWP)
    (warning,) = _step_without_hook(rank)
    assert warning.filename == __file__
    assert "optimizer.step()" in linecache.getline(__file__, warning.lineno)
    assert "IWP: SGD steps, but this compressor has received no gradient: is model.register" in str(warning.message)


def test_a_forgotten_hook_is_a_warning_after_a_checkpoint_was_loaded():
    world, (saved,) = ddp(1, IWP)
    random_steps(world, [saved], range(2))
    _, (rank,) = ddp(1, IWP)
    rank.compression.load_state_dict(saved.compression.state_dict())
    assert rank.compression.step == 2
    (warning,) = _step_without_hook(rank)
    assert "is model.register_comm_hook(compression, hvd_compress.ddp_hook) missing?" in str(warning.message)


def test_the_creation_of_optimizer_state_is_not_a_forgotten_hook():
    """torch.distributed.checkpoint takes a step with gradients and learning rate 0."""
    world, (rank,) = ddp(1, QSGD)
    optimizer = torch.optim.Adam(rank.model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        get_optimizer_state_dict(rank.model, optimizer)
        assert optimizer.state
        random_steps(world, [rank], range(1))
        optimizer.step()


@pytest.mark.parametrize(("lr", "gradient"), [(0.0, 1.0), (torch.tensor(0.0), 1.0), (0.1, 0.0), (0.1, None)])
def test_a_step_that_applies_no_gradient_needs_no_hook(lr, gradient):
    _, (rank,) = ddp(1, IWP)
    for p in rank.model.parameters():
        p.grad = None if gradient is None else torch.full_like(p, gradient)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert len(_step_without_hook(rank)) == 1


def test_local_steps_need_no_hook():
    _, (rank,) = ddp(1, IWP)
    optimizer = torch.optim.SGD(rank.model.parameters(), lr=0.1)
    local = LocalSteps(rank.compression, optimizer, period=2)
    for p in rank.model.parameters():
        p.grad = torch.ones_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            optimizer.step()
            local.step()


def test_no_future_is_completed_before_the_last_hook():
    """And every bucket's future has the bucket's own buffer, all of which is averaged."""
    _, (rank,) = ddp(1, IWP, density=1.0, values="fp32")
    buckets, futures = rank.buckets(gradients(rank.model, 1), shuffle=3), []
    before = [bucket.flat.clone() for bucket in buckets]
    assert len(buckets) > 2

    def hooks():
        for bucket in buckets:
            assert not any(future.done() for future in futures)
            futures.append(ddp_hook(rank.compression, bucket))

    in_backward(hooks)
    for bucket, future, given in zip(buckets, futures, before, strict=True):
        assert future.value() is bucket.flat
        torch.testing.assert_close(bucket.flat, given, rtol=1e-6, atol=1e-6)


def _one_bucket(rank, grads, shuffle=None):
    given = list(rank.model.parameters())
    flat = torch.cat([g.as_strided((g.numel(),), (1,)) for g in grads])
    return [FakeBucket(0, given, flat, True)]


def test_a_16_bit_gradient_outside_the_compressor_beside_dense_ones():
    """In one bucket of DDP all have one dtype; dense bfloat16 payloads are float32."""

    def build(named, **options):
        return IWP([(n, p) for n, p in named if not n.startswith("deep")], **options)

    world, ranks = ddp(2, build, model=mixed_model().bfloat16(), density=1 / 16)
    for r in ranks:
        r.buckets = partial(_one_bucket, r)
    grads = [gradients(r.model, r.rank) for r in ranks]
    means = [((a.float() + b.float()) / 2).bfloat16() for a, b in zip(*grads, strict=True)]
    with pytest.warns(UserWarning, match=r"shape \(64, 64\) belongs to none of this compressor's parameters"):
        applied = together(world, ranks, grads)
    assert equal(*applied)
    for p, got, want in zip(ranks[0].model.parameters(), applied[0], means, strict=True):
        if not compressed(p) or p.shape == (64, 64):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def _interrupted(rank, grads, hooks):
    """A backward that fails after so many hooks."""
    buckets = rank.buckets(grads)
    assert len(buckets) > hooks

    def body():
        for bucket in buckets[:hooks]:
            ddp_hook(rank.compression, bucket)
        raise ConnectionError("backward failed")

    with pytest.raises(ConnectionError):
        in_backward(body)


@pytest.mark.parametrize("name", TRAINED)
def test_a_backward_that_fails_between_hooks_does_not_disturb_the_next_step(name):
    """Its gradients that were accumulated stay in the residual; no collective is left over."""
    world, ranks = ddp(2, METHODS[name], **SMALL)
    random_steps(world, ranks, range(2))
    before = [residuals(r) for r in ranks]
    failed = [gradients(r.model, 70 + r.rank) for r in ranks]
    for rank, grads in zip(ranks, failed, strict=True):
        _interrupted(rank, grads, hooks=1)  # of one parameter, whose bucket of the engine is not full
    grads = [gradients(r.model, 80 + r.rank) for r in ranks]
    given = [[g.double().clone() for g in grad] for grad in grads]
    applied = together(world, ranks, grads)
    assert equal(*applied)
    if name in WITHOUT_RESIDUAL:
        return
    taken = {id(p) for p in ranks[0].buckets(failed[0])[0].parameters()}
    for number, (key, p) in enumerate(ranks[0].model.named_parameters()):
        if compressed(p):
            total = sum(b[key] for b in before) + sum(g[number] for g in given)
            if id(p) in taken:
                total = total + sum(g[number].double() for g in failed)
            got = 2 * applied[0][number].double() + sum(residuals(r)[key] for r in ranks)
            # PowerSGD's sums are rounded to float16.
            torch.testing.assert_close(got, total, rtol=0, atol=1e-2 if name == "powersgd" else 1e-4)


@pytest.mark.parametrize("broken", ["dense", ".0.step", ".1.step"])
def test_the_next_step_works_after_a_collective_that_could_not_be_started(broken):
    world, (rank,) = ddp(1, METHODS["iwp-fp32"], **SMALL)
    random_steps(world, [rank], range(2))
    start = rank.collectives.start

    def failing(request, name):
        if broken in name:
            raise ConnectionError("the network is gone")
        return start(request, name)

    rank.collectives.start = failing
    with pytest.raises(ConnectionError):
        together(world, [rank], [gradients(rank.model, 50)])
    rank.collectives.start = start
    applied = random_steps(world, [rank], range(2, 4))
    assert all(g.isfinite().all() for g in applied[0])
    assert rank.compression.stats()["steps"] == 4


def test_exchanges_are_resumed_in_one_order_on_all_ranks():
    """Although the ranks are not equally fast: ThreadWorld(ordered=True) raises an error for different orders."""
    world, ranks = ddp(3, METHODS["iwp"], bucket_mb=0.02)
    assert len(ranks[0].compression.buckets) > 2
    names = [[] for _ in ranks]
    for rank, seen in zip(ranks, names, strict=True):
        rank.collectives.start = partial(_recorded, seen, rank.collectives.start)
    random_steps(world, ranks, range(3))
    assert names[0] == names[1] == names[2] and len(names[0]) > 12


def _recorded(seen, start, request, name):
    seen.append(name)
    return start(request, name)


def test_a_gradient_in_another_memory_order_than_its_parameter():
    """DDP's views may be contiguous although the parameter is channels_last."""
    model = torch.nn.Conv2d(8, 33, 3, bias=False).to(memory_format=torch.channels_last)
    world, ranks = ddp(2, IWP, model=model, density=1.0, values="fp32")

    class Contiguous(FakeBucket):
        def gradients(self):
            return [self.flat.view(p.shape) for p in self.given]

    given = [torch.randn(33, 8, 3, 3) for _ in ranks]

    def body(i):
        rank = ranks[i]
        bucket = Contiguous(0, list(rank.model.parameters()), given[i].flatten().clone(), True)
        in_backward(lambda: ddp_hook(rank.compression, bucket))
        return bucket.flat.view(33, 8, 3, 3)

    for result in world.run(body):
        torch.testing.assert_close(result, (given[0] + given[1]) / 2)


def test_a_compressor_keeps_no_reference_to_ddps_buffers():
    _, (rank,) = ddp(1, IWP, density=1 / 16)
    buckets = rank.buckets(gradients(rank.model, 0))
    seen = [weakref.ref(bucket.flat) for bucket in buckets]
    in_backward(partial(_call_hooks, rank.compression, buckets))
    del buckets
    gc.collect()
    assert all(ref() is None for ref in seen)


def _call_hooks(compression, buckets):
    for bucket in buckets:
        ddp_hook(compression, bucket)


def test_a_second_step_of_a_parameter_without_the_last_hook_raises_an_error():
    """Two backward passes that both call hooks for a part of the buckets."""
    _, (rank,) = ddp(1, IWP, density=1 / 16)
    buckets = rank.buckets(gradients(rank.model, 0))
    numbered = [FakeBucket(1, b.given, b.flat, False) for b in buckets[:1]] * 2
    with pytest.raises(RuntimeError, match="compressed twice in one step"):
        in_backward(lambda: [ddp_hook(rank.compression, bucket) for bucket in numbered])


def test_ddp_rank_divides_the_parameters_differently_in_every_step():
    """Without it, the invariants would not test re-bucketing."""
    rank = DDPRank(ThreadWorld(1, ordered=True), 0, mixed_model(), IWP)
    grads = gradients(rank.model, 0)
    divisions = {tuple(tuple(map(id, b.parameters())) for b in rank.buckets(grads, shuffle=i)) for i in range(5)}
    assert len(divisions) == 5


@pytest.mark.parametrize("hooks", [1, 2])
def test_a_step_ends_with_backward_if_ddp_skips_the_last_buckets(hooks):
    """``skip_all_reduce_unused_params``: no rank has used their parameters."""
    world, ranks = ddp(2, IWP, density=1.0, values="fp32")
    given = [[g.clone() for g in gradients(r.model, r.rank)] for r in ranks]
    for rank in ranks:
        rank.compression.clock._skips = True

    def body(i):
        buckets, futures = ranks[i].buckets([g.clone() for g in given[i]])[:hooks], []
        assert not buckets[-1].is_last()
        in_backward(lambda: futures.extend(ddp_hook(ranks[i].compression, bucket) for bucket in buckets))
        assert all(future.done() for future in futures)
        return buckets

    for _ in range(2):
        numbers = {id(p): number for number, p in enumerate(ranks[0].model.parameters())}
        for bucket in world.run(body)[0]:
            for p, average in zip(bucket.parameters(), bucket.gradients(), strict=True):
                want = (given[0][numbers[id(p)]] + given[1][numbers[id(p)]]) / 2
                torch.testing.assert_close(average, want, rtol=0, atol=1e-5)
        assert ranks[0].compression.engine.clock.collecting is False


def test_a_bucket_that_its_parameters_do_not_cover_raises_an_error():
    """As a future torch may lay it out, and as one that takes complex gradients for real ones would see it."""
    _, (rank,) = ddp(1, IWP)
    bucket = FakeBucket(0, [rank.model.deep.weight], torch.zeros(2 * 64 * 64), True)
    with pytest.raises(RuntimeError, match=r"has 8192 entries, and its parameters 4096"):
        in_backward(lambda: ddp_hook(rank.compression, bucket))


@pytest.mark.parametrize("number", [0, 4, -1])
def test_an_average_that_comes_back_in_a_gradient_raises_an_error(number):
    """Of any parameter, in every step, if the method does not apply everything once."""
    _, (rank,) = ddp(1, IWP, density=1 / 16, momentum=0.9)
    parameter = list(rank.model.parameters())[number]

    def step(again):
        """Accumulates, and zeroes all gradients but perhaps one before."""
        grads = gradients(rank.model, 0)
        for p, grad in zip(rank.model.parameters(), grads, strict=True):
            if not (again and p is parameter):
                p.grad = None
            with torch.enable_grad():
                (p * grad).sum().backward()
        for bucket in (buckets := rank.buckets([p.grad for p in rank.model.parameters()])):
            assert buckets and bucket.flat.any()
        in_backward(lambda: [ddp_hook(rank.compression, bucket) for bucket in buckets])

    for _ in range(3):
        step(again=False)
    with pytest.raises(RuntimeError, match="the gradient contains the last average"):
        step(again=True)


@pytest.mark.parametrize("name", ["iwp", "fft", "topk", "powersgd", "qsgd-feedback"])
def test_a_step_that_is_dropped_keeps_the_gradients_of_a_bucket_that_is_not_full(name):
    """All gradients of one of DDP's buffers have one version, which rises when any of them is written to."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    world = ThreadWorld(1, ordered=True)
    rank = DDPRank(world, 0, model, partial(METHODS[name], bucket_mb=2 * 64 * 64 * 4 / 2**20))
    named = [list(rank.model.named_parameters())[number] for number in (3, 1, 2)]  # the second bucket lacks 0
    parameters = [p for _, p in named]
    given = [torch.randn_like(p) for p in parameters]
    buffer = torch.cat([g.flatten() for g in given])
    in_backward(lambda: ddp_hook(rank.compression, FakeBucket(0, parameters, buffer, False)))
    rank.compression.reset()
    assert not buffer.any()
    for (key, _), grad in zip(named, given, strict=True):
        torch.testing.assert_close(rank.compression.residual(key), grad, rtol=0, atol=1e-4)


def test_what_a_failed_pass_has_given_ddp_is_an_error():
    """DDP waits for it where two models have one compressor, or a pass runs inside another."""
    _, (rank,) = ddp(1, IWP)
    first, futures = rank.buckets(gradients(rank.model, 0))[0], []
    in_backward(lambda: futures.append(ddp_hook(rank.compression, first)))
    rank.exchange(gradients(rank.model, 1))
    with pytest.raises(RuntimeError, match="a backward pass failed, ended early or overlapped with another"):
        futures[0].value()


def test_sparse_gradients_raise_an_error():
    _, (rank,) = ddp(1, IWP)
    bucket = FakeBucket(0, [rank.model.deep.weight], torch.eye(64).to_sparse(), True)
    with pytest.raises(RuntimeError, match="does not support sparse gradients with DistributedDataParallel"):
        in_backward(lambda: ddp_hook(rank.compression, bucket))
