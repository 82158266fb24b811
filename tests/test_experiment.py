"""The experiment scripts, without Horovod running: data, models, options, the table."""

import argparse
import importlib
import itertools
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

table = importlib.import_module("table")
compressors = importlib.import_module("experiment.compressors")
datasets = importlib.import_module("experiment.data")
models = importlib.import_module("experiment.models")
older = importlib.import_module("experiment.older")


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return datasets.load("digits")


def write_cifar(root, images=10, keys=lambda text: text.encode()):
    """A small CIFAR-10 folder; pixel values tell the file."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for index, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        rows = np.full((images, 3072), index, np.uint8)
        rows[:, :1024] = 200  # the red plane comes first
        content = {keys("data"): rows, keys("labels"): list(range(images)), keys("batch_label"): keys(name)}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder


# Data.


def test_digits_are_split_evenly_and_normalised(digits):
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.train_images.max() == 255
    assert torch.bincount(digits.test_labels).min() >= 34  # stratified
    pixels = digits.normalise(digits.train_images)
    torch.testing.assert_close(pixels.mean(), torch.tensor(0.0), atol=1e-4, rtol=0)
    torch.testing.assert_close(pixels.std(), torch.tensor(1.0), atol=1e-4, rtol=0)
    assert torch.equal(digits.train_images, datasets.digits().train_images)


@pytest.mark.parametrize(("size", "classes"), [(32, 10), (224, 1000)])
def test_synthetic_is_deterministic_and_shaped(size, classes):
    first, second = datasets.load("synthetic", size=size, classes=classes), datasets.synthetic(size, classes)
    assert first.train_images.shape[1:] == (3, size, size)
    assert torch.equal(first.train_images, second.train_images)
    assert torch.equal(first.test_labels, second.test_labels)
    assert first.train_labels.max() < classes


@pytest.mark.parametrize("keys", [lambda text: text.encode(), lambda text: text], ids=["bytes", "str"])
@pytest.mark.parametrize("below", [True, False])
def test_cifar_folder(tmp_path, keys, below):
    folder = write_cifar(tmp_path, keys=keys)
    data = datasets.load("cifar10", tmp_path if below else folder)
    assert data.train_images.shape == (50, 3, 32, 32)
    assert data.test_images.shape == (10, 3, 32, 32)
    assert (data.train_images[:, 0] == 200).all()
    assert data.train_images[::10, 1, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert data.test_labels.tolist() == list(range(10))


def test_missing_cifar_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cs\.toronto\.edu.*--data-dir"):
        datasets.load("cifar10", tmp_path)
    with pytest.raises(ValueError, match="--data-dir"):
        datasets.load("cifar10")


def test_cifar_reader_runs_no_code(tmp_path):
    folder = write_cifar(tmp_path)
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": print}))
    with pytest.raises(pickle.UnpicklingError, match=r"must not contain builtins\.print"):
        datasets.load("cifar10", tmp_path)


@pytest.mark.parametrize(("count", "ranks"), [(100, 4), (101, 3), (7, 7), (10, 1)])
def test_shards_are_disjoint_and_complete(count, ranks):
    shards = [datasets.shard(count, rank, ranks, seed=3, epoch=2) for rank in range(ranks)]
    assert sorted(torch.cat(shards).tolist()) == list(range(count))
    assert all(torch.equal(a, datasets.shard(count, r, ranks, seed=3, epoch=2)) for r, a in enumerate(shards))


def test_shards_change_with_seed_and_epoch():
    orders = {tuple(datasets.shard(50, 0, 2, seed, epoch).tolist()) for seed in (0, 1) for epoch in (1, 2)}
    assert len(orders) == 4


def test_batches_repeat_and_count_alike_on_all_ranks(digits):
    def run(rank):
        return list(datasets.train_batches(digits, 16, rank, 4, seed=1, epoch=5))

    ranks = [run(rank) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [1437 // 64] * 4
    assert all(images.shape == (16, 1, 8, 8) and images.dtype == torch.float32 for images, _ in ranks[0])
    again = run(2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(ranks[2], again, strict=True))


def test_test_shards_cover_every_image_once(digits):
    counts = [sum(len(labels) for _, labels in datasets.test_batches(digits, 50, rank, 7)) for rank in range(7)]
    assert sum(counts) == 360


def test_too_few_images_is_an_error(digits):
    with pytest.raises(ValueError, match="10 training images are fewer"):
        datasets.steps_per_epoch(digits.limited(10).train_labels.numel(), 4, 4)
    with pytest.raises(ValueError, match=r"--limit-train must be 1\.\.1437"):
        digits.limited(2000)


def test_limited_is_a_subset_whatever_the_seed(digits):
    torch.manual_seed(9)
    assert torch.equal(digits.limited(20).train_images, digits.limited(30).train_images[:20])


def test_augmentation_is_a_crop_of_the_reflected_image():
    images = torch.randint(256, (40, 3, 6, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    moved = datasets.shift_and_flip(images, 2, True, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    found = set()
    for before, after in zip(padded, moved, strict=True):
        options = {
            (y, x, flip): before[:, y : y + 6, x : x + 7].flip(2) if flip else before[:, y : y + 6, x : x + 7]
            for y, x, flip in itertools.product(range(5), range(5), (False, True))
        }
        (match,) = [key for key, option in options.items() if torch.equal(option, after)]
        found.add(match)
    assert {flip for _, _, flip in found} == {False, True}
    assert {y for y, _, _ in found} == {x for _, x, _ in found} == set(range(5))


# Models.


@pytest.mark.parametrize(
    ("name", "channels", "size", "classes", "parameters"),
    [
        ("mlp", 1, 8, 10, 100_000),
        ("mlp", 3, 32, 10, 100_000),
        ("cnn", 1, 8, 10, 186_538),
        ("cnn", 3, 32, 10, 187_114),
        ("resnet20", 3, 32, 10, 269_722),
        ("vgg11", 3, 32, 10, 9_228_362),
    ],
)
def test_model_sizes_and_outputs(name, channels, size, classes, parameters):
    model = models.build(name, channels, size, classes)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(parameters, rel=0.01 if name == "mlp" else 0)
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


def test_resnet50_is_the_usual_one():
    with torch.device("meta"):
        model = models.build("resnet50", 3, 224, 1000)
        assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    parameters = list(model.parameters())
    assert len(parameters) == 161
    assert sum(p.numel() for p in parameters) == 25_557_032


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32)])
def test_cnn_lies_almost_whole_in_large_matrices(channels, size):
    parameters = list(models.build("cnn", channels, size, 10).parameters())
    small = sum(p.numel() for p in parameters if p.dim() < 2 or p.numel() < 1024)
    assert small < 0.01 * sum(p.numel() for p in parameters)


def test_unfit_models_are_refused():
    with pytest.raises(ValueError, match="vgg11 needs images of at least 32 pixels, these have 8"):
        models.build("vgg11", 1, 8, 10)
    with pytest.raises(ValueError, match="known: mlp, cnn"):
        models.build("vgg12", 1, 8, 10)


# Compressors.


class Half:
    """As Horovod's fp16 compressor."""

    @staticmethod
    def compress(tensor):
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def test_counted_follows_the_ring_formula_and_the_steps():
    counted = compressors.Counted(Half, ranks=4)
    gradients = [torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last), torch.randn(10)]
    for _ in range(3):
        sent = [counted.compress(gradient) for gradient in gradients]
        assert all(payload.is_contiguous() for payload, _ in sent)
        for gradient, (payload, ctx) in zip(gradients, sent, strict=True):
            result = counted.decompress(payload, ctx)
            assert result.stride() == gradient.stride()
            torch.testing.assert_close(result, gradient, rtol=1e-3, atol=1e-3)
    stats = counted.stats()
    assert stats["steps"] == 3
    assert stats["last"]["dense_bytes"] == 2 * 3 / 4 * 4 * 298
    assert stats["total"]["wire_bytes"] == 3 * 2 * 3 / 4 * 2 * 298
    assert stats["total"]["wire_ratio"] == stats["last"]["wire_ratio"] == 2
    assert stats["compress_ms"] > 0


@pytest.mark.parametrize(("text", "value"), [("1/64", 1 / 64), ("0.1", 0.1), ("1", 1.0)])
def test_density_is_a_number_or_a_fraction(text, value):
    parser = argparse.ArgumentParser()
    compressors.METHODS["iwp"].add_arguments(parser)
    assert parser.parse_args(["--density", text]).density == value
    with pytest.raises(SystemExit):
        parser.parse_args(["--density", "2"])


# Recording.


@pytest.fixture
def record():
    pytest.importorskip("horovod.torch")
    return importlib.import_module("record_gradients")


def test_recorder_keeps_the_local_gradients_of_large_parameters(record, tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Flatten(), torch.nn.Linear(64, 5))
    model.to(memory_format=torch.channels_last)
    weight = model[0].weight
    recorder = record.Recorder(model, ranks=4)
    model(torch.randn(2, 8, 4, 4)).sum().backward()
    before = weight.grad.clone()

    recorder.start()
    for parameter in model.parameters():
        payload, ctx = recorder.compress(parameter.grad)
        parameter.grad.set_(recorder.decompress(payload.mul_(2), ctx))  # as an allreduce would, in place
    assert torch.equal(weight.grad, 2 * before)
    torch.save(recorder.take(), tmp_path / "file.pt")
    kept = torch.load(tmp_path / "file.pt", weights_only=True)

    assert list(kept["gradients"]) == list(kept["weights"]) == ["0.weight"]  # 5 * 64 entries are too few
    shape, stride = kept["shapes"]["0.weight"], kept["strides"]["0.weight"]
    assert torch.equal(kept["gradients"]["0.weight"].as_strided(shape, stride), before)
    assert torch.equal(kept["weights"]["0.weight"], weight.detach().permute(0, 2, 3, 1).flatten())  # memory order
    with pytest.raises(RuntimeError, match="every large parameter"):
        recorder.take()


def test_recording_takes_the_options_of_train_and_its_own(record, capsys):
    args = record.parse(["--out", "there", "--model", "mlp", "--moments", "0,1"])
    assert (args.out, args.model, args.moments) == (Path("there"), "mlp", [0.0, 1.0])
    assert record.parse(["--out", "there"]).moments == [0.05, 0.5, 0.95]
    for wrong in (["--moments", "2"], ["--compression", "fp16"], ["--moments", "late"]):
        with pytest.raises(SystemExit):
            record.parse(["--out", "there", *wrong])
    capsys.readouterr()


# The table.


def result(compression="none", seed=0, accuracy=0.9, ranks=4, **config):
    history = [
        {"epoch": e, "train_loss": 1 / e, "test_accuracy": accuracy * e / 2, "wire_bytes": 1e6 * e, "seconds": e}
        for e in (1, 2)
    ]
    return {
        "test_accuracy": accuracy, "wire_ratio": 40.0, "wire_ratio_last": 52.2, "wire_bytes_per_step": 12345.6,
        "step_ms_median": 20.0, "compress_ms_median": 1.5, "replicas_equal": True, "ranks": ranks, "history": history,
        "config": {"compression": compression, "seed": seed, "lr": 0.1, "json": f"{seed}.json", **config},
    }  # fmt: skip


def test_table_joins_seeds_and_names_what_differs():
    rows = table.table(
        [
            result(),
            result("iwp", seed=0, accuracy=0.88, density=1 / 64, leaders=None),
            result("iwp", seed=1, accuracy=0.86, density=1 / 64, leaders=None),
            result("iwp", density=1 / 64, leaders=1),
            result("iwp", density=0.03, leaders=1),
        ]
    ).splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["none", "iwp, leaders all", "iwp, leaders 1", "iwp, leaders 1"]
    assert [row[1] for row in cells] == ["1", "1/64", "1/64", "1/33.3"]
    assert cells[0][2:] == ["0.9000", "40.0", "52.2", "12,346", "20.0", "1.50", "yes", "1"]
    assert cells[1][2] == "0.8700 ± 0.0100"
    assert cells[1][-1] == "2"


def test_table_shows_unequal_replicas():
    bad = result(seed=1)
    bad["replicas_equal"] = False
    assert "| NO |" in table.table([result(), bad])


def test_table_command_with_plot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    files = []
    for seed in range(2):
        files.append(tmp_path / f"{seed}.json")
        files[-1].write_text(json.dumps(result("iwp", seed=seed, density=1 / 64)))
    picture = tmp_path / "plots" / "accuracy.png"
    monkeypatch.setattr(sys, "argv", ["table.py", *map(str, files), "--plot", str(picture)])
    table.main()
    assert capsys.readouterr().out.count("\n") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_from_before_an_option_keeps_what_it_ran_with():
    old = {"compression": "iwp", "density": 0.5}
    then = {"extrapolate": None, "dense_values": "fp32", "bucket_mb": 16.0, "floor": 0.5, "no_block_means": True}
    assert older.complete(old) == {**old, **then}
    assert older.complete({"compression": "none"}) == {"compression": "none", "extrapolate": None}
    given = {"compression": "mp2", "extrapolate": "wnn", "dense_values": "fp16", "bucket_mb": 4.0}
    assert older.complete(given) == given
