"""Options of train.py: those of methods, hosts and optimizers; byte accounting of stock compressors."""

import pytest
import torch
import train
import train_methods
from experiment import compressors, models, optimizers

from hvd_compress.carriers.threads import ThreadWorld


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
        "--compression fft --leaders 1",
        "--compression none --density 1/64",
        "--compression topk --block-means",
        "--compression iwp --density much",
        "--compression ddp-powersgd",
        "--compression ddp-powersgd --host horovod",
        "--host fsdp --compression iwp",
        "--host fsdp --nodes 2 --compression fp16",
        "--host fsdp --nodes 2 --optimizer muon",
        "--host fsdp --nodes 2 --save file",
        "--eval-every 0",
        "--data text",
        "--model gpt",
        "--data text --model gpt-tagger",
        "--data text --model gpt --channels-last",
        "--optimizer adamw --momentum 0.9",
        "--ranks 2",
        "--host threads --ranks 0",
        "--host threads --compression ddp-powersgd",
        "--host threads --device cuda",
        "--local-steps 0",
        "--unsent buffer",
        "--local-steps 4 --unsent nowhere",
        "--local-steps 4 --compression dgc",
        "--local-steps 4 --host ddp --compression ddp-powersgd",
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


def test_muon_made_anew_from_its_groups_moves_the_same_matrices():
    """Horovod gives an optimizer's class its groups alone."""
    model = models.build("gpt", 256, 16)
    muon = optimizers.build(train.parse(["--data", "text", "--model", "gpt", "--optimizer", "muon"]), model)
    matrices = {id(p) for group in muon.param_groups if group["orthogonal"] for p in group["params"]}
    assert matrices == {id(dict(model.named_parameters())[name]) for name in models.hidden_matrices(model)}
    again = type(muon)(muon.param_groups)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    again.step()
    for p, old in zip(model.parameters(), before, strict=True):
        moved = (p.detach() - old).div(muon.defaults["lr"])
        signs = (moved.abs() - 1).abs().max() < 0.1  # weight decay moves, too
        assert bool(signs) == (id(p) not in matrices)


def test_options_of_local_steps_have_defaults_only_with_them():
    without, local = (vars(train.parse(given)) for given in ([], ["--local-steps", "4", "--outer-lr", "0.7"]))
    names = ["local_steps", "unsent", "buffer_decay", "outer_lr", "outer_momentum"]
    names += ["restore_length", "fragments", "delay", "averaged_gradients"]
    assert [without[name] for name in names] == [None] * 9
    assert [local[name] for name in names] == [4, "weights", 1.0, 0.7, 0.0, False, 1, 0, False]


def test_dgc_without_momentum_correction_fits_adamw():
    args = train.parse(["--compression", "dgc", "--optimizer", "adamw", "--no-momentum-correction"])
    model = models.build("mlp", 1, 8, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    built = compressors.METHODS["dgc"].build(args, model, optimizer, collectives=ThreadWorld(1).collectives(0))
    built.engine.clock.before_optimizer_step(optimizer)


def test_methods_of_both_hosts_are_named():
    assert compressors.method_and_host("iwp@slow") == ("iwp", "horovod")
    assert compressors.method_and_host("ddp-iwp@slow") == ("iwp", "ddp")
    assert compressors.method_and_host("ddp-none") == ("none", "ddp")
    assert compressors.method_and_host("ddp-powersgd") == ("ddp-powersgd", "ddp")
    with pytest.raises(ValueError, match="unknown method 'ddp-zip'"):
        compressors.method_and_host("ddp-zip")


@pytest.mark.parametrize("options", train_methods.RUNS.values(), ids=train_methods.RUNS)
def test_train_methods_has_options_of_train(options):
    """Each of its trainings runs, for a step of two ranks in this process."""
    one_step = ["--host", "threads", "--max-steps", "1"]
    args = train.parse([*train_methods.COMMON.split(), *options.split(), *one_step])
    assert train.hosts.run("threads", lambda host: train.Run(args, host).train()["steps"] - 1, ranks=2) == 0
