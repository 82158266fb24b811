"""Text of the experiments: files, windows, and the test in bits per byte."""

import os
from pathlib import Path

import pytest
import torch
from experiment import data as datasets
from experiment import quality, text


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


def test_shakespeare_is_a_file_whose_end_is_held_out(tmp_path):
    with pytest.raises(ValueError, match="shakespeare needs --data-dir"):
        datasets.load("shakespeare")
    with pytest.raises(FileNotFoundError, match=r"there is no .*tinyshakespeare\.txt"):
        datasets.load("shakespeare", tmp_path, 32)
    content = bytes(range(101)) * 10
    (tmp_path / text.SHAKESPEARE).write_bytes(content)
    found = datasets.load("shakespeare", tmp_path, 8)
    assert bytes(found.train.tolist()) == content[:909] and bytes(found.held_out.tolist()) == content[909:]
    assert found.shape == (256, 8)


def test_windows_predict_the_next_byte_and_do_not_depend_on_the_ranks(library):
    def first(batch_size, rank, ranks, seed=0, epoch=1):
        return next(library.train_batches(batch_size, rank, ranks, seed, epoch))

    inputs, targets = first(8, 0, 1)
    assert inputs.shape == targets.shape == (8, 32) and torch.equal(inputs[:, 1:], targets[:, :-1])
    parts = [first(2, rank, 4)[0] for rank in range(4)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), inputs)
    assert not torch.equal(first(8, 0, 1, seed=1)[0], inputs) and not torch.equal(first(8, 0, 1, epoch=2)[0], inputs)
    assert len(list(library.train_batches(1, 0, 2, 0, 1))) == library.steps_per_epoch(1, 2) == 100


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
