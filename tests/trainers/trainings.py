"""Trains with each trainer, in this rank: trainings.py FOLDER TRAINER... Started by test_trainers.py on two ranks."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from problem import PERIOD, SAVED, STEPS, equal_on_all_ranks, flat, net, optimizers, plain
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import hvd_compress
from hvd_compress.guards.averaging import ddp_averages as averages
from hvd_compress.trainers import rank_files
from hvd_compress.trainers.training import Training

LOCAL = (hvd_compress.recipes.low_bit, {"period": PERIOD})
EACH_STEP = (hvd_compress.Quantized, {"bits": 2})


def trains_as_a_plain_loop(train, folder, build, options):
    """The same weights on all ranks, those of a loop without a trainer; and resumed, again."""
    model, used, steps, logged = train(folder, build, options)
    whole = flat(model)
    # DDP gives rank 0's buffers to all before the next forward pass.
    same = whole if used.training.local is not None else parameters_to_vector(model.parameters()).detach()
    assert steps == STEPS and equal_on_all_ranks(same)
    assert not equal_on_all_ranks(torch.stack([x for x, _ in model.batches]).flatten()), "the ranks have one data set"
    assert torch.equal(whole, plain(model.batches, build, options))
    assert used.compression.stats()["total"]["wire_ratio"] > 4
    if distributed.get_rank() == 0:
        assert logged["hvd_compress/total_wire_bytes"] > 0
    count = len(model.batches)
    model, used, steps, _ = train(folder, build, options, resume=True)
    assert steps == STEPS and len(model.batches) == count * (STEPS - SAVED) // STEPS
    assert torch.equal(whole, flat(model)), "training differs after resuming"


def raises_errors_on_all_ranks(folder):
    """Without a trainer."""
    model, wrapped = net(), net()
    ddp = DistributedDataParallel(wrapped)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    local, step = Training(*LOCAL), Training(*EACH_STEP)
    with pytest.raises(RuntimeError, match="nothing averages the gradients"):
        step.begin(model, [optimizers(model)])
    with pytest.raises(ValueError, match="has a communication hook already"):
        step.begin(wrapped, [optimizers(wrapped)])
    ddp = DistributedDataParallel(model)
    for training in (local, step):  # one after the other, on one DDP model
        training.begin(model, [optimizers(model)])
        with pytest.raises(FileNotFoundError, match=r"missing on rank \[0, 1\]"):
            rank_files.load(training, folder)
        if training is local:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hvd_compress-0-of-3.pt").touch()
            rank_files.save(local, folder)
            distributed.barrier()
            assert len(list(folder.iterdir())) == 2, "a file of three ranks is left"
            rank_files.load(local, folder)
            distributed.barrier()
            if distributed.get_rank() == 1:
                (folder / "hvd_compress-1-of-2.pt").unlink()
            with pytest.raises(FileNotFoundError, match=r"missing on rank \[1\]"):
                rank_files.load(local, folder)
            rank_files.save(local, folder)
            distributed.barrier()
            states = [torch.load(file, weights_only=True) for file in sorted(folder.iterdir())]
            distributed.barrier()
            [file.unlink() for file in folder.iterdir() if distributed.get_rank() == 0]
            distributed.barrier()
    with pytest.raises(ValueError, match="saved with local steps"):
        step.load(2, states.__getitem__)


def gradients_stay_local():
    """Also where the program says that DDP is to average them."""
    model = net()
    ddp, rank = DistributedDataParallel(model, find_unused_parameters=True), distributed.get_rank()
    hvd_compress.trainers.local_gradients(ddp)
    for synchronised in (False, True):
        assert not averages(ddp)
        ddp.require_backward_grad_sync = synchronised
        model.zero_grad()
        torch.manual_seed(rank)
        inputs = torch.randn(8, 16), torch.randint(4, (8,))
        ddp(*inputs)["loss"].backward()
        loss = torch.nn.functional.cross_entropy(model.layers(inputs[0]), inputs[1])
        own = torch.autograd.grad(loss, list(model.parameters()))
        assert all(map(torch.equal, [p.grad for p in model.parameters()], own))
    assert not equal_on_all_ranks(flat(model)), "buffers were broadcast"


def averages_after_local_steps():
    """A model in DDP after a training with each method: as one that was never trained by it."""
    model, fresh = net(), net()
    ddp, other, rank = DistributedDataParallel(model), DistributedDataParallel(fresh), distributed.get_rank()
    for method in (LOCAL, EACH_STEP):
        training = Training(*method)
        training.begin(model, [optimizers(model)])
        training.end()
        torch.manual_seed(rank)
        inputs = torch.randn(8, 16), torch.randint(4, (8,))
        for wrapped in (ddp, other):
            wrapped.zero_grad()
            wrapped(*inputs)["loss"].backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
        assert equal_on_all_ranks(torch.cat([p.grad.flatten() for p in model.parameters()]))


def evaluates_and_stops(train, folder, average):
    """Local steps: all ranks evaluate the same weights, or each its own. All stop at one step."""
    model, _, steps, _ = train(folder, *LOCAL, evaluate=True, average=average)
    assert steps == 2 * SAVED and equal_on_all_ranks(flat(model))
    assert len(model.evaluated) >= 2
    assert all(equal_on_all_ranks(weights) == average for weights in model.evaluated)


folder, *trainers = sys.argv[1:]
distributed.init_process_group("gloo")
destroy, distributed.destroy_process_group = distributed.destroy_process_group, lambda *_, **__: None
gradients_stay_local()
averages_after_local_steps()
raises_errors_on_all_ranks(Path(folder, "errors"))
for name in trainers:
    train, place = import_module(f"with_{name}").train, Path(folder, name)
    for case, function, arguments in (
        ("local steps", trains_as_a_plain_loop, LOCAL),
        ("each step", trains_as_a_plain_loop, EACH_STEP),
        ("evaluation of the average", evaluates_and_stops, (True,)),
        ("evaluation of each rank", evaluates_and_stops, (False,)),
    ):
        function(train, place / case, *arguments)
        print(f"rank {distributed.get_rank()} ok {name}: {case}\n", end="", flush=True)  # in one piece
        distributed.barrier()
destroy()
