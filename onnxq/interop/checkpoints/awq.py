"""AWQ, as AutoAWQ saves it for its GEMM kernel.

qweight  int32 [columns, rows / 8], eight rows to a word in the order 0 2 4 6 1 3 5 7
qzeros   int32 [groups, rows / 8], packed alike
scales   float16 [groups, rows]
"""

from __future__ import annotations

from functools import partial

import numpy as np

from onnxq.arrays import Array
from onnxq.interop.checkpoints.base import (
    Checkpoint,
    CheckpointFiles,
    CheckpointFormat,
    CheckpointWeight,
    WeightCodes,
    describe_form,
    fault,
    find_group_size,
    list_weights,
    unpack_words,
)

_BITS = 4
# The place of each row among the eight of a word.
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])


def _recognize_awq(files: CheckpointFiles) -> bool:
    return files.settings.get("quant_method") == "awq"


def _read_awq(files: CheckpointFiles) -> Checkpoint:
    stored = files.settings.get("version", files.settings.get("checkpoint_format", "gemm"))
    version = str(stored).lower()
    bits = files.settings.get("bits", _BITS)
    if version != "gemm" or bits != _BITS:
        raise fault(
            files.path,
            f"AWQ of version {version!r} in {bits} bits is not read",
            "save it as gemm in 4 bits",
        )
    return list_weights(files, "AWQ", ".qweight", _find_weight)


def _find_weight(files: CheckpointFiles, name: str) -> CheckpointWeight:
    codes, scales = files.find_parts(name, "qweight", "scales")
    columns = codes.shape[0]
    groups, rows = scales.shape
    size = find_group_size(name, columns, groups, files.settings.get("group_size"))
    read = partial(_read_weight, files, name, size)
    return CheckpointWeight(name, (rows, columns), describe_form(_BITS, size, columns), read)


def _read_weight(files: CheckpointFiles, name: str, size: int) -> WeightCodes:
    codes, zeros, scales = files.find_parts(name, "qweight", "qzeros", "scales")
    return WeightCodes(
        codes=_unpack_rows(codes.read()),
        scale=scales.read_floats().T,
        zero=_unpack_rows(zeros.read()),
        bits=_BITS,
        size=size,
    )


def _unpack_rows(words: Array) -> Array:
    """[columns, rows / 8] to uint8 [rows, columns]."""
    rows = words.shape[1] * 8
    places = unpack_words(words, _BITS, rows).reshape(len(words), -1, 8)
    return places[..., _PLACES].reshape(-1, rows).T


AWQ = CheckpointFormat("awq", _recognize_awq, _read_awq)
