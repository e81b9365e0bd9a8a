"""GPTQ, as AutoGPTQ and GPTQModel save it.

qweight  int32 [columns · bits / 32, rows], packed along the columns
qzeros   int32 [groups, rows · bits / 32], zero points; version 1 stores them less 1
scales   float [groups, rows]
g_idx    int32 [columns], the group of each column
"""

from __future__ import annotations

from functools import partial

import numpy as np

from onnxq.interop.checkpoints.base import (
    MOST_BITS,
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

# In the configuration's `checkpoint_format`: zero points are stored as they are.
_SECOND = "gptq_v2"


def _recognize_gptq(files: CheckpointFiles) -> bool:
    return bool(
        files.settings.get("quant_method", "gptq" if "bits" in files.settings else "") == "gptq"
    )


def _read_gptq(files: CheckpointFiles) -> Checkpoint:
    stored = files.settings.get("checkpoint_format", "gptq")
    if stored not in ("gptq", _SECOND):
        raise fault(
            files.path,
            f"its packing {stored!r} is made for one kernel",
            "save it as gptq or gptq_v2",
        )
    return list_weights(files, "GPTQ", ".qweight", _find_weight)


def _find_weight(files: CheckpointFiles, name: str) -> CheckpointWeight:
    codes, scales = files.find_parts(name, "qweight", "scales")
    words, rows = codes.shape
    groups = scales.shape[0]
    listed = files.tensors.get(f"{name}.g_idx")
    columns = listed.shape[0] if listed is not None else words * 32 // int(files.settings["bits"])
    # Single modules may have other bits than the rest.
    bits = words * 32 // columns
    if not 2 <= bits <= MOST_BITS:
        raise fault(name, f"{bits} bits are not read, and 2 to {MOST_BITS} are")
    size = find_group_size(name, columns, groups, files.settings.get("group_size"))
    act_order = "in the order of activations" if files.settings.get("desc_act") else ""
    read = partial(_read_weight, files, name, bits, size, columns)
    return CheckpointWeight(
        name, (rows, columns), describe_form(bits, size, columns, act_order), read
    )


def _read_weight(
    files: CheckpointFiles, name: str, bits: int, size: int, columns: int
) -> WeightCodes:
    parts = files.find_parts(name, "qweight", "qzeros", "scales")
    words, zeros, scales = (part.read() for part in parts)
    # What GPTQModel calls v2; AutoGPTQ and all that followed it wrote the other.
    offset = 0 if files.settings.get("checkpoint_format") == _SECOND else 1
    zero = unpack_words(zeros, bits, words.shape[1]).T.astype(np.int32) + offset
    if zero.max() >> bits:
        cause = (
            f"a zero point of {zero.max()} is beyond its {bits} bits: the format stores them less 1"
        )
        raise fault(name, cause, f"save the checkpoint as {_SECOND}, or quantize it symmetrically")
    codes = WeightCodes(
        codes=unpack_words(words.T, bits, columns),
        scale=scales.T.astype(np.float32),
        zero=zero,
        bits=bits,
        size=size,
    )
    listed = files.tensors.get(f"{name}.g_idx")
    return codes if listed is None else codes.sort_columns(name, listed.read())


GPTQ = CheckpointFormat("gptq", _recognize_gptq, _read_gptq)
