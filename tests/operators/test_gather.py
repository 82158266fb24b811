"""gather against its reference, bitwise."""

import torch
from checks import agrees, bounded, opchecks, refusals, threads
from hypothesis import given
from hypothesis import strategies as st
from strategies import MANY, Layout, kinds, layouts, phases, random_indices, seeds, values

from hvd_compress.reference import BLOCK


def arguments_of(layout: Layout, kind: str, seed: int, spread: int, phase: int) -> list:
    residual, indices = values(layout.blocks * BLOCK, kind, seed), random_indices(layout, seed + 1, spread)
    return [residual, indices, layout.tensor(), torch.full((layout.slots,), 7.0), phase]


def sample() -> list:
    pieces = torch.tensor([[0, 2, 0, 8], [2, 1, 8, 5]])
    return [torch.randn(3 * BLOCK), torch.randint(0, 256, (13,)).to(torch.uint8), pieces, torch.zeros(13), 3]


@bounded(250)
@given(args=st.builds(arguments_of, layouts(), kinds, seeds, st.sampled_from([256, 20, 1]), phases))
def test_equals_reference(device: str, args: list) -> None:
    agrees("gather", args, device)


def test_many_blocks(device: str) -> None:
    for phase in (0, 1, -77, 2500, 2**40):
        with threads(3):
            agrees("gather", arguments_of(MANY, "normal", 5, 256, phase), device)


test_opcheck = opchecks(("gather", sample))


BAD = {
    "residual": (0, lambda x: x.double(), "residual must be Float, got Double"),
    "residual size": (0, lambda x: x[:700].clone(), "residual must have a multiple of 256 entries, got 700"),
    "indices": (1, lambda x: x.long(), "indices must be Byte, got Long"),
    "pieces dtype": (2, lambda x: x.int(), "pieces must be Long, got Int"),
    "pieces shape": (2, lambda x: x[:, :3].contiguous(), "shape .pieces, 4."),
    "pieces order": (2, lambda x: x.flip(0).contiguous(), "pieces must follow"),
    "pieces block": (2, lambda x: x + torch.tensor([1, 0, 0, 0]), "within 3 blocks.*in row 1"),
    "pieces slots": (2, lambda x: x + torch.tensor([0, 0, 1, 0]), "within 3 blocks.*in row 0"),
    "pieces full": (2, lambda x: torch.tensor([[0, 2, 0, 8], [2, 1, 8, 257]]), "pieces must follow"),
    "pieces empty": (2, lambda x: torch.tensor([[0, 3, 0, 13], [3, 0, 13, 0]]), "pieces must follow"),
    "pieces few": (2, lambda x: torch.tensor([[0, 2, 0, 8], [2, 1, 8, 4]]), "must hold all 13 slots, got 12"),
    "values dtype": (3, lambda x: x.half(), "values must be Float, got Half"),
    "values numel": (3, lambda x: x[:12].clone(), "values must have 13 entries, got 12"),
}


test_refuses = refusals("gather", sample, BAD)
