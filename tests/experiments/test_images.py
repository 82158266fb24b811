"""Images of the experiments: reading, shards, batches, augmentation."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from experiment import data as datasets
from experiment import images


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


@pytest.mark.parametrize("keys", [lambda text: text.encode(), lambda text: text], ids=["bytes", "str"])
def test_cifar_folder(tmp_path, keys):
    write_cifar(tmp_path, keys=keys)
    data = datasets.load("cifar10", tmp_path)
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


def test_too_few_images_is_an_error(digits):
    with pytest.raises(ValueError, match="10 training images are fewer"):
        digits.limited(10).steps_per_epoch(4, 4)
    with pytest.raises(ValueError, match=r"--limit-train must be 1\.\.1437"):
        digits.limited(2000)


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
