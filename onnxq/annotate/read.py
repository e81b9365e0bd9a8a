"""The pairs of a model, with everything the file says about them, attributes that onnx.checker refuses included."""

from dataclasses import replace

import numpy as np
from onnx import ModelProto, NodeProto, helper

from onnxq.annotate.bits import (
    Inspection,
    Notes,
    Numbers,
    PairInfo,
    PairInfos,
    Record,
    find_used_levels,
    is_quantizer_clip,
    read_bits,
    read_notes,
    read_numbers,
)
from onnxq.annotate.find import Chain, find_chains, find_role, find_site, is_dynamic, list_operators
from onnxq.annotate.operators import find_operators, find_saturating
from onnxq.annotate.quant_nodes import read_quant_nodes
from onnxq.graph import GraphIndex, Model, ModelSource, load_model, name_file, name_nodes
from onnxq.graph.base import DEQUANTIZE, QUANTIZE, MaybeNode
from onnxq.graph.convert import inline_functions
from onnxq.graph.integer_products import read_integer_products
from onnxq.graph.light import ModelLike, bare_proto, store_of
from onnxq.graph.scopes import name_function, walk_all_nodes
from onnxq.sites import Caution, Cautions, Role

# Sparsebit's attribute on Q and DQ nodes.
ATTRIBUTE = "bits"


def read_model(source: ModelSource, *, lazy: bool = False) -> Model:
    """The model as `load_model` reads it, with pairs in the place of QONNX's operators.

    Its Q/DQ nodes may have an integer attribute `bits`, which they keep. Raises ModelError as `load_model` does, and
    for operators of QONNX whose numbers are computed.
    """
    model = load_model(source, lazy=lazy, attribute=ATTRIBUTE)
    read, notes = read_quant_nodes(model.light if lazy else model.proto)
    return replace(model, proto=bare_proto(read), weights=store_of(read), notes=model.notes + notes)


def list_pair_nodes(proto: ModelProto) -> list[NodeProto]:
    """Every QuantizeLinear and DequantizeLinear node, in functions and bodies too."""
    return [node for node in walk_all_nodes(proto) if node.op_type in _PAIR_OPS]


def set_attribute(node: NodeProto, bits: int) -> None:
    """Set the attribute `bits` of a node."""
    drop_attribute(node)
    node.attribute.append(helper.make_attribute(ATTRIBUTE, bits))


def drop_attribute(node: NodeProto) -> int | None:
    """Remove the attribute `bits`; returns its value, None without one."""
    for position, attribute in enumerate(node.attribute):
        if attribute.name == ATTRIBUTE:
            # Before it is deleted, which frees what `attribute` stands for.
            value = int(attribute.i)
            del node.attribute[position]
            return value
    return None


_PAIR_OPS = (QUANTIZE, DEQUANTIZE)


def inspect_model(source: ModelSource) -> Inspection:
    """Read a model and list its pairs, its integer operators and the weights that can overflow 16-bit sums.

    Raises ModelError for a file that cannot be read.
    """
    proto, warnings = read_named(source)
    return Inspection(
        proto,
        find_pairs(proto),
        source=name_file(source),
        warnings=warnings,
        # What is multiplied on scales of each run counts as pairs; the rest of the operators stays.
        operators=find_operators(GraphIndex(read_integer_products(proto))),
        weights=find_saturating(GraphIndex(proto)),
        float_types=read_notes(proto).float_types,
    )


def find_pairs(proto: ModelLike, notes: Notes | None = None) -> PairInfos:
    """Every pair of every scope, in the order of execution, each with its bits. notes: in the place of the model's.

    Nodes without a name of their own get the one that `name_nodes` gives them; of products on scales of each run, pairs
    have the nodes of `read_integer_products`, which the file may not have.
    """
    named = read_integer_products(name_nodes(proto))
    index = GraphIndex(named)
    notes = notes or read_notes(named)
    return tuple(describe_pair(index, chain, notes) for chain in find_chains(index))


def read_named(source: ModelSource) -> tuple[ModelProto, Cautions]:
    """The model with every node named and functions that hold pairs inlined; and the warnings about it."""
    model = read_model(source)
    proto = name_nodes(model.proto)
    notes = model.notes + read_notes(proto).problems
    # Pairs in a function have one name however often it is called, so calls are inlined first.
    holders = [f for f in proto.functions if any(n.op_type in _PAIR_OPS for n in f.node)]
    if not holders:
        return proto, notes
    names = ", ".join(map(name_function, holders[:3]))
    text = (
        f"functions that hold pairs were inlined, so that each pair has a name of its own: {names}"
    )
    return inline_functions(proto), (*notes, Caution("W106", text))


def describe_pair(index: GraphIndex, chain: Chain, notes: Notes) -> PairInfo:
    """The pair of one chain, as the file describes it."""
    qparams = read_numbers(index, chain)
    levels = find_used_levels(index, chain, qparams)
    bits, origin = read_bits(index, chain, qparams, noted=notes.find_bits(chain), levels=levels)
    chain = drop_clip(index, chain, qparams)
    record = notes.find_record(chain)
    # The inner node may also be the Cast of a packed constant.
    clip = chain.outer or chain.inner
    scale = np.zeros(0) if qparams.scale is None else qparams.scale
    return PairInfo(
        site=find_site(index, chain, record.get("site")),
        role=_read_role(record) or find_role(index, chain, qparams.storage),
        scope=chain.last.scope,
        quantize=_read_name(chain.quantize),
        dequantize=_read_name(chain.dequantize),
        lookup=_read_name(chain.lookup),
        clip=_read_name(clip) if clip is not None and clip.op_type == "Clip" else "",
        ops=list_operators(index, chain),
        bits=bits,
        origin=origin,
        dynamic=is_dynamic(chain.quantize),
        storage=qparams.storage,
        symmetric=_find_scheme(record, qparams, bits),
        granularity=qparams.granularity,
        scales=int(scale.size),
        scale_min=float(scale.min()) if scale.size else np.nan,
        scale_max=float(scale.max()) if scale.size else np.nan,
        levels=levels,
    )


def _read_name(node: MaybeNode) -> str:
    return "" if node is None else node.name


def drop_clip(index: GraphIndex, chain: Chain, qparams: Numbers) -> Chain:
    """The chain from its quantize node on where a Clip in front of that belongs to the network."""
    own = is_quantizer_clip(index, chain, qparams)
    if own or chain.outer is None or chain.quantize is None:
        return chain
    return replace(chain, source=index.find_input(chain.quantize), outer=None)


def _read_role(record: Record) -> Role | None:
    text = record.get("role")
    return Role(text) if text in tuple(Role) else None


def _find_scheme(record: Record, qparams: Numbers, bits: int) -> bool:
    scheme = record.get("scheme")
    if scheme in ("symmetric", "asymmetric"):
        return bool(scheme == "symmetric")
    # The zero point of a symmetric scheme: 0, or the middle of an unsigned range.
    # Of the used bits: uint8 with 4 bits has its middle at 8.
    middle = 0 if qparams.element_type.signed else 2 ** (bits - 1)
    zero = qparams.zero_point
    return bool((zero == middle).all()) if zero is not None else middle == 0
