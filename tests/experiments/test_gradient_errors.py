"""scripts/experiments/gradient_errors.py."""

from pathlib import Path

import gradient_errors as errors
import pytest
import torch


def test_recorder_keeps_the_local_gradients_of_large_parameters(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.Flatten(), torch.nn.Linear(64, 5))
    model.to(memory_format=torch.channels_last)
    weight = model[0].weight
    recorder = errors.Recorder(model)
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


def test_differences_begin_anew_after_each_exchange(tmp_path):
    argv = "--host threads --ranks 2 --data digits --model mlp --local-steps 2 --max-steps 6 --limit-train 200 --lr 0.1"
    args = errors.parse_record(["--out", str(tmp_path), *argv.split(), "--moments", "0.5", "--count", "2"])
    assert errors.train.main(args, errors.RecordedRun) == 0
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == [f"step{step:06d}.rank{rank}.pt" for step in (3, 5) for rank in (0, 1)]
    exchanges, sizes = errors.in_sequence(tmp_path)
    assert all(exchange.shape == (2, sum(sizes)) for exchange in exchanges) and len(exchanges) == 2
    # Steps of one size: a difference of all four would be larger than that of the first two.
    norms = [float(exchange.norm()) for exchange in exchanges]
    assert norms[1] < 1.3 * norms[0] and not torch.equal(exchanges[0][0], exchanges[0][1])


def test_coefficients_have_the_norms_of_entries():
    exchange = torch.randn(2, 512, generator=torch.Generator().manual_seed(0))
    given, coefficients = exchange.clone(), errors.transformed(exchange)
    assert torch.equal(exchange, given) and not torch.allclose(coefficients, exchange)
    torch.testing.assert_close(coefficients.norm(dim=1), exchange.norm(dim=1))
    torch.testing.assert_close(errors.transformed(coefficients), exchange)


def test_recording_takes_the_options_of_train_and_its_own(capsys):
    args = errors.parse_record(["--out", "there", "--model", "mlp", "--moments", "0,1"])
    assert (args.out, args.model, args.moments) == (Path("there"), "mlp", [0.0, 1.0])
    assert errors.parse_record(["--out", "there"]).moments == [0.05, 0.5, 0.95]
    for wrong in (["--moments", "2"], ["--compression", "fp16"], ["--moments", "late"]):
        with pytest.raises(SystemExit):
            errors.parse_record(["--out", "there", *wrong])
    capsys.readouterr()


def test_tables_of_what_was_recorded(tmp_path, capsys):
    torch.manual_seed(0)
    for step in range(8):
        for rank in range(2):
            gradients = {"w": torch.randn(4096)}
            saved = {"step": step, "gradients": gradients, "shapes": {"w": (64, 64)}, "strides": {"w": (64, 1)}}
            torch.save(saved, tmp_path / f"step{step:06d}.rank{rank}.pt")
    assert errors.main(["errors", str(tmp_path)]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: float(row[2]) for row in rows if len(row) == 10 and row[2][:1].isdigit()}
    assert len(found) == len(list(errors.methods()))
    assert found["lloyd4"] < found["lanes4, to nearest"] < found["lanes4, at N = 4"] < found["QSGD, 4 bits"]
    assert errors.main(["feedback", str(tmp_path), "--bits", "2", "4", "--runs", "512"]) == 0
    two, four = capsys.readouterr().out.splitlines()[2:]
    assert float(two.split("|")[3]) > 2 * float(four.split("|")[3]) and " 4.0" in four
    assert errors.main(["feedback", str(tmp_path), "--bits", "2", "--mean-bits", "4", "--runs", "512"]) == 0
    mixed = capsys.readouterr().out.splitlines()[2]
    assert float(four.split("|")[3]) < float(mixed.split("|")[3]) < float(two.split("|")[3]) and " 3.0" in mixed
    with pytest.raises(SystemExit, match="holds no step"):
        errors.main(["errors", str(tmp_path / "nowhere")])
