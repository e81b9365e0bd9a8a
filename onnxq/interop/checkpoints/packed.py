"""GPTQ, AWQ and compressed-tensors: matrices in safetensors, their codes packed into words of 32 bits.

GPTQ, as AutoGPTQ and GPTQModel save it:

    qweight  int32 [columns · bits / 32, rows], packed along the columns
    qzeros   int32 [groups, rows · bits / 32], zero points; version 1 stores them less 1
    scales   float [groups, rows]
    g_idx    int32 [columns], the group of each column

AWQ, as AutoAWQ saves it for its GEMM kernel:

    qweight  int32 [columns, rows / 8], eight rows to a word in the order 0 2 4 6 1 3 5 7
    qzeros   int32 [groups, rows / 8], packed alike
    scales   float16 [groups, rows]

compressed-tensors, as llm-compressor saves it:

    pack-quantized  weight_packed int32 [rows, columns · bits / 32], codes raised to be unsigned; weight_shape [2];
                    weight_zero_point int32 [rows · bits / 32, groups], packed along the rows; weight_g_idx [columns]
    int-quantized   weight int8 [rows, columns]; weight_zero_point int8; input_scale and input_zero_point of static data
    both            weight_scale [rows, groups], [rows, 1], [rows], [1] or []; no zero points: they are 0
"""

import math
import re
from functools import partial

import numpy as np

from onnxq.arrays import Array, as_float32, as_int32
from onnxq.interop.checkpoints.base import (
    MOST_BITS,
    Checkpoint,
    CheckpointFiles,
    CheckpointFormat,
    CheckpointWeight,
    InputScale,
    StoredTensor,
    WeightCodes,
    describe_form,
    fault,
    find_group_size,
    list_weights,
    unpack_words,
)
from onnxq.sites import JsonObject

# In the configuration's `checkpoint_format`: zero points are stored as they are.
_SECOND = "gptq_v2"
_AWQ_BITS = 4
# The place of each row among the eight of a word.
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
# Half of the range of signed bytes, which compressed-tensors divides the largest magnitude of a token by.
_TOKEN_STEPS = 127.5


def _recognize_gptq(files: CheckpointFiles) -> bool:
    return bool(
        files.settings.get("quant_method", "gptq" if "desc_act" in files.settings else "") == "gptq"
    )


def _read_gptq(files: CheckpointFiles) -> Checkpoint:
    stored = files.settings.get("checkpoint_format", "gptq")
    if stored not in ("gptq", _SECOND):
        raise fault(
            files.path,
            f"its packing {stored!r} is made for one kernel",
            "save it as gptq or gptq_v2",
        )
    return list_weights(files, "GPTQ", ".qweight", _find_gptq_weight)


def _find_gptq_weight(files: CheckpointFiles, name: str) -> CheckpointWeight:
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
    read = partial(_read_gptq_weight, files, name, bits, size, columns)
    return CheckpointWeight(
        name, (rows, columns), size, describe_form(bits, size, columns, act_order), read
    )


def _read_gptq_weight(
    files: CheckpointFiles, name: str, bits: int, size: int, columns: int
) -> WeightCodes:
    parts = files.find_parts(name, "qweight", "qzeros", "scales")
    words, zeros, scales = (part.read() for part in parts)
    # What GPTQModel calls v2; AutoGPTQ and all that followed it wrote the other.
    offset = int(files.settings.get("checkpoint_format") != _SECOND)
    zero = as_int32(unpack_words(zeros, bits, words.shape[1]).T) + offset
    if zero.max() >> bits:
        cause = (
            f"a zero point of {zero.max()} is beyond its {bits} bits: the format stores them less 1"
        )
        raise fault(name, cause, f"save the checkpoint as {_SECOND}, or quantize it symmetrically")
    codes = WeightCodes(
        codes=unpack_words(words.T, bits, columns),
        scale=as_float32(scales.T),
        zero=zero,
        bits=bits,
        size=size,
    )
    listed = files.tensors.get(f"{name}.g_idx")
    return codes if listed is None else codes.sort_columns(name, listed.read())


GPTQ = CheckpointFormat("gptq", _recognize_gptq, _read_gptq)


def _read_awq(files: CheckpointFiles) -> Checkpoint:
    stored = files.settings.get("version", files.settings.get("checkpoint_format", "gemm"))
    version = str(stored).lower()
    bits = files.settings.get("bits", _AWQ_BITS)
    if version != "gemm" or bits != _AWQ_BITS:
        raise fault(
            files.path,
            f"AWQ of version {version!r} in {bits} bits is not read",
            "save it as gemm in 4 bits",
        )
    return list_weights(files, "AWQ", ".qweight", _find_awq_weight)


def _find_awq_weight(files: CheckpointFiles, name: str) -> CheckpointWeight:
    codes, scales = files.find_parts(name, "qweight", "scales")
    columns = codes.shape[0]
    groups, rows = scales.shape
    size = find_group_size(name, columns, groups, files.settings.get("group_size"))
    read = partial(_read_awq_weight, files, name, size)
    return CheckpointWeight(
        name, (rows, columns), size, describe_form(_AWQ_BITS, size, columns), read
    )


def _read_awq_weight(files: CheckpointFiles, name: str, size: int) -> WeightCodes:
    codes, zeros, scales = files.find_parts(name, "qweight", "qzeros", "scales")
    return WeightCodes(
        codes=_unpack_rows(codes.read()),
        scale=scales.read_floats().T,
        zero=_unpack_rows(zeros.read()),
        bits=_AWQ_BITS,
        size=size,
    )


def _unpack_rows(words: Array) -> Array:
    """[columns, rows / 8] to uint8 [rows, columns]."""
    rows = words.shape[1] * 8
    places = unpack_words(words, _AWQ_BITS, rows).reshape(len(words), -1, 8)
    return places[..., _PLACES].reshape(-1, rows).T


AWQ = CheckpointFormat("awq", lambda files: files.settings.get("quant_method") == "awq", _read_awq)


def _recognize_compressed(files: CheckpointFiles) -> bool:
    return files.settings.get("quant_method") in ("compressed-tensors", "sparseml")


def _read_compressed(files: CheckpointFiles) -> Checkpoint:
    return list_weights(files, "compressed-tensors", ".weight_scale", _find_compressed_weight)


def _find_compressed_weight(files: CheckpointFiles, name: str) -> CheckpointWeight:
    scheme = _find_scheme(files.settings, name)
    fields = scheme.get("weights") or {}
    bits, kind, strategy = map(fields.get, ("num_bits", "type", "strategy"))
    packed = files.tensors.get(f"{name}.weight_packed")
    tensor = packed or files.tensors[f"{name}.weight"]
    if kind != "int" or bits is None or tensor.dtype != ("I32" if packed else "I8"):
        raise fault(
            name,
            f"{kind} of {bits} bits in {tensor.dtype} is not read, and integers in I8 or packed I32 are",
        )
    # Packed rows may be filled up, so that the words do not say how long they are.
    shape = (
        tuple(map(int, files.tensors[f"{name}.weight_shape"].read())) if packed else tensor.shape
    )
    if len(shape) != 2 or strategy == "block":
        raise fault(
            name,
            f"shape {list(shape)} and strategy {strategy!r} are not read, and matrices in groups are",
        )
    if scheme.get("output_activations"):
        raise fault(name, "its outputs are quantized, which is not read")
    rows, columns = shape
    data = _read_data(files, name, scheme.get("input_activations") or {})
    # [rows] and [1] are one group.
    groups = math.prod(files.tensors[f"{name}.weight_scale"].shape[1:])
    size = (
        columns if groups == 1 else find_group_size(name, columns, groups, fields.get("group_size"))
    )
    words = "" if data is None else "data of each run" if data.scale is None else "static data"
    read = partial(_read_compressed_weight, files, name, bits, size, (rows, columns))
    return CheckpointWeight(
        name, (rows, columns), size, describe_form(bits, size, columns, words), read, data
    )


def _find_scheme(settings: JsonObject, name: str) -> JsonObject:
    """The group of the configuration that names this module, or else the first, of a class of modules."""
    groups: list[JsonObject] = list((settings.get("config_groups") or {}).values())
    for group in groups:
        for target in group.get("targets") or ():
            # A target is a module, the end of its name, a class, or `re:` and a pattern.
            kind, _, pattern = target.rpartition("re:")
            if name.endswith(target) or (
                pattern != target and not kind and re.match(pattern, name)
            ):
                return group
    return next(iter(groups), {})


def _read_data(files: CheckpointFiles, name: str, scheme: JsonObject) -> InputScale | None:
    """How the input is quantized; None: not at all."""
    if not scheme:
        return None
    bits = scheme.get("num_bits")
    kind = scheme.get("type")
    scale, zero = (files.tensors.get(f"{name}.input_{part}") for part in ("scale", "zero_point"))
    if (bits, kind) != (8, "int") or (scale is not None and math.prod(scale.shape) != 1):
        raise fault(
            name,
            f"data in {kind} of {bits} bits is not read, and integers of 8 bits with one scale are",
        )
    if scale is None and scheme.get("strategy") == "token" and scheme.get("symmetric", True):
        return InputScale(1.0, steps=_TOKEN_STEPS)
    if scale is None:
        return InputScale()
    return InputScale(scale.read_floats().item(), zero.read().item() if zero else 0)


def _read_compressed_weight(
    files: CheckpointFiles, name: str, bits: int, size: int, shape: tuple[int, int]
) -> WeightCodes:
    rows, columns = shape
    middle = 1 << (bits - 1)
    groups = -(-columns // size)
    parts = ("weight_packed", "weight", "weight_zero_point", "weight_g_idx")
    packed, plain, stored, listed = (files.tensors.get(f"{name}.{part}") for part in parts)
    codes = unpack_words(packed.read(), bits, columns) if packed else _raise_signed(plain, middle)
    zero = np.full((1, groups), middle, np.uint8)
    if stored is not None:
        zero = (
            unpack_words(stored.read().T, bits, rows).T
            if stored.dtype == "I32"
            else _raise_signed(stored, middle)
        )
    scale = files.tensors[f"{name}.weight_scale"].read_floats()
    scale, zero = (
        np.broadcast_to(array.reshape(-1, groups), (rows, groups)) for array in (scale, zero)
    )
    weight = WeightCodes(codes=codes, scale=scale, zero=zero, bits=bits, size=size)
    # -1 stands for columns that were never assigned, which stay where they are.
    if listed is None or (indices := listed.read()).min(initial=0) < 0:
        return weight
    return weight.sort_columns(name, indices)


def _raise_signed(tensor: StoredTensor | None, middle: int) -> Array:
    """The codes of a signed tensor, shifted to unsigned ones."""
    assert tensor is not None
    return (tensor.read().astype(np.int16) + middle).astype(np.uint8)


COMPRESSED = CheckpointFormat("compressed-tensors", _recognize_compressed, _read_compressed)
