"""Windows of a text file as tokens, read piece by piece, so that the file may be of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxq.data.fit import Array
from onnxq.data.text.tokenizer import Tokenizer
from onnxq.errors import DataError

# Bytes encoded at a time, up to the end of a line where one is near.
_PIECE = 2**20
# Bytes within which a window looks for the beginning of a line.
_LINE = 4096


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens of a piece of text. ids: integers [T], special tokens around them. size: bytes of its text."""

    ids: Array
    size: float


def read_windows(path: Path, tokenizer: Tokenizer, length: int) -> Iterator[Window]:
    """Read a text from its beginning: windows of `length` tokens, one behind the other; the last may be shorter."""
    kept: list[int] = []
    count = _count_tokens(tokenizer, length, path)
    for piece in _read_pieces(path):
        ids = tokenizer.encode(piece, str(path))
        kept += ids
        # Bytes of a window as its tokens' share of the piece: tokens do not say where they end.
        share = len(piece) / max(len(ids), 1)
        while len(kept) >= count:
            yield _wrap_tokens(kept[:count], tokenizer, share)
            kept = kept[count:]
    if len(kept) > 1:
        yield _wrap_tokens(kept, tokenizer, share)


def choose_windows(path: Path, tokenizer: Tokenizer, length: int, count: int, seed: int) -> Iterator[Window]:
    """Read `count` windows of `length` tokens from places spread over a text, each at the beginning of a line.

    The seed chooses the place within each of `count` equal parts. A window at the end begins earlier, so that all are
    of one length, and windows may overlap. Fewer where the text has fewer tokens, but one at least.
    """
    wanted, size, rng = _count_tokens(tokenizer, length, path), path.stat().st_size, np.random.default_rng(seed)
    starts = (np.arange(count) + rng.random(count)) * size / count
    with path.open("rb") as file:
        for start in np.unique(starts.astype(np.int64)):
            # As if each token were a byte, and more until there are enough.
            reach = wanted
            while True:
                # Moved to the front where too little text follows.
                first = max(0, min(int(start), size - reach))
                file.seek(first)
                piece = _drop_broken_line(file.read(reach + _LINE)) if first else file.read(reach)
                ids = tokenizer.encode(piece, str(path))
                if len(ids) >= wanted or reach >= size:
                    break
                reach *= 2
            yield _wrap_tokens(ids[:wanted], tokenizer, len(piece) / max(len(ids), 1))
            if len(ids) < wanted:  # these are all
                return


def _drop_broken_line(piece: bytes) -> bytes:
    """Text from the beginning of its next line; without one nearby, from its next whole letter on."""
    end = piece.find(b"\n", 0, _LINE)
    if end >= 0:
        return piece[end + 1 :]
    # Bytes 10xxxxxx continue a letter of UTF-8, which has three of them at most.
    return piece[next((k for k in range(3) if piece[k : k + 1] and piece[k] & 0xC0 != 0x80), 3) :]


def _count_tokens(tokenizer: Tokenizer, length: int, path: Path) -> int:
    """Tokens of text in a window."""
    count = length - len(tokenizer.prefix) - len(tokenizer.suffix)
    if count < 1:
        cause = f"of the {length} tokens of a window none is left beside the special ones"
        raise DataError(path, cause, "give a larger `sequence_length=…`", code="Q224")
    return count


def _wrap_tokens(ids: list[int], tokenizer: Tokenizer, share: float) -> Window:
    return Window(np.array([*tokenizer.prefix, *ids, *tokenizer.suffix], np.int64), len(ids) * share)


def _read_pieces(path: Path) -> Iterator[bytes]:
    """Read a file in pieces that end with a line, where lines are of usual length."""
    left = b""
    with path.open("rb") as file:
        while block := file.read(_PIECE):
            block = left + block
            end = block.rfind(b"\n") + 1 or len(block)
            left = block[end:]
            yield block[:end]
    if left:
        yield left
