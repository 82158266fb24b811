"""The experiment scripts: data, models, options, the table, recorded gradients; and trainings on both hosts."""

import importlib
import itertools
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import ROOT, launch

from hvd_compress.hosts.threads import ThreadWorld

SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

table = importlib.import_module("table")
compressors = importlib.import_module("experiment.compressors")
datasets = importlib.import_module("experiment.data")
images = importlib.import_module("experiment.images")
models = importlib.import_module("experiment.models")
quality = importlib.import_module("experiment.quality")
runs = importlib.import_module("experiment.runs")
text = importlib.import_module("experiment.text")
record = importlib.import_module("record_gradients")
train = importlib.import_module("train")


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
    assert torch.equal(digits.train_images, images.digits().train_images)


@pytest.mark.parametrize(("size", "classes"), [(32, 10), (48, 20)])
def test_synthetic_is_deterministic_and_shaped(size, classes):
    first, second = images.synthetic(size, classes, 512), images.synthetic(size, classes, 512)
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
    shards = [images.shard(count, rank, ranks, seed=3, epoch=2) for rank in range(ranks)]
    assert sorted(torch.cat(shards).tolist()) == list(range(count))
    assert all(torch.equal(a, images.shard(count, r, ranks, seed=3, epoch=2)) for r, a in enumerate(shards))


def test_shards_change_with_seed_and_epoch():
    orders = {tuple(images.shard(50, 0, 2, seed, epoch).tolist()) for seed in (0, 1) for epoch in (1, 2)}
    assert len(orders) == 4


def test_batches_repeat_and_count_alike_on_all_ranks(digits):
    def run(rank):
        return list(digits.train_batches(16, rank, 4, seed=1, epoch=5))

    ranks = [run(rank) for rank in range(4)]
    assert [len(batches) for batches in ranks] == [1437 // 64] * 4
    assert all(images.shape == (16, 1, 8, 8) and images.dtype == torch.float32 for images, _ in ranks[0])
    again = run(2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(ranks[2], again, strict=True))


def test_test_shards_cover_every_image_once(digits):
    counts = [sum(len(labels) for _, labels in digits.test_batches(50, rank, 7)) for rank in range(7)]
    assert sum(counts) == 360


def test_too_few_images_is_an_error(digits):
    with pytest.raises(ValueError, match="10 training images are fewer"):
        digits.limited(10).steps_per_epoch(4, 4)
    with pytest.raises(ValueError, match=r"--limit-train must be 1\.\.1437"):
        digits.limited(2000)


def test_limited_is_a_subset_whatever_the_seed(digits):
    torch.manual_seed(9)
    assert torch.equal(digits.limited(20).train_images, digits.limited(30).train_images[:20])


def test_augmentation_is_a_crop_of_the_reflected_image():
    pictures = torch.randint(256, (40, 3, 6, 7), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    moved = images.shift_and_flip(pictures, 2, True, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(pictures.float(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
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


@pytest.fixture(scope="module")
def library():
    return datasets.load("text", context=32)


def test_text_is_source_code_split_by_files(library):
    names = text.source_files(Path(text.__file__).parents[1])
    assert "experiment/text.py" in names and "train.py" in names and names == sorted(names)
    names = text.source_files(Path(os.__file__).parent)
    assert "os.py" in names and not any("/test" in name or "site-packages" in name for name in names)
    held_out = [name for name in names if text.is_held_out(name)]
    assert 0.05 < len(held_out) / len(names) < 0.15
    root = Path(os.__file__).parent
    assert len(library.held_out) == sum((root / name).stat().st_size for name in held_out)
    content, large = bytes(library.train.tolist()), [name for name in held_out if (root / name).stat().st_size > 2000]
    assert len(content) > 5e6 and all((root / name).read_bytes() not in content for name in large[:20])
    again = text.standard_library(32)
    assert torch.equal(again.train, library.train) and torch.equal(again.held_out, library.held_out)


def test_windows_predict_the_next_byte_and_do_not_depend_on_the_ranks(library):
    def first(batch_size, rank, ranks, seed=0, epoch=1):
        return next(library.train_batches(batch_size, rank, ranks, seed, epoch))

    inputs, targets = first(8, 0, 1)
    assert inputs.shape == targets.shape == (8, 32) and torch.equal(inputs[:, 1:], targets[:, :-1])
    parts = [first(2, rank, 4)[0] for rank in range(4)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), inputs)
    assert not torch.equal(first(8, 0, 1, seed=1)[0], inputs) and not torch.equal(first(8, 0, 1, epoch=2)[0], inputs)
    assert len(list(library.train_batches(1, 0, 2, 0, 1))) == library.steps_per_epoch(1, 2) == 100


def test_text_is_tested_on_the_same_windows_whatever_the_ranks(library):
    alone = torch.cat([targets for _, targets in library.test_batches(50, 0, 1)])
    shared = [torch.cat([targets for _, targets in library.test_batches(50, rank, 3)]) for rank in range(3)]
    assert alone.numel() == text.TESTED and sum(map(len, shared)) == len(alone)
    assert all(torch.equal(part, alone[rank::3]) for rank, part in enumerate(shared))


def test_bits_per_byte_are_cross_entropy_to_the_base_two():
    class Uniform(torch.nn.Module):
        def forward(self, tokens):
            return torch.zeros(*tokens.shape, 256)

    class Alone:
        rank, size = 0, 1

        def sum(self, tensor):
            return tensor

    assert quality.test(Uniform(), datasets.load("text"), "off", Alone()) == pytest.approx(8.0)
    assert quality.BITS_PER_BYTE.best([2.0, float("nan"), 1.0]) == 2
    assert quality.ACCURACY.best([0.5, 0.9, float("nan")]) == 1


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
        ("vit", 3, 32, 10, 545_930),
        ("vit", 1, 8, 10, 534_154),
    ],
)
def test_model_sizes_and_outputs(name, channels, size, classes, parameters):
    model = models.build(name, channels, size, classes)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(parameters, rel=0.01 if name == "mlp" else 0)
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32)])
def test_cnn_lies_almost_whole_in_large_matrices(channels, size):
    parameters = list(models.build("cnn", channels, size, 10).parameters())
    small = sum(p.numel() for p in parameters if p.dim() < 2 or p.numel() < 1024)
    assert small < 0.01 * sum(p.numel() for p in parameters)


@pytest.mark.parametrize(("name", "parameters"), [("gpt", 254_592), ("gpt-5m", 4_820_992)])
def test_a_language_model_sees_only_the_bytes_before(name, parameters):
    torch.manual_seed(0)
    model = models.build(name, 256, 64)
    assert sum(p.numel() for p in model.parameters()) == parameters
    tokens = torch.randint(256, (2, 20))
    before = model(tokens)
    assert before.shape == (2, 20, 256)
    tokens[:, 12] = (tokens[:, 12] + 1) % 256
    after = model(tokens)
    torch.testing.assert_close(after[:, :12], before[:, :12])
    assert ((after - before)[:, 12:].abs().amax((0, 2)) > 1e-4).all()


def test_unfit_models_are_refused():
    with pytest.raises(ValueError, match="patches of 4 pixels needs a multiple of them, these images have 9"):
        models.build("vit", 1, 9, 10)
    with pytest.raises(ValueError, match="vgg11 needs images of at least 32 pixels, these have 8"):
        models.build("vgg11", 1, 8, 10)


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


def options(method, *given):
    return vars(train.parse(["--compression", method, *given]))


def test_options_are_the_arguments_of_the_method():
    iwp = options("iwp", "--density", "1/64", "--leaders", "1", "--no-block-means", "--values", "fp16")
    assert (iwp["density"], iwp["leaders"], iwp["block_means"], iwp["values"]) == (1 / 64, 1, False, "fp16")
    assert options("iwp")["leaders"] is None and options("iwp", "--leaders", "none")["leaders"] is None
    assert options("iwp")["bucket_mb"] == options("mipd")["bucket_mb"] == 32.0
    assert options("dgc")["momentum_correction"] and not options("topk")["momentum_correction"]
    assert "error_feedback" in options("qsgd") and "density" not in options("qsgd")
    assert not {"collectives", "process_set", "named_parameters", "predictor"} & set(options("mp2"))


@pytest.mark.parametrize(
    "wrong",
    [
        "--compression fft --floor 1",
        "--compression none --density 1/64",
        "--compression topk --block-means",
        "--compression iwp --density much",
        "--compression ddp-powersgd",
        "--compression ddp-powersgd --host horovod",
        "--host ddp --trace file",
        "--eval-every 0",
        "--data text",
        "--model gpt",
        "--data text --model gpt --channels-last",
        "--optimizer adamw --momentum 0.9",
        "--ranks 2",
        "--host threads --ranks 0",
        "--host threads --compression ddp-powersgd",
        "--host threads --device cuda",
    ],
)
def test_options_of_another_method_or_host_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        train.parse(wrong.split())
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("method", [name for name, method in compressors.METHODS.items() if method.kind])
def test_a_method_is_built_with_the_options_given(method):
    args = train.parse(["--compression", method, "--bucket-mb", "1"])
    model = models.build("mlp", 1, 8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    world = ThreadWorld(2)
    compressors.METHODS[method].build(args, model, optimizer, collectives=world.collectives(0))
    assert optimizer.param_groups[0]["momentum"] == (0.0 if method == "dgc" else 0.9)


def test_an_optimizer_has_its_own_defaults():
    sgd, adamw = train.parse([]), train.parse(["--optimizer", "adamw", "--weight-decay", "0"])
    assert (sgd.lr, sgd.momentum, sgd.weight_decay, sgd.ranks) == (0.1, 0.9, 5e-4, None)
    assert (adamw.lr, adamw.momentum, adamw.weight_decay) == (3e-3, None, 0.0)


def test_methods_of_both_hosts_are_named():
    assert compressors.method_and_host("iwp@slow") == ("iwp", "horovod")
    assert compressors.method_and_host("ddp-iwp@slow") == ("iwp", "ddp")
    assert compressors.method_and_host("ddp-none") == ("none", "ddp")
    assert compressors.method_and_host("ddp-powersgd") == ("ddp-powersgd", "ddp")
    with pytest.raises(ValueError, match="unknown method 'ddp-zip'"):
        compressors.method_and_host("ddp-zip")


# Recorded gradients.


def test_recorder_keeps_the_local_gradients_of_large_parameters(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Flatten(), torch.nn.Linear(64, 5))
    model.to(memory_format=torch.channels_last)
    weight = model[0].weight
    recorder = record.Recorder(model)
    recorder.on = True
    model(torch.randn(2, 8, 4, 4)).sum().backward()
    before = weight.grad.clone()
    weight.grad.zero_()
    torch.save(recorder.content(7), tmp_path / "file.pt")
    kept = torch.load(tmp_path / "file.pt", weights_only=True)
    assert kept["step"] == 7 and list(kept["gradients"]) == ["0.weight"]  # 5 * 64 entries are too few
    shape, stride = kept["shapes"]["0.weight"], kept["strides"]["0.weight"]
    assert torch.equal(kept["gradients"]["0.weight"].as_strided(shape, stride), before)
    assert torch.equal(kept["gradients"]["0.weight"], before.permute(0, 2, 3, 1).flatten())  # memory order


def test_recording_takes_the_options_of_train_and_its_own(capsys):
    args = record.parse(["--out", "there", "--model", "mlp", "--moments", "0,1"])
    assert (args.out, args.model, args.moments) == (Path("there"), "mlp", [0.0, 1.0])
    assert record.parse(["--out", "there"]).moments == [0.05, 0.5, 0.95]
    for wrong in (["--moments", "2"], ["--compression", "fp16"], ["--moments", "late"]):
        with pytest.raises(SystemExit):
            record.parse(["--out", "there", *wrong])
    capsys.readouterr()


# Trainings.


def trained(launcher, arguments, file):
    launch("run.sh", [*launcher, "2", str(SCRIPTS / "train.py"), *SHORT, *arguments, "--json", str(file)], timeout=120)
    return json.loads(file.read_text())


SHORT = ["--data", "digits", "--model", "cnn", "--epochs", "1", "--max-steps", "4", "--limit-train", "256"]


def simulated(arguments, file):
    """The same with all ranks in this process."""
    threads = torch.get_num_threads()
    assert train.main(train.parse([*SHORT, "--host", "threads", "--ranks", "2", *arguments, "--json", str(file)])) == 0
    torch.set_num_threads(threads)
    return json.loads(file.read_text())


@pytest.mark.parametrize("method", ["none", "iwp"])
def test_a_language_model_learns_with_adamw(method, tmp_path):
    given = [
        "--data",
        "text",
        "--model",
        "gpt",
        "--optimizer",
        "adamw",
        "--compression",
        method,
        "--limit-train",
        "9999",
    ]
    given += ["--max-steps", "12", "--eval-every", "0.06", "--lr-warmup-epochs", "0", "--batch-size", "4"]
    found = simulated(given, tmp_path / "result.json")
    tests = [entry["test_bits_per_byte"] for entry in found["history"]]
    assert len(tests) == 2 and 8 > tests[0] > tests[1] == found["test_bits_per_byte"]
    assert found["replicas_equal"] and found["ranks"] == 2 and "test_accuracy" not in found
    assert found["wire_ratio"] == 1 if method == "none" else found["wire_ratio"] > 20


def test_a_rank_that_cannot_start_ends_a_simulation(tmp_path, capsys):
    given = ["--host", "threads", "--ranks", "3", "--data", "cifar10", "--data-dir", str(tmp_path)]
    assert train.main(train.parse(given)) == 2
    assert "rank 2: no CIFAR-10 at" in capsys.readouterr().err


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "method", [pytest.param("none", marks=slow), pytest.param("fp16", marks=slow), "iwp", "ddp-powersgd"]
)
def test_ddp_trains_without_horovod(method, tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('Horovod is not installed')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    found = trained(["--ddp"], ["--host", "ddp", "--compression", method], tmp_path / "result.json")
    assert found["replicas_equal"] and found["steps"] == 4 and found["config"]["host"] == "ddp"
    if method != "ddp-powersgd":  # with two ranks there is one order to sum in
        alike = simulated(["--compression", method], tmp_path / "simulated.json")
        for key in ("train_loss", "test_accuracy", "wire_bytes_per_step"):
            assert alike[key] == found[key], key
    assert found["wire_ratio"] == pytest.approx({"none": 1, "fp16": 2}.get(method, found["wire_ratio"]))
    assert found["wire_ratio"] > (1.5 if method != "none" else 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "iwp"])
def test_both_hosts_train_alike(method, tmp_path):
    pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    ddp = trained(["--ddp"], ["--host", "ddp", "--compression", method], tmp_path / "ddp.json")
    horovod = trained([], ["--compression", method], tmp_path / "horovod.json")
    assert ddp["train_loss"] == pytest.approx(horovod["train_loss"], rel=1e-5)
    assert ddp["wire_bytes_per_step"] == pytest.approx(horovod["wire_bytes_per_step"], rel=1e-3)
    threads = simulated(["--compression", method], tmp_path / "threads.json")
    for key in ("train_loss", "test_accuracy", "wire_bytes_per_step"):
        assert threads[key] == horovod[key], key


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


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_table_joins_seeds_and_names_what_differs():
    rows = cells(
        table.table(
            [
                result(),
                result("iwp", seed=0, accuracy=0.88, density=1 / 64, leaders=None),
                result("iwp", seed=1, accuracy=0.86, density=1 / 64, leaders=None),
                result("iwp", density=1 / 64, leaders=1),
                result("iwp", density=0.03, leaders=1),
            ]
        )
    )[2:]
    assert [row[0] for row in rows] == ["none", "iwp", "iwp, leaders 1", "iwp, leaders 1"]
    assert [row[1] for row in rows] == ["1", "1/64", "1/64", "1/33.3"]
    assert rows[0][2:] == ["0.9000", "40.0", "12,346", "20.0", "1.50"]
    assert rows[1][2] == "0.8700 ± 0.0100 (2)"


def test_table_names_unequal_replicas():
    bad = result(seed=1)
    bad["replicas_equal"] = False
    assert "Replicas differ: none." in table.table([result(), bad])


def test_table_command_with_plot(tmp_path, monkeypatch, capsys):
    files = []
    for seed in range(2):
        files.append(tmp_path / f"{seed}.json")
        files[-1].write_text(json.dumps(result("iwp", seed=seed, density=1 / 64)))
    picture = tmp_path / "plots" / "accuracy.png"
    monkeypatch.setattr(sys, "argv", ["table.py", *map(str, files), "--plot", str(picture)])
    table.main()
    assert capsys.readouterr().out.count("\n") == 3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_older_result_has_the_options_it_ran_with():
    old = runs.complete({"compression": "iwp", "density": 0.5, "progress": None})
    then = {"dense_values": "fp32", "bucket_mb": 16.0, "block_means": False, "host": "horovod", "extrapolate": None}
    assert {**old, **then, "density": 0.5} == old and "progress" not in old
    assert runs.complete({"compression": "iwp", "no_block_means": False})["block_means"] is True
    assert runs.complete({"compression": "mipd", "whole_model": True})["layerwise"] is False
    sgd = {"optimizer": "sgd", "context": 64, "ranks": None}
    assert runs.complete({"compression": "none"}) == {
        "compression": "none",
        "extrapolate": None,
        "host": "horovod",
        **sgd,
    }
