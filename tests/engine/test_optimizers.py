"""What a compressor checks before an optimizer's steps."""

import copy
import gc
import time
import weakref

import pytest
import torch
from harness import single
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine import optimizers


def test_a_deleted_compressor_no_longer_watches_its_parameters():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    gone = weakref.ref(compression)
    del compression
    assert gone() is None


def test_a_second_optimizer_raises_an_error():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    compression = single(model)
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    first.step()
    first.step()
    with pytest.raises(ValueError, match="serves a SGD already and a second optimizer"):
        second.step()
    del compression
    gc.collect()
    second.step()


def test_a_compressor_can_be_garbage_collected_during_an_optimizer_step():
    compression = single()
    gone = weakref.ref(compression)
    kept = [compression]
    del compression

    def collect(*_):
        kept.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)
    _kept = single()  # a hook that torch calls after `collect`
    try:
        torch.optim.SGD(torch.nn.Linear(64, 64).parameters(), lr=0.1).step()
    finally:
        handle.remove()
    assert gone() is None


def test_an_optimizer_of_other_parameters_is_ignored():
    model, other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    compression = single(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert compression.stats()["steps"] == 0


def test_parameters_outside_the_compressor_cause_a_warning():
    model, head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    compression = single(model)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    optimizer._compression = compression
    with pytest.warns(UserWarning, match="2 of the optimizer's parameters were not given to this compressor"):
        optimizer.step()


def test_a_compressor_of_a_copy_of_the_model_raises_an_error():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    optimizer._compression = compression
    with pytest.raises(ValueError, match="holds none of its compressor's parameters"):
        optimizer.step()
    with pytest.raises(TypeError, match="build a new compressor for the copy"):
        copy.deepcopy(compression)


def test_horovods_optimizer_and_the_one_it_wraps_count_as_one():
    """hvd.broadcast_optimizer_state() steps the wrapped optimizer; both share their parameter groups."""
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.step()
    wrapper = torch.optim.SGD(plain.param_groups, lr=0.1)
    assert wrapper.param_groups[0] is plain.param_groups[0]
    wrapper.step()
    assert compression.stats()["steps"] == 0
    wrapper.load_state_dict(wrapper.state_dict())
    assert wrapper.param_groups[0] is not plain.param_groups[0]
    wrapper.step()
    plain.step()


def test_compressors_that_are_built_in_several_threads_all_watch_their_optimizers(monkeypatch):
    def slow():
        """A reference to a compressor that is gone; the other threads run meanwhile."""
        time.sleep(0.05)

    monkeypatch.setattr(optimizers, "_watching", (slow,))
    built = ThreadWorld(3).run(lambda _: single())
    watched = [reference() for reference in optimizers._watching]
    assert len(watched) == 3 and {*map(id, watched)} == {*map(id, built)}
