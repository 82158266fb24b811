"""Hidden matrices of a model, for Muon."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..engine.arguments import NamedParameters, check_flag, find_name, named_pairs, plain_names, refuse_flattened

_EMBEDDING = re.compile(r"embed(ding)?s?(_|$)|^w[tp]e$")
_POSITIONS = re.compile(r"(^|_)(pos|positions?|tokens?)(_|$)")
_HEAD = re.compile(r"(^|_)(heads?|classifier|logits|policy|actor|critic)$")
_WEIGHT = re.compile(r"weight|kernel|proj|lora|^w([qkvo\d_]|$)", re.IGNORECASE)
_NO_LAYER = re.compile("Norm$|Embedding")  # classes


def hidden_matrices(
    model: nn.Module, *, filters: bool = False, others: Iterable[str] | None = None
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Divides a model's trained parameters: its hidden matrices, for Muon, and the others, for AdamW.

    The others are all vectors and scalars, the embeddings and the output layer (head). Frozen parameters are in
    neither. A tied parameter is listed once, with the others if one of its modules is an embedding or a head. By
    default these count as vectors, embeddings and head:

    - shapes (n, 1) and (1, n), norms and convolutions in groups, and what its module does not call a weight
      (``weight``, ``up_proj``, ``lora_A``, ``w1`` or similar), such as ``A_log``, ``wte`` and ``latents``;
    - the weights of ``torch.nn.Embedding`` and ``EmbeddingBag``, and parameters with a part such as ``embed``,
      ``patch_embedding`` or ``wte`` in their name, or called ``positions``, ``cls_token`` or similar;
    - the last matrix of each layer called ``head``, ``lm_head``, ``classifier``, ``logits``, ``policy`` or similar. If
      there is no such layer: the last ``torch.nn.Linear`` in the order of ``model.modules()``, and those before it
      whose output it cannot take (policy and value). The blocks of a model are not searched: the elements of a
      ``ModuleList`` or ``ModuleDict``, and those of one class in a ``Sequential``.

    Print ``others.keys()`` once for a new model. A head that neither has such a name nor is last is not found, and
    without a head of its own (``logits = x @ embedding.weight.T``) a model's last ``Linear`` outside of blocks counts
    as one: give ``others=`` then.

    ``DeMo(model, orthogonal="matrices")`` has another rule, with which it was measured: that of
    ``hidden_matrices(model, filters=True, others=[])``, frozen parameters included.

    Example::

        matrices, others = hvd_compress.hidden_matrices(model)
        muon = torch.optim.Muon(matrices.values(), lr=3e-3, adjust_lr_fn="match_rms_adamw")  # AdamW's learning rates
        adamw = torch.optim.AdamW(others.values(), lr=3e-3)

    Args:
        model: also wrapped, compiled or sharded by FSDP2.
        filters: whether tensors of more than two dimensions, such as the filters of convolutions, are matrices, too.
            ``torch.optim.Muon`` refuses them.
        others: patterns (:mod:`fnmatch`) of the names of parameters that belong to the others, such as
            ``["out.weight", "*positions"]``, in place of the rules above. The weights of ``Embedding`` and
            ``EmbeddingBag``, vectors and scalars belong to them in any case.

    Returns:
        The matrices and the others, each a dict from name to parameter in the order of ``model.named_parameters()``.

    Raises:
        TypeError: ``model`` is no module, ``others`` no list of strings, or ``filters`` no bool.
        ValueError: a pattern that fits no parameter, or FSDP1 has flattened one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hidden_matrices takes a torch.nn.Module, got {type(model).__name__}")
    filters = check_flag("filters", filters)
    named = list(model.named_parameters())
    plain = plain_names([name for name, _ in named])
    apart = embeddings(model)
    if others is None:
        apart |= _head(model) | _no_weights(model)
        apart |= {id(p) for name, p in model.named_parameters(remove_duplicate=False) if _named_as_other(name)}
    else:
        apart |= _matching(others, plain, [p for _, p in named])
    matrices, rest = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    for name, p in named:
        refuse_flattened(name, p)
        if p.requires_grad:
            is_matrix = (p.dim() == 2 or (filters and p.dim() > 2)) and id(p) not in apart
            (matrices if is_matrix else rest)[name] = p
    return matrices, rest


def orthogonal_names(
    orthogonal: bool | str | Iterable[str], named_parameters: NamedParameters
) -> tuple[frozenset[str], list[tuple[str, nn.Parameter]]]:
    """The names of the parameters that DeMo's ``orthogonal`` selects, and all named parameters."""
    named = named_pairs(named_parameters, "DeMo(model)")
    names = frozenset(name for name, _ in named)
    if isinstance(orthogonal, bool):
        return names if orthogonal else frozenset(), named
    if orthogonal == "matrices":
        if not isinstance(named_parameters, nn.Module):
            raise ValueError(
                'orthogonal="matrices" needs the model, to tell embeddings: give it in place of its named parameters'
            )
        tables = embeddings(named_parameters)
        return frozenset(name for name, p in named if id(p) not in tables), named
    known = isinstance(orthogonal, Iterable) and not isinstance(orthogonal, str)
    listed: list[Any] = list(orthogonal) if known else [orthogonal]
    if not known or not all(isinstance(name, str) for name in listed):
        raise TypeError(f'orthogonal must be a bool, "matrices" or a list of names, got {orthogonal!r:.80}')
    chosen = {name: find_name(name, names) for name in listed}
    if unknown := [name for name, found in chosen.items() if found is None]:
        raise ValueError(f"orthogonal names parameters that do not exist: {', '.join(sorted(unknown))}")
    return frozenset(filter(None, chosen.values())), named


def embeddings(model: nn.Module) -> set[int]:
    """The ids of the weights of all embeddings."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}


def _no_weights(model: nn.Module) -> set[int]:
    """The ids of vectors, and of parameters that are no matrix by their module's class or by their name in it."""
    found = set[int]()
    for path, module in model.named_modules():
        none = _NO_LAYER.search(type(module).__name__) or getattr(module, "groups", 1) != 1
        unnamed = isinstance(module, nn.ParameterList | nn.ParameterDict | ParametrizationList)
        for name, p in module.named_parameters(recurse=False):
            if none or p.numel() in p.shape or not _WEIGHT.search(path.split(".")[-1] if unnamed else name):
                found.add(id(p))
    return found


def _named_as_other(name: str) -> bool:
    parts = name.split(".")
    return any(map(_EMBEDDING.search, parts)) or bool(_POSITIONS.search(parts[-1]) or _HEAD.search(parts[-1]))


def _matching(patterns: Iterable[str], names: list[str], parameters: list[nn.Parameter]) -> set[int]:
    """The ids of the parameters whose names fit a pattern."""
    listed = None if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    if listed is None or not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f'others must be a list of names or patterns, such as ["head.*"], got {patterns!r:.80}')
    found = set[int]()
    for pattern in listed:
        fitting = {id(p) for name, p in zip(names, parameters, strict=True) if fnmatchcase(name, pattern)}
        if not fitting:
            raise ValueError(
                f"others: {pattern!r} fits no parameter: write a name of model.named_parameters() or a pattern, such "
                'as "head.*"'
            )
        found |= fitting
    return found


def _head(model: nn.Module) -> set[int]:
    """The ids of the matrices of the output layers."""
    outside = list(_outside_blocks(model))
    last = list[nn.Linear]()
    for layer in reversed([module for _, module in outside if isinstance(module, nn.Linear)]):
        if any(layer.out_features % later.in_features == 0 for later in last):
            break  # its output feeds a later one, whole or in equal parts
        last.append(layer)
    named = [module for name, module in outside if _HEAD.search(name)]
    layers = [part for module in named or last for part in (module.children() if _is_list(module) else [module])]
    return {id(tensors[-1]) for layer in layers if (tensors := [p for p in layer.parameters() if p.dim() >= 2])}


def _outside_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside ``module``, each with the last part of its name, in order; not those inside blocks."""
    children = list(module.named_children())
    count = Counter(type(child) for _, child in children)
    for name, child in children:
        yield name, child
        repeated = isinstance(module, nn.Sequential) and count[type(child)] > 1 and type(child) is not nn.Sequential
        if not (repeated or _is_list(module)):
            yield from _outside_blocks(child)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)
