"""Wrong arguments raise errors that say what was given and what is allowed."""

import pytest
import torch
from harness import single
from models import mixed_model
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel

import hvd_compress
from hvd_compress import (
    FFT,
    IWP,
    MIPD,
    MP2,
    QSGD,
    Compressor,
    DeMo,
    NoCompression,
    PowerSGD,
    Quantized,
    SlimDP,
    TernGrad,
    TopK,
)
from hvd_compress.carriers.threads import ThreadWorld

METHODS = [
    c for c in vars(hvd_compress).values() if isinstance(c, type) and issubclass(c, Compressor) and c is not Compressor
]


#: A method, options, and what the error says.
WRONG = [
    (IWP, dict(density=0.0), "density must be a finite number, above 0 and at most 1, got 0.0"),
    (IWP, dict(density=1.5), "got 1.5"),
    (IWP, dict(values="fp8"), "values must be one of fp32, fp16, lanes2 to lanes16.*got 'fp8'"),
    (IWP, dict(values="lanes17"), "bits of lanes must be an integer, 2 to 16, got 17"),
    (IWP, dict(values="lloyd9"), "bits of lloyd must be an integer, 1 to 8, got 9"),
    (IWP, dict(values="range3"), "bits of range must be an integer, 4 to 16, got 3"),
    (IWP, dict(values="lanes4-gather"), "got 'lanes4-gather'"),
    (IWP, dict(dense_values="int8"), "dense_values must be fp16 or fp32, got 'int8'"),
    (IWP, dict(leaders=0), "leaders must be an integer, at least 1"),
    (IWP, dict(explore=1.1), "explore must be a finite number, at least 0 and at most 1, got 1.1"),
    (IWP, dict(momentum=1.0), "momentum must be a finite number, at least 0 and below 1, got 1.0"),
    (IWP, dict(warmup_steps=-1), "warmup_steps must be an integer, at least 0"),
    (IWP, dict(budget_interval=-1), "budget_interval must be an integer, at least 0"),
    (IWP, dict(bucket_mb=0), "bucket_mb must be a finite number, above 0"),
    (IWP, dict(min_numel=0), "min_numel must be an integer, at least 1"),
    (TopK, dict(values="lanes4"), "gather"),
    (QSGD, dict(bits=1), "bits must be an integer, 2 to 8"),
    (QSGD, dict(run=0), "run must be an integer, at least 1"),
    (TernGrad, dict(clip=-1.0), "clip must be a finite number, above 0"),
    (DeMo, dict(decay=0.0), "decay must be a finite number, above 0 and at most 1, got 0.0"),
    (DeMo, dict(subtract=0.0), "subtract must be a finite number, above 0 and at most 1, got 0.0"),
    (DeMo, dict(dense_momentum=1.0), "dense_momentum must be a finite number, at least 0"),
    (DeMo, dict(momentum=0.9), "momentum goes with sign=False"),
    (DeMo, dict(orthogonal=True, sign=False), "orthogonal goes with sign=True"),
    (DeMo, dict(orthogonal=["head"]), "orthogonal names parameters that do not exist: head"),
    (DeMo, dict(exchange="star"), "exchange must be one of gather, ring"),
    (DeMo, dict(exchange="gather", values="fp16"), "values have to be gathered"),
    (FFT, dict(exchange="gather", values="fp16"), "values have to be gathered"),
    (FFT, dict(exchange="star"), "exchange must be one of gather, ring"),
    (MP2, dict(density=0.0), "density must"),
    (SlimDP, dict(core=1.5), "core must be a finite number, at least 0"),
    (SlimDP, dict(smoothing=1.0), "smoothing must be a finite number, at least 0"),
    (PowerSGD, dict(rank=0), "rank must be an integer, at least 1, got 0"),
    (PowerSGD, dict(values="lanes4"), "values must be fp16 or fp32"),
    (Quantized, dict(bits=0), "bits of lloyd must be an integer, 1 to 8, got 0"),
    (Quantized, dict(bits=9), "got 9"),
    (Quantized, dict(run=7), "run must"),
    (NoCompression, dict(values="int8"), "values must be fp16 or fp32, got 'int8'"),
]


@pytest.mark.parametrize(("method", "options", "says"), WRONG)
def test_a_wrong_argument_raises_an_error_that_says_what_is_allowed(method, options, says):
    with pytest.raises(ValueError, match=says):
        method(mixed_model(), collectives=ThreadWorld(1).collectives(0), **options)


#: Of the wrong type, or none of the method's.
UNKNOWN = [
    (IWP, dict(seed=1.0), "seed must be"),
    (IWP, dict(seed=None), "seed must be"),
    (IWP, dict(grad_scaler=True), "grad_scaler must be"),
    (NoCompression, dict(dense_values="fp16"), "all tensors of NoCompression are sent as values= says"),
    (NoCompression, dict(momentum=0.9), "unexpected keyword argument 'momentum'"),
    *((method, dict(block_means=True), "block_means") for method in (TopK, MIPD, FFT)),
]


@pytest.mark.parametrize(("method", "options", "says"), UNKNOWN)
def test_an_argument_of_the_wrong_type_raises_an_error(method, options, says):
    with pytest.raises(TypeError, match=says):
        method(mixed_model(), collectives=ThreadWorld(1).collectives(0), **options)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_wrong_named_parameters_raise_an_error_that_shows_the_call_to_write(method):
    model, collectives = mixed_model(), ThreadWorld(1).collectives(0)
    optimizer, name = torch.optim.SGD(model.parameters(), lr=0.1), method.__name__
    for wrong, got in (
        (optimizer, "SGD"),
        (model.parameters(), "Parameter"),
        (model.state_dict(), "OrderedDict"),
        (model.state_dict().items(), r"\('first.weight', tensor"),
        (dict(model.named_parameters()), "dict"),
        (model.named_parameters, "method"),
        (model.named_modules(), r"\('', Sequential"),
        (torch.nn.Linear, "type"),
        ([model], "Sequential"),
        ([("w", 1.0)], r"\('w', 1.0\)"),
        ("model", "'model'"),
        (None, "NoneType"),
        (0.1, "float"),
    ):
        says = rf"named_parameters must be the model or .* pairs.*: write {name}\(model\); got {got}"
        with pytest.raises(TypeError, match=says):
            method(wrong, collectives=collectives)
    with pytest.raises(TypeError, match=rf"{name}.__init__\(\) takes .*\d positional arguments but 4"):
        method(model, *[0.1] * 2, collectives=collectives)


def test_tensors_that_are_trained_need_not_be_parameters():
    named = [("w", torch.zeros(64, 64, requires_grad=True)), ("frozen", torch.nn.Parameter(torch.zeros(2), False))]
    assert IWP(named, collectives=ThreadWorld(1).collectives(0)).engine.names == ["w", "frozen"]


def test_a_used_up_iterator_raises_an_error():
    iterator = mixed_model().named_parameters()
    list(iterator)
    with pytest.raises(ValueError, match="used up"):
        IWP(iterator, collectives=ThreadWorld(1).collectives(0))


def test_names_and_parameters_that_come_twice_raise_an_error():
    p, q = (torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    for named, says in ([("w", p), ("w", q)], "more than once: w"), ([("a", p), ("b", p)], "a and b are one parameter"):
        with pytest.raises(ValueError, match=says):
            IWP(named, collectives=ThreadWorld(1).collectives(0))


@pytest.mark.parametrize("original", [False, True])
def test_parameters_that_fsdp1_has_flattened_raise_an_error(original):
    """Each rank has another part of them, and averages would be of unrelated entries."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(mixed_model(), use_orig_params=original, device_id=torch.device("cpu"))
        for call in (IWP, DeMo, hvd_compress.hidden_matrices):
            with pytest.raises(ValueError, match=r"belongs to FSDP1.*fully_shard\(\)"):
                call(model)
        later = mixed_model()
        compression = IWP(later)
        FullyShardedDataParallel(later, use_orig_params=True, device_id=torch.device("cpu"))
        with pytest.raises(ValueError, match="belongs to FSDP1"):
            hvd_compress.average_gradients(compression)
    finally:
        distributed.destroy_process_group()


def test_an_integer_gradient_raises_an_error_that_names_it():
    model = torch.nn.Linear(64, 64)
    model.codes = torch.nn.Parameter(torch.zeros(64, 64, dtype=torch.int32), requires_grad=False)
    compression = single(model)
    model.codes.grad = torch.ones(64, 64, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"codes: gradient of dtype torch.int32; allowed are float32"):
        compression.compress(model.codes.grad)


def test_a_parameter_that_moved_to_another_device_raises_an_error_that_names_it():
    model = torch.nn.Linear(64, 64)
    compression = single(model)
    compression.buckets[0].device = torch.device("cuda", 0)
    model.weight.grad = torch.ones(64, 64)
    with pytest.raises(ValueError, match=r"weight: was on cuda:0 when .* was built and its gradient is on cpu"):
        compression.compress(model.weight.grad)


def test_repr_names_the_options():
    text = repr(single(density=1 / 64, warmup_steps=10, leaders=2, momentum=0.9))
    parts = "IWP(density", "warmup_steps=10", "leaders=2", "momentum=0.9", "3 of 9 tensors"
    for part in parts:
        assert part in text, text
