"""compressed-tensors, as llm-compressor saves it.

pack-quantized  weight_packed int32 [rows, columns · bits / 32], codes raised to be unsigned; weight_shape [2];
                weight_zero_point int32 [rows · bits / 32, groups], packed along the rows; weight_g_idx [columns]
int-quantized   weight int8 [rows, columns]; weight_zero_point int8; input_scale and input_zero_point of static data
both            weight_scale [rows, groups], [rows, 1] or [1]; no zero points: they are 0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from onnxq.arrays import Array
from onnxq.interop.checkpoints.base import (
    Checkpoint,
    CheckpointFiles,
    CheckpointFormat,
    CheckpointWeight,
    InputScale,
    WeightCodes,
    describe_form,
    find_group_size,
    order_columns,
    unpack_words,
)


def _recognize_compressed(files: CheckpointFiles) -> bool:
    return files.settings.get("quant_method") in ("compressed-tensors", "sparseml")


def _read_compressed(files: CheckpointFiles) -> Checkpoint:
    weights, refused = [], {}
    for name in files.list_modules(".weight_scale"):
        scheme = _find_scheme(files.settings, name)
        packed, plain = (files.tensors.get(f"{name}.{part}") for part in ("weight_packed", "weight"))
        tensor = packed or plain
        fields: Mapping[str, Any] = scheme.get("weights") or {}
        bits, kind = int(fields.get("num_bits", 8)), fields.get("type", "int")
        if tensor is None or kind != "int" or tensor.dtype != ("I8" if packed is None else "I32"):
            stored = "nothing" if tensor is None else tensor.dtype
            refused[name] = f"{kind} of {bits} bits stored in {stored}: integers in int8 or packed int32 are read"
            continue
        shape = tensor.shape
        if packed is not None:
            shape = tuple(map(int, files.tensors[f"{name}.weight_shape"].read().ravel()))
        if len(shape) != 2 or fields.get("strategy") == "block":
            refused[name] = (
                f"its shape {list(shape)} in strategy {fields.get('strategy')!r}: matrices in groups are read"
            )
            continue
        data = _read_data(files, name, scheme.get("input_activations") or {})
        if isinstance(data, str):
            refused[name] = data
            continue
        scales = files.tensors[f"{name}.weight_scale"].shape
        groups = scales[1] if len(scales) > 1 else 1
        size = shape[1] if groups == 1 else find_group_size(name, shape[1], groups, fields.get("group_size"))
        words = "" if data is None else "data of each run" if data.scale is None else "static data"
        form = describe_form(bits, size, shape[1], words)
        read = partial(_read_weight, files, name, bits, size, (shape[0], shape[1]))
        weights.append(CheckpointWeight(name, (shape[0], shape[1]), form, read, data))
    return Checkpoint(str(files.path), "compressed-tensors", tuple(weights), refused)


def _find_scheme(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The group of the configuration that names this module, or else a class of modules."""
    groups: list[Mapping[str, Any]] = list((settings.get("config_groups") or {}).values())
    for group in groups:
        for target in group.get("targets") or ():
            pattern = target.removeprefix("re:") if target.startswith("re:") else re.escape(target)
            if re.match(pattern if target.startswith("re:") else f"(.*\\.)?{pattern}$", name):
                return group
    return groups[0] if groups else {}


def _read_data(files: CheckpointFiles, name: str, scheme: Mapping[str, Any]) -> InputScale | str | None:
    """How the input is quantized; None: not at all; a text: why that cannot be."""
    stored = files.tensors.get(f"{name}.input_scale")
    if not scheme and stored is None:
        return None
    if scheme.get("num_bits", 8) != 8 or scheme.get("type", "int") != "int":
        return f"its input in {scheme.get('type')} of {scheme.get('num_bits')} bits: integers of 8 bits are read"
    if stored is None:
        return InputScale()
    scale, zero = stored.read_floats(), files.tensors.get(f"{name}.input_zero_point")
    if scale.size != 1:
        return f"its input has {scale.size} scales, and one for the tensor is read"
    return InputScale(float(scale.ravel()[0]), 0 if zero is None else int(zero.read_floats().ravel()[0]))


def _read_weight(files: CheckpointFiles, name: str, bits: int, size: int, shape: tuple[int, int]) -> WeightCodes:
    rows, columns = shape
    middle = 1 << (bits - 1)
    packed = files.tensors.get(f"{name}.weight_packed")
    plain = files.tensors.get(f"{name}.weight")
    if packed is not None:
        codes = unpack_words(packed.read(), bits, columns)
    else:
        assert plain is not None
        codes = _raise_signed(plain.read(), middle)
    scale = files.tensors[f"{name}.weight_scale"].read_floats()
    groups = -(-columns // size)
    scale = np.ascontiguousarray(np.broadcast_to(scale.reshape(-1, groups), (rows, groups)))
    zero = np.full((rows, groups), middle, np.uint8)
    stored = files.tensors.get(f"{name}.weight_zero_point")
    if stored is not None and stored.dtype == "I32" and packed is not None:
        zero = unpack_words(stored.read().T, bits, rows).T
    elif stored is not None:
        zero = np.broadcast_to(_raise_signed(stored.read(), middle).reshape(-1, groups), zero.shape)
    listed = files.tensors.get(f"{name}.weight_g_idx")
    order = None
    # -1 stands for columns that were never assigned, which stay where they are.
    if listed is not None and (indices := listed.read()).min(initial=0) >= 0:
        order = order_columns(name, indices, size)
        codes = codes if order is None else codes[:, order]
    return WeightCodes(codes=codes, scale=scale, zero=zero, bits=bits, size=size, order=order)


def _raise_signed(values: Array, middle: int) -> Array:
    return (values.astype(np.int16) + middle).astype(np.uint8)


COMPRESSED = CheckpointFormat("compressed-tensors", _recognize_compressed, _read_compressed)
