"""States in checkpoints of torch.distributed.checkpoint, in one process; fsdp_cases.py has real ranks."""

import warnings

import pytest
import torch
from harness import toy_model
from models import mixed_model
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as of_models
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from hvd_compress import IWP, DCPState, LocalSteps, TopK
from hvd_compress.carriers.threads import ThreadWorld
from hvd_compress.engine.state import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def alone(build=IWP, model=None, ordered=True, **options):
    world = ThreadWorld(1, ordered=ordered)
    return build(mixed_model() if model is None else model, collectives=world.collectives(0), **options)


def local_steps():
    model = toy_model()
    compression = alone(TopK, model, min_numel=64, density=1 / 8)
    return LocalSteps(compression, torch.optim.SGD(model.parameters(), lr=0.1), 2)


class AppState:
    """A Stateful of the user's, as in PyTorch's tutorial. ``make``: the state of the compressor."""

    def __init__(self, make):
        self.make = make

    def state_dict(self):
        return {"compression": self.make()}

    def load_state_dict(self, state):
        pass


CALLS = {
    "save": lambda state, folder: dcp.save(state, checkpoint_id=folder),
    "load": lambda state, folder: dcp.load(state, checkpoint_id=folder),
    "async_save": lambda state, folder: dcp.async_save(state, checkpoint_id=folder),
    "save_writer": lambda state, folder: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder)),
    "load_reader": lambda state, folder: dcp.load(state, storage_reader=dcp.FileSystemReader(folder)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("build", [alone, local_steps])
def test_dcp_is_refused_a_compressor_and_local_steps(call, build, tmp_path):
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    given = build()
    with pytest.raises(TypeError, match=r"give it hvd_compress\.DCPState\(compression\) in place of the compressor"):
        call({"given": given}, tmp_path)
    assert given.state_dict()["step"] == 0


@pytest.mark.parametrize("call", ["save", "async_save", "save_writer"])
def test_a_state_inside_that_of_another_object_warns(call, tmp_path):
    """Its keys may be of each rank's own, which is right."""
    compression = alone()
    with pytest.warns(UserWarning, match=r"saves one rank's state_dict\(\) for all, unless every rank") as caught:
        CALLS[call]({"app": AppState(compression.state_dict)}, tmp_path)
    assert any(warning.filename == __file__ for warning in caught)


def test_what_saves_models_and_optimizers_may_ask_for_a_state(tmp_path):
    """A module may keep the state of its compressor, and a file of each rank is right."""
    compression = alone()

    class Keeping(torch.nn.Linear):
        def get_extra_state(self):
            return compression.state_dict()

        def set_extra_state(self, state):
            pass

    model = Keeping(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        of_models.get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.save(compression.state_dict(), tmp_path / "state.pt")
        dcp.save({"app": AppState(DCPState(compression).state_dict)}, checkpoint_id=tmp_path / "app")


def test_a_state_is_of_the_compressor_or_of_its_local_steps(tmp_path):
    steps = local_steps()
    dcp.save({"local": DCPState(steps)}, checkpoint_id=tmp_path)
    others = [local_steps() for _ in range(2)]
    dcp.load({"local": DCPState(others[0])}, checkpoint_id=tmp_path)
    dcp.load({"local": DCPState(others[1].compression)}, checkpoint_id=tmp_path)
    states = [each.compression.state_dict() for each in (steps, *others)]
    assert same(states[0], states[1]) and same(states[0], states[2])


def test_frozen_parameters_are_not_in_the_checkpoint(tmp_path):
    models = [mixed_model() for _ in range(2)]
    for model in models:
        model.deep.requires_grad_(False)
    states = [DCPState(alone(model=model, momentum=0.9)) for model in models]
    for kind in ("residual", "velocity"):
        names = states[0].state_dict()["replicas"]["0"][kind]
        assert "wide.weight" in names and "deep.weight" not in names
    dcp.save({"compression": states[0]}, checkpoint_id=tmp_path)
    dcp.load({"compression": states[1]}, checkpoint_id=tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        mixed_model,
        lambda: torch.optim.SGD(mixed_model().parameters(), lr=0.1),
        lambda: alone().state_dict(),
        lambda: DCPState(alone()),
        lambda: IWP,
        lambda: None,
        lambda: alone().engine,
    ],
)
def test_what_is_no_compressor_raises_an_error(make):
    with pytest.raises(TypeError, match=r"compression must be a compressor such as hvd_compress\.IWP, got"):
        DCPState(make())


@pytest.mark.parametrize(
    ("mesh", "error", "says"),
    [
        (4, TypeError, r"such as \(2, 4\), or \(8,\) of DDP, got 4"),
        ("2 x 4", TypeError, "got '2 x 4'"),
        ((), TypeError, r"got \(\)"),
        ({2, 4}, TypeError, "got {2, 4}"),
        ((2, 0), ValueError, "saved_on must be an integer, at least 1, got 0"),
        ((2, 1.5), TypeError, "saved_on must be an integer"),
        ((True,), TypeError, "saved_on must be an integer"),
    ],
)
def test_a_mesh_that_is_none_raises_an_error(mesh, error, says):
    with pytest.raises(error, match=says):
        DCPState(alone(), saved_on=mesh)


@pytest.mark.parametrize("mesh", [(2,), (1, 1), [2, 4]])
def test_a_state_for_loading_cannot_be_saved(mesh, tmp_path):
    """Only after something was loaded."""
    state = DCPState(alone(), saved_on=mesh)
    for call in (CALLS["save"], CALLS["async_save"]):
        with pytest.raises(RuntimeError, match=r"is for loading, and nothing was loaded: to save on \(1,\)"):
            call({"compression": state}, tmp_path)
    dcp.save({"compression": state.state_dict()}, checkpoint_id=tmp_path)  # not seen
    for other in (DCPState(alone(), saved_on=mesh), DCPState(alone(), saved_on=(1,))):
        with pytest.raises((ValueError, dcp.api.CheckpointException), match="saved_on"):
            dcp.load({"compression": other}, checkpoint_id=tmp_path)


def test_a_state_that_a_planner_reads_in_part_is_of_one_mesh(tmp_path):
    """Keys that are missing are then left as they are: the mesh is compared nevertheless."""
    dcp.save({"compression": DCPState(alone())}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"must be the mesh that saved, \(1,\), and is \(2,\)$"):
        state = {"compression": DCPState(alone(), saved_on=(2,))}
        dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))


def test_a_checkpoint_of_another_method_says_nothing_of_meshes(tmp_path):
    """The keys of the mesh are there, those of the parameters are not."""
    dcp.save({"compression": DCPState(alone())}, checkpoint_id=tmp_path)
    for given in (None, (1,)):
        other = alone(model=toy_model(), min_numel=64)
        with pytest.raises(dcp.api.CheckpointException, match="Missing key") as caught:
            dcp.load({"compression": DCPState(other, saved_on=given)}, checkpoint_id=tmp_path)
        assert "saved_on" not in str(caught.value)
