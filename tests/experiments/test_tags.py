"""Tagged text, and fine-tuning on it."""

import pytest
import torch
import train
from experiment import models, tags, text
from experiment.result_file import read_runs

SOURCE = b"def f(x):\n\treturn 'a\\\nb' + 0x1F  # why\n"


def test_every_byte_has_the_tag_of_its_token():
    letters = dict(zip(tags.TAGS, "_nkodsc", strict=True))
    found = tags.tagged(SOURCE)
    assert bytes((found % 256).tolist()) == SOURCE
    written = "".join(letters[tags.TAGS[tag]] for tag in (found // 256).tolist())
    assert written == "kkk_nonoo__kkkkkk_ssssss_o_dddd__ccccc_"
    assert not len(tags.tagged("é = 1".encode())) and not len(tags.tagged(b""))


def test_fine_tuning_begins_with_the_weights_of_the_language_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(text, "TESTED", 4096)  # bytes
    saved, path = tmp_path / "weights" / "gpt.pt", tmp_path / "runs.jsonl" / "result"
    common = ["--host", "threads", "--ranks", "2", "--context", "16", "--batch-size", "2"]
    common += ["--limit-train", "9999", "--optimizer", "adamw"]
    common += ["--lr-warmup-epochs", "0"]
    threads = torch.get_num_threads()
    given = [*common, "--data", "text", "--model", "gpt", "--max-steps", "2", "--save", str(saved)]
    assert train.main(train.parse(given)) == 0
    tuned = [*common, "--data", "text-tags", "--model", "gpt-tagger", "--from", str(saved), "--compression", "qsgd"]
    assert train.main(train.parse([*tuned, "--max-steps", "30", "--json", str(path)])) == 0
    torch.set_num_threads(threads)
    found = read_runs(path.parent)["result"]
    assert found["replicas_equal"] and found["test_accuracy"] > 0.3 and found["wire_ratio"] > 3
    assert train.main(train.parse([*tuned, "--context", "8"])) == 2
    torch.set_num_threads(threads)
    assert "positions is (16, 96), and the model's is (8, 96)" in capsys.readouterr().err


def test_weights_of_another_model_are_refused(tmp_path):
    gpt, tagger = models.build("gpt", 256, 16), models.build("gpt-tagger", 256, 16, 7)
    torch.save(gpt.state_dict(), tmp_path / "gpt.pt")
    head = tagger.head.weight.detach().clone()
    models.load_pretrained(tagger, tmp_path / "gpt.pt")
    assert torch.equal(tagger.head.weight, head)
    assert torch.equal(tagger.words.weight, gpt.words.weight)
    torch.save(models.build("mlp", 1, 8, 10).state_dict(), tmp_path / "mlp.pt")
    with pytest.raises(ValueError, match="is None, and the model's is"):
        models.load_pretrained(tagger, tmp_path / "mlp.pt")
