"""GPTQ, as AutoGPTQ and GPTQModel save it.

qweight  int32 [columns · bits / 32, rows], packed along the columns
qzeros   int32 [groups, rows · bits / 32], zero points; version 1 stores them less 1
scales   float [groups, rows]
g_idx    int32 [columns], the group of each column
"""

from __future__ import annotations

from functools import partial

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
    order_columns,
    unpack_words,
)

# In the configuration's `checkpoint_format`: zero points are stored as they are.
_SECOND = "gptq_v2"


def _recognize_gptq(files: CheckpointFiles) -> bool:
    method = files.settings.get("quant_method", "" if "bits" in files.settings else None)
    return method in ("gptq", "") and bool(files.list_modules(".qweight"))


def _read_gptq(files: CheckpointFiles) -> Checkpoint:
    stored = str(files.settings.get("checkpoint_format", "gptq"))
    if stored not in ("gptq", _SECOND):
        raise fault(files.path, f"its packing {stored!r} is made for one kernel", "save it as gptq or gptq_v2")
    weights, refused = [], {}
    for name in files.list_modules(".qweight"):
        words, scales = (files.tensors[f"{name}.{part}"].shape for part in ("qweight", "scales"))
        listed = files.tensors.get(f"{name}.g_idx")
        bits = int(files.settings.get("bits", 4))
        columns = listed.shape[0] if listed is not None else words[0] * 32 // bits
        # Single modules may have other bits than the rest.
        bits = words[0] * 32 // max(1, columns)
        if not 2 <= bits <= MOST_BITS or words[1] != scales[1]:
            refused[name] = f"{bits} bits for {columns} columns and {scales[1]} rows do not go together"
            continue
        size = find_group_size(name, columns, scales[0], files.settings.get("group_size"))
        read = partial(_read_weight, files, name, bits, size, columns, 0 if stored == _SECOND else 1)
        act_order = "in the order of activations" if files.settings.get("desc_act") else ""
        form = describe_form(bits, size, columns, act_order)
        weights.append(CheckpointWeight(name, (words[1], columns), form, read))
    return Checkpoint(str(files.path), "GPTQ", tuple(weights), refused)


def _read_weight(files: CheckpointFiles, name: str, bits: int, size: int, columns: int, offset: int) -> WeightCodes:
    words, zeros, scales = (files.tensors[f"{name}.{part}"].read() for part in ("qweight", "qzeros", "scales"))
    codes = unpack_words(words.T, bits, columns)
    zero = unpack_words(zeros, bits, words.shape[1]).T.astype("int32") + offset
    if zero.max() >> bits:
        cause = f"a zero point of {zero.max()} is beyond its {bits} bits: the format stores them less 1"
        raise fault(name, cause, f"save the checkpoint as {_SECOND}, or quantize it symmetrically")
    listed = files.tensors.get(f"{name}.g_idx")
    order = None if listed is None else order_columns(name, listed.read(), size)
    codes = codes if order is None else codes[:, order]
    return WeightCodes(codes=codes, scale=scales.T.astype("float32"), zero=zero, bits=bits, size=size, order=order)


GPTQ = CheckpointFormat("gptq", _recognize_gptq, _read_gptq)
