"""hidden_matrices: which parameters Muon gets, for models as users write them."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from hvd_compress import DeMo, hidden_matrices
from hvd_compress.carriers.threads import ThreadWorld


class Block(nn.Module):
    """As in a decoder: its own ``output`` is no head."""

    def __init__(self, width=8):
        super().__init__()
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


BLOCK = ["qkv.weight", "output.weight"]


class GPT(nn.Module):
    def __init__(self, head="own", blocks=2, first=False, repeat=nn.ModuleList):
        super().__init__()
        if first:
            self.lm_head = nn.Linear(8, 32, bias=False)
        self.tok, self.positions = nn.Embedding(32, 8), nn.Parameter(torch.zeros(4, 8))
        blocks = [Block() for _ in range(blocks)]
        self.layers = repeat(blocks) if repeat is nn.ModuleList else repeat(*blocks)
        self.norm = nn.LayerNorm(8)
        if head != "none" and not first:
            self.lm_head = nn.Linear(8, 32, bias=False)
        if head == "tied":
            self.lm_head.weight = self.tok.weight


def of_blocks(prefix, count=2):
    return [f"{prefix}.{i}.{name}" for i in range(count) for name in BLOCK]


class Encoder(nn.Module):
    """torch's own layers, and a head that is called so nowhere."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(32, 8), nn.Embedding(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
        self.to_bytes = nn.Linear(8, 32)


OF_LAYER = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
OF_ENCODER = [f"body.layers.{i}.{name}" for i in range(2) for name in OF_LAYER]


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(12, 8)})
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 8)), nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.teacher = nn.Linear(8, 8)  # after the head


class Named(nn.Module):
    """nanoGPT's shape: one dict of modules."""

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList([Block(), Block()])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(32, 8), "wpe": nn.Embedding(4, 8), "h": layers})
        self.lm_head = nn.Linear(8, 32, bias=False)
        self.transformer.wte.weight = self.lm_head.weight


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))})


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def lstm():
    return nn.Sequential(nn.Embedding(9, 8), nn.LSTM(8, 8), nn.Linear(8, 9))


def conv_net():
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))


def frozen():
    model = GPT()
    model.layers[0].requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


def wrapped():
    model = GPT()
    model.layers[0], model.layers[1] = (checkpoint_wrapper(layer) for layer in model.layers)
    return AveragedModel(model)  # its names begin with "module."


#: A model, and the names of its matrices.
MODELS = {
    "gpt": (GPT, of_blocks("layers")),
    "gpt, tied": (lambda: GPT("tied"), of_blocks("layers")),
    "gpt without a head": (lambda: GPT("none"), of_blocks("layers")),
    "gpt, blocks in Sequential": (lambda: GPT("none", repeat=nn.Sequential), of_blocks("layers")),
    "gpt of one block": (lambda: GPT(blocks=1), of_blocks("layers", 1)),
    "gpt, head first": (lambda: GPT(first=True), of_blocks("layers")),
    "gpt, head first and tied": (lambda: GPT("tied", first=True), of_blocks("layers")),
    "torch's encoder": (Encoder, OF_ENCODER),
    "torch's transformer": (lambda: nn.Transformer(8, 2, 1, 0, 16).encoder, [f"layers.0.{name}" for name in OF_LAYER]),
    "vit": (ViT, [*of_blocks("blocks"), "head.0.weight", "teacher.weight"]),
    "a dict of modules": (Named, of_blocks("transformer.h")),
    "several heads": (Heads, ["body.weight", "heads.b.0.weight"]),
    "mlp": (mlp, ["0.weight", "2.weight"]),
    "mlp of Sequentials": (
        lambda: nn.Sequential(mlp(), nn.Sequential(nn.Linear(4, 2))),
        ["0.0.weight", "0.2.weight", "0.4.weight"],
    ),
    "one layer": (lambda: nn.Sequential(nn.Linear(8, 4)), []),
    "lstm": (lstm, ["1.weight_ih_l0", "1.weight_hh_l0"]),
    "convolutions": (conv_net, ["3.weight"]),
    "frozen": (frozen, of_blocks("layers")[2:]),
    "compiled": (lambda: torch.compile(GPT()), [f"_orig_mod.{name}" for name in of_blocks("layers")]),
    "wrapped": (wrapped, [f"module.layers.{i}._checkpoint_wrapped_module.{name}" for i in range(2) for name in BLOCK]),
}  # fmt: skip


@pytest.mark.parametrize(("build", "expected"), MODELS.values(), ids=MODELS)
def test_matrices(build, expected):
    model = build()
    matrices, others = hidden_matrices(model)
    assert list(matrices) == expected
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {**matrices, **others}.keys() == trained.keys() and not matrices.keys() & others.keys()
    assert all(p is trained[name] for name, p in {**matrices, **others}.items())
    if matrices:
        torch.optim.Muon(matrices.values(), lr=1e-3)
    torch.optim.AdamW(others.values(), lr=1e-3)


class Mamba(nn.Module):
    """A block of Mamba: ``A_log`` and ``D`` multiply entry by entry."""

    def __init__(self, width=8, state=4):
        super().__init__()
        self.in_proj, self.conv1d = nn.Linear(width, 4 * width), nn.Conv1d(2 * width, 2 * width, 4, groups=2 * width)
        self.x_proj, self.dt_proj = nn.Linear(2 * width, 2 + 2 * state), nn.Linear(2, 2 * width)
        self.A_log, self.D = nn.Parameter(torch.zeros(2 * width, state)), nn.Parameter(torch.ones(2 * width))
        self.out_proj = nn.Linear(2 * width, width)


MAMBA = [f"{name}.weight" for name in ("in_proj", "x_proj", "dt_proj", "out_proj")]


class Holder(nn.Module):
    """What is given, as attributes in this order."""

    def __init__(self, **given):
        super().__init__()
        for name, value in given.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)


class ParallelLinear(nn.Module):
    """A linear layer that is no torch.nn.Linear."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(out, width))


class HeadwiseLayerNorm(ParallelLinear):
    """As Cohere's: a weight for each entry of each head."""


def body():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())


def block(**given):
    """In a model whose head is found by its name."""
    return Holder(h=nn.ModuleList([Holder(up=nn.Linear(8, 8), **given)]), lm_head=nn.Linear(8, 32))


UP, HIDDEN = "h.0.up.weight", ["body.0.weight", "body.2.weight"]


def raw_tables():
    return Holder(wte=torch.zeros(32, 8), wpe=torch.zeros(4, 8), h=nn.ModuleList([Block()]), lm_head=nn.Linear(8, 32))


def tied_table():
    model = raw_tables()
    model.lm_head.weight = model.wte
    return model


def lora(names=("lora_A", "lora_B")):
    tensors = dict(zip(names, (torch.zeros(2, 8), torch.zeros(8, 2)), strict=True))
    return block(**tensors)


#: What multiplies no hidden vector as a whole, or is an output layer.
NO_MATRICES = {
    "mamba": (
        lambda: Holder(layers=nn.ModuleList([Mamba()]), lm_head=nn.Linear(8, 32)),
        [f"layers.0.{n}" for n in MAMBA],
    ),
    "one row": (lambda: block(value=nn.Linear(8, 1)), [UP]),
    "one column": (lambda: block(widen=nn.Linear(1, 8)), [UP]),
    "a raw row and a raw column": (lambda: block(weight=torch.zeros(1, 8), up_weight=torch.zeros(8, 1)), [UP]),
    "raw wte and wpe": (raw_tables, of_blocks("h", 1)),
    "raw wte, tied": (tied_table, of_blocks("h", 1)),
    "modules called wte and wpe": (lambda: block(wte=ParallelLinear(8, 32), wpe=ParallelLinear(8, 4)), [UP]),
    "policy and value": (lambda: Holder(body=body(), policy=nn.Linear(16, 4), value=nn.Linear(16, 1)), HIDDEN),
    "value and policy, unnamed": (lambda: Holder(body=body(), v=nn.Linear(16, 1), pi=nn.Linear(16, 4)), HIDDEN),
    "mean and deviation": (lambda: Holder(body=body(), mean=nn.Linear(16, 3), log_std=nn.Linear(16, 3)), HIDDEN),
    "actor and critic": (
        lambda: Holder(actor=body().append(nn.Linear(16, 4)), critic=body().append(nn.Linear(16, 2))),
        ["actor.0.weight", "actor.2.weight", "critic.0.weight", "critic.2.weight"],
    ),
    "a layer that feeds the last": (
        lambda: Holder(body=body(), down=nn.Linear(16, 4), up=nn.Linear(4, 16)),
        [*HIDDEN, "down.weight"],
    ),
    "position biases": (lambda: block(relative_position_bias_table=torch.zeros(9, 4)), [UP]),
    "latents, queries, codebook": (
        lambda: block(latents=torch.zeros(4, 8), queries=torch.zeros(4, 8), codebook=torch.zeros(4, 8)),
        [UP],
    ),
    "tokens": (
        lambda: block(
            cls_token=torch.zeros(1, 1, 8), register_tokens=torch.zeros(4, 8), pos_embed=torch.zeros(1, 5, 8)
        ),
        [UP],
    ),
    "rotary angles, scales": (
        lambda: block(freqs=torch.zeros(4, 4), logit_scale=torch.zeros(()), gamma=torch.zeros(4, 8)),
        [UP],
    ),
    "prompts in a dict": (lambda: block(prompts=nn.ParameterDict({"a": nn.Parameter(torch.zeros(4, 8))})), [UP]),
    "a norm of two dimensions": (lambda: block(norm=nn.LayerNorm([4, 8])), [UP]),
    "a norm for each head": (lambda: block(q_norm=HeadwiseLayerNorm(8, 4)), [UP]),
    "lora": (lora, ["h.0.lora_A", "h.0.lora_B", UP]),
    "lora's layers": (
        lambda: block(lora_A=nn.ModuleDict({"default": nn.Linear(8, 2, bias=False)})),
        [UP, "h.0.lora_A.default.weight"],
    ),
    "lora of an embedding": (
        lambda: block(lora_embedding_A=nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 8))})),
        [UP],
    ),
    "a router and experts": (
        lambda: block(gate=nn.Linear(8, 4), experts=nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])),
        [UP, "h.0.gate.weight", "h.0.experts.0.weight", "h.0.experts.1.weight"],
    ),
    "a router of another class": (lambda: block(router=ParallelLinear(8, 4)), [UP, "h.0.router.weight"]),
    "raw weights": (
        lambda: block(w1=torch.zeros(8, 8), Wq=torch.zeros(8, 8), kernel=torch.zeros(8, 8), o_proj=torch.zeros(8, 8)),
        [*(f"h.0.{n}" for n in ("w1", "Wq", "kernel", "o_proj")), UP],
    ),
    "weights in a list": (lambda: block(weights=nn.ParameterList([torch.zeros(8, 8)])), [UP, "h.0.weights.0"]),
    "weight norm": (
        lambda: block(normed=nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
        [UP, "h.0.normed.parametrizations.weight.original1"],
    ),
}


@pytest.mark.parametrize(("build", "expected"), NO_MATRICES.values(), ids=NO_MATRICES)
def test_what_is_no_matrix(build, expected):
    matrices, others = hidden_matrices(build())
    assert sorted(matrices) == sorted(expected)
    assert len(matrices) + len(others) == len(list(build().parameters()))
    torch.optim.Muon(matrices.values(), lr=1e-3)


def test_filters_in_groups_are_no_matrix():
    layers = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(8, 4)
    assert list(hidden_matrices(nn.Sequential(*layers), filters=True)[0]) == ["0.weight", "2.weight"]


def test_filters():
    matrices, _ = hidden_matrices(conv_net(), filters=True)
    assert list(matrices) == ["0.0.weight", "1.0.weight", "3.weight"]


def test_others_replace_names_and_the_order_of_layers():
    model = ViT()
    assert list(hidden_matrices(model, others=["teacher.*", "*pos_embed", "cls_token"])[0]) == [
        "patch_embed.proj.weight",
        *of_blocks("blocks"),
        "head.0.weight",
        "head.2.weight",
    ]
    # Names are those of the model without its wrappers.
    assert len(hidden_matrices(wrapped(), others=["layers.0.*", "lm_head.weight", "positions"])[0]) == 2


@pytest.mark.parametrize("tied", ["tied", "own"])
def test_others_keep_embeddings_apart(tied):
    matrices, others = hidden_matrices(GPT(tied), others=[])
    assert ("lm_head.weight" in matrices) == (tied == "own")
    assert "tok.weight" in others and "positions" in matrices


@pytest.mark.parametrize(("build", "expected"), MODELS.values(), ids=MODELS)
def test_demo_has_the_rule_that_its_docstring_says(build, expected):
    model = build().requires_grad_(True)
    compression = DeMo(model, orthogonal="matrices", min_numel=1, collectives=ThreadWorld(1).collectives(0))
    engine = compression.engine
    taken = {
        id(p)
        for name, p in zip(engine.names, engine.parameters, strict=True)
        if name in compression._names and p.dim() >= 2
    }
    assert taken == {id(p) for p in hidden_matrices(model, filters=True, others=[])[0].values()}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([{"a": 1}], {}, TypeError, r"takes a torch\.nn\.Module, got dict"),
        ([GPT().named_parameters()], {}, TypeError, "takes a torch.nn.Module, got generator"),
        ([GPT()], {"others": "lm_head.weight"}, TypeError, r'list of names or patterns, such as \["head\.\*"\], got'),
        ([GPT()], {"others": [1]}, TypeError, "list of names"),
        ([GPT()], {"others": ["heads.*"]}, ValueError, "'heads.*' fits no parameter"),
        ([GPT()], {"filters": "no"}, TypeError, "filters must be True or False"),
    ],
)
def test_wrong_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        hidden_matrices(*arguments, **options)
