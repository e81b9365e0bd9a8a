"""A model in, its pairs out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxq.annotate.bits import Numbers, is_quantizer_clip, levels_used, numbers_of, read_bits
from onnxq.annotate.files import read_model
from onnxq.annotate.find import Chain, chains, operators, role_of, site_of
from onnxq.annotate.model import Inspection, PairInfo
from onnxq.annotate.notes import Notes, read_notes
from onnxq.annotate.operators import find_operators
from onnxq.annotate.saturation import find_saturating
from onnxq.graph import GraphIndex, inline_functions, name_nodes
from onnxq.graph.scopes import function_id
from onnxq.plan.names import DEQUANTIZE, QUANTIZE
from onnxq.sites import Caution, Role

_PAIR_OPS = (QUANTIZE, DEQUANTIZE)


def inspect_model(source: str | Path | ModelProto) -> Inspection:
    """Read a model and list its pairs, its integer operators and what its weights can overflow.

    Raises ModelError for a file that cannot be read.
    """
    proto, warnings = prepare(source)
    name = "" if isinstance(source, ModelProto) else str(source)
    index = GraphIndex(proto)
    return Inspection(
        proto,
        find_pairs(proto),
        source=name,
        warnings=warnings,
        operators=find_operators(index),
        weights=find_saturating(index),
    )


def find_pairs(proto: ModelProto) -> tuple[PairInfo, ...]:
    """Every pair of every scope, in the order the model runs in, each with the bits the file says it has.

    Nodes without a name of their own are called as `name_nodes` would call them.
    """
    named = name_nodes(proto)
    index, notes = GraphIndex(named), read_notes(named)
    return tuple(pair_info(index, chain, notes) for chain in chains(index))


def prepare(source: str | Path | ModelProto) -> tuple[ModelProto, tuple[Caution, ...]]:
    """The model with every node named and, when functions hold pairs, those inlined; and what must be said of it."""
    model = read_model(source)
    proto = name_nodes(model.proto)
    notes = (*model.notes, *read_notes(proto).problems)
    holders = [f for f in proto.functions if any(n.op_type in _PAIR_OPS for n in f.node)]
    if not holders:
        return proto, notes
    names = ", ".join(function_id(function) for function in holders[:3])
    text = f"functions that hold pairs were inlined, so that each pair has a name of its own: {names}"
    return name_nodes(inline_functions(proto)), (*notes, Caution("W106", text))


def pair_info(index: GraphIndex, chain: Chain, notes: Notes) -> PairInfo:
    """All that the file says of one chain."""
    numbers = numbers_of(index, chain)
    levels = levels_used(index, chain, numbers)
    bits, origin = read_bits(index, chain, numbers, noted=notes.bits(chain), levels=levels)
    if not is_quantizer_clip(index, chain, numbers):
        chain = without_clip(index, chain)
    record = notes.record(chain)
    clip = chain.outer or chain.inner
    scale = numbers.scale
    return PairInfo(
        site=site_of(index, chain, record.get("site")),
        role=_noted_role(record) or role_of(index, chain, numbers.storage),
        scope=chain.last.scope,
        quantize=chain.quantize.name if chain.quantize is not None else "",
        dequantize=chain.dequantize.name if chain.dequantize is not None else "",
        clip=clip.name if clip is not None and clip.op_type == "Clip" else "",
        ops=operators(index, chain),
        bits=bits,
        origin=origin,
        storage=numbers.storage,
        symmetric=_symmetric(record, numbers, bits),
        granularity=numbers.granularity,
        scales=0 if scale is None else int(scale.size),
        scale_min=math.nan if scale is None or not scale.size else float(scale.min()),
        scale_max=math.nan if scale is None or not scale.size else float(scale.max()),
        levels=levels,
    )


def without_clip(index: GraphIndex, chain: Chain) -> Chain:
    """The chain beginning at its quantize node: the Clip in front is the network's own."""
    if chain.outer is None or chain.quantize is None:
        return chain
    source = index.resolve(chain.quantize.inputs[0], chain.quantize.scope)
    return replace(chain, source=source, outer=None)


def _noted_role(record: Mapping[str, Any]) -> Role | None:
    text = record.get("role")
    return Role(text) if text in {role.value for role in Role} else None


def _symmetric(record: Mapping[str, Any], numbers: Numbers, bits: int) -> bool:
    if record.get("scheme") in ("symmetric", "asymmetric"):
        return bool(record["scheme"] == "symmetric")
    middle = 0 if numbers.element_type.signed else 2 ** (bits - 1)
    zero = numbers.zero_point
    return bool((zero == middle).all()) if zero is not None else middle == 0
