"""Tagged text: what each byte of Python's standard library is a part of, a keyword, a name, a comment."""

import io
import keyword
import sysconfig
import tokenize
from pathlib import Path

import torch
from torch import Tensor

from experiment.quality import ACCURACY
from experiment.text import Text, is_held_out, source_files

#: What lies between tokens is layout.
TAGS = ("layout", "name", "keyword", "operator", "number", "string", "comment")
_OF_TOKENS = {"OP": "operator", "NUMBER": "number", "STRING": "string", "COMMENT": "comment"}
#: One of so many files, since Python's tokenizer is slow. A fine-tuning has few examples.
EVERY = 8


class Tagged(Text):
    """Bytes and their tags, both in one number: ``byte + 256 tag``, int16 (length,). A model tells the tag of each byte
    of a window from it and those before."""

    metric = ACCURACY

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        """Different bytes, length of a window, tags."""
        return 256, self.context, len(TAGS)

    def _windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = text[(starts[:, None] + torch.arange(self.context)).to(text.device)].long()
        return windows % 256, windows // 256


def standard_library(context: int) -> Tagged:
    """Some files of the running Python's own; held out are those of :func:`experiment.text.standard_library`."""
    root = Path(sysconfig.get_path("stdlib"))
    names = source_files(root)[::EVERY]
    train, held_out = (
        torch.cat([tagged((root / name).read_bytes()) for name in names if is_held_out(name) is which])
        for which in (False, True)
    )
    return Tagged(train, held_out, context)


def tagged(source: bytes) -> Tensor:
    """``byte + 256 tag`` of each byte of a file: int16 (length,). Nothing of a file that is not ASCII."""
    if not source.isascii():
        return torch.empty(0, dtype=torch.int16)
    lines = [0]
    for line in io.BytesIO(source):
        lines.append(lines[-1] + len(line))
    tags = bytearray(len(source))
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        kind = tokenize.tok_name[token.type]
        name = "keyword" if keyword.iskeyword(token.string) else "name"
        # From Python 3.12 on, an f-string is several tokens.
        tag = name if kind == "NAME" else "string" if kind.startswith("FSTRING") else _OF_TOKENS.get(kind, "layout")
        (row, column), (end_row, end_column) = token.start, token.end
        if tag != "layout":
            begin, end = lines[row - 1] + column, lines[end_row - 1] + end_column
            tags[begin:end] = bytes([TAGS.index(tag)]) * (end - begin)
    codes = [torch.frombuffer(bytearray(part), dtype=torch.uint8).short() for part in (source, tags) if part]
    return codes[0] + 256 * codes[1] if codes else torch.empty(0, dtype=torch.int16)
