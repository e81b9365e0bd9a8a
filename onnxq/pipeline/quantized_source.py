"""A quantized file of any tool as it was read: the same network in float, and the numbers of its pairs.

Operators on integers become float ones between pairs, narrow floats float32, and stored weights the floats that they
stand for, under the names that these had; then every pair is taken out.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from onnx import TensorProto

from onnxq.annotate import OperatorInfo, find_existing, find_operators, read_model
from onnxq.annotate.existing import is_guard
from onnxq.annotate.find import find_chains, is_dynamic, is_quantize
from onnxq.annotate.read import drop_attribute, list_pair_nodes
from onnxq.arrays import Array, as_float32
from onnxq.emit import leave_out_notes
from onnxq.errors import ModelError
from onnxq.graph import Editor, ModelLike, ModelSource, infer_shapes, inline_functions, name_nodes
from onnxq.graph.base import LAYOUT_OPS, POSITIVE_OPS, QUANTIZE, MaybeNode, NodeRef
from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.integer_operators import read_integer_operators
from onnxq.graph.light import bare_proto, copy_proto, rebuild
from onnxq.graph.names import name_file
from onnxq.graph.nbits import read_lookups
from onnxq.graph.precision.narrow import write_types
from onnxq.graph.precision.widen import SourceTypes, emulate_types, read_types, widen_model
from onnxq.graph.scopes import replace_items
from onnxq.numerics import clip_bounds, dequantize, quantize
from onnxq.plan import SitePlan
from onnxq.planner import Existing
from onnxq.planner.rewritten import turn_site
from onnxq.sites import Edge, NameSet, TensorId

# Integers of more bits count and index, in the float network too.
_BYTES = (TensorProto.INT8, TensorProto.UINT8)


@dataclass(frozen=True, eq=False)
class QuantizedSource:
    """A quantized file as it was read. origin: the file. proto: its own graph, in float32, rounding as its types say.

    floats: the same network in float32, without pairs. existing: the pairs. codes: the integers of weights, by readers.
    types: the narrow ones that it came in. mode: that of a configuration. integers: operators that stay on integers.
    """

    origin: ModelSource
    proto: ModelLike
    floats: ModelLike
    existing: Existing
    codes: Mapping[Edge, Array]
    types: SourceTypes
    mode: str
    integers: tuple[OperatorInfo, ...]

    def restore_types(self) -> ModelLike:
        """The network in float, in float32 where its inputs and outputs are."""
        interface = self.types.interface
        if not interface:
            return self.floats
        narrow = self.types.computes
        return write_types(
            self.floats,
            narrow or max(interface.values()),
            () if narrow else None,
            interface=interface,
        )


def read_quantized(source: ModelSource, *, lookups: bool = True) -> QuantizedSource:
    """Read a quantized file, and make its float model.

    lookups: GatherBlockQuantized becomes float, too, which ONNX Runtime alone has, and is its smallest table.

    Raises ModelError for one without pairs, and for operators on integers that are not known.
    """
    # Without the nodes that no output depends on, as genai's builder leaves some: their weights would be nobody's.
    named = Editor(inline_functions(name_nodes(read_model(source, lazy=True).light))).finish()
    types = read_types(named)
    wide = widen_model(named) if types.narrow else named
    paired = read_integer_operators(read_lookups(wide) if lookups else wide)
    proto = _drop_dynamic(paired)
    existing = find_existing(proto)
    if existing.view is None:
        raise ModelError(
            name_file(source) or "model",
            "has no quantize/dequantize pair, and no operator on integers that pairs can stand for",
            "quantize the float model: `onnxq quantize`",
            code="Q125",
        )
    # Names stay, by which numbers are found again; the plan and the bits of the old file do not.
    plain, codes, turned = _store_floats(leave_out_notes(proto, "names"), existing)
    existing = replace(existing, constants=existing.constants + turned)
    # Without constants among them, the pairs that are left are those of activations.
    pairs = find_existing(plain)
    ends = _find_ends(get_index(plain), pairs)
    floats = plain if pairs.view is None else _make_runnable(plain, pairs, ends)
    idle = _find_idle_casts(floats) if types.narrow else frozenset()
    floats = _drop_stand_ins(floats, (pairs.stand_ins | idle) - ends)
    # Of integers that are floats now, or gone.
    kept = [
        value for value in floats.graph.value_info if value.type.tensor_type.elem_type not in _BYTES
    ]
    replace_items(floats.graph.value_info, kept)
    reference = emulate_types(named) if types.narrow else rebuild(named, copy_proto(named))
    for node in list_pair_nodes(bare_proto(reference)):
        # Bits as Sparsebit notes them, which no engine loads.
        drop_attribute(node)
    mode = "static" if existing.by_tensor else "weight-only" if proto is paired else "dynamic"
    return QuantizedSource(
        source, reference, floats, existing, codes, types, mode, find_operators(get_index(floats))
    )


def _find_ends(index: GraphIndex, pairs: Existing) -> NameSet:
    """Half pairs at inputs and outputs of the model that are integers. Raises ModelError for those at an operator."""
    ends = set()
    for name in sorted(pairs.stand_ins):
        node = index.find_node(name)
        begins = is_quantize(node)
        other: MaybeNode = node
        # Full-integer files of tflite turn their integer input around before it is dequantized.
        while other is not None and (other is node or other.op_type in LAYOUT_OPS):
            other = next(iter(index.readers(other.result)), None) if begins else index.maker(other)
        if other is None:
            ends.add(name)
        elif begins or not (is_quantize(other) or other.op_type in ("Clip", "Max")):
            cause = (
                f"{other.op_type} computes on integers, and convert knows no float operator for it"
            )
            raise ModelError(
                other.name, cause, "quantize the float model for this engine", code="Q714"
            )
    return frozenset(ends)


def _drop_dynamic(proto: ModelLike) -> ModelLike:
    """A copy without pairs whose scales are those of each run: they have no numbers."""
    index = GraphIndex(proto)
    chains = [
        chain
        for chain in find_chains(index)
        if is_dynamic(chain.quantize) and chain.dequantize is not None
    ]
    if not chains:
        return proto
    editor = Editor(proto)
    for chain in chains:
        assert chain.source is not None
        editor.rewire(chain.last.result, chain.source.name, outputs=True)
    return editor.finish()


def _store_floats(
    proto: ModelLike, existing: Existing
) -> tuple[ModelLike, dict[Edge, Array], tuple[SitePlan, ...]]:
    """A copy in which stored weights are floats, under the names that they had; and their integers, by readers.

    The last: the weights behind a Transpose, as its readers see them; it becomes part of the float ones.
    """
    index = GraphIndex(proto)
    editor = Editor(proto)
    names = {}
    integers = {}
    turned = []
    for site in existing.constants:
        node = index.find_node(site.dequantize)
        codes = _read_codes(index, node, site)
        # An output keeps its node: an initializer of its name would make the graph give out a constant.
        if codes is None or site.qparams is None or index.is_output(node.result):
            continue
        integers.update(dict.fromkeys(site.named_consumers, codes))
        for reader in index.readers(node.result):
            if reader.op_type == "Transpose" and codes.ndim == 2:
                edges = index.list_consumers(reader.result)
                turned.append(replace(turn_site(site), consumers=edges))
                integers.update(dict.fromkeys(edges, codes.T))
        if isinstance(site.site, TensorId):
            names[node.result] = site.site.name
        editor.remove_node(node.name)
        editor.add_initializer(
            node.scope, node.result.name, dequantize(codes, site.qparams, site.spec)
        )
    # The floats that a tool quantized go with their pair, and leave their name.
    editor.remove_unused()
    for tensor, name in names.items():
        if editor.is_free(name, tensor.scope):
            editor.rename_tensor(tensor, name)
    return editor.export(), integers, tuple(turned)


def _read_codes(index: GraphIndex, node: NodeRef, site: SitePlan) -> Array | None:
    """The integers of a weight, which a tool may have left as the floats in front of its pair, and of a Clip in it."""
    # The bounds of a Clip are those of the site's spec.
    maker = index.maker(index.maker(node, 0, "Clip") or node)
    stored = index.input_value(maker or node, 0)
    if stored is None or site.qparams is None or maker is None or maker.op_type != QUANTIZE:
        return stored
    return quantize(stored, site.qparams, site.spec)


def _find_idle_casts(proto: ModelLike) -> NameSet:
    """Casts from float32 to float32, which stood between narrow floats and wide ones."""
    index = get_index(infer_shapes(proto))
    return frozenset(
        node.name
        for node in index.nodes
        if node.is_onnx("Cast")
        and node.read_int("to", 0) == TensorProto.FLOAT
        and index.find_dtype(index.find_input(node)) == TensorProto.FLOAT
    )


# Upper bounds of the activations that exporters write as Clip: hard sigmoid, ReLU6.
_CLIPPED = (1.0, 6.0)
_PASSING = LAYOUT_OPS | {
    "QuantizeLinear",
    "DequantizeLinear",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "Concat",
    "Clip",
    "Identity",
}


def _make_runnable(plain: ModelLike, pairs: Existing, ends: Collection[str]) -> ModelLike:
    """The view of a model without its pairs, to be run: an Identity has one input, and what cut values off does so.

    ends: nodes that stay as they are. Tools drop a Relu, or a Clip, in front of a QuantizeLinear whose range begins at
    zero, which then computes it, or behind which a Max of the integers does.
    """
    index = get_index(plain)
    view = get_index(pairs.view or plain)
    editor = Editor(view.model)
    cut: dict[TensorId, float] = {}
    for node in index.nodes:
        site = pairs.by_tensor.get(node.result) if node.outputs else None
        if site is None or site.qparams is None:
            continue
        if not site.spec.footroom and (site.qparams.zero_point != site.spec.qmin).any():
            continue
        if not _is_positive(index, node.result, cut):
            # A bound of Clip that the range ends at; where it ends elsewhere, no value went further.
            high = float(clip_bounds(site.qparams, site.spec)[1])
            step = float(site.qparams.scale)
            cut[node.result] = next(
                (bound for bound in _CLIPPED if abs(high - bound) < step), math.inf
            )
    for name in sorted(pairs.stand_ins):
        node = view.find_node(name)
        if name in ends and not node.scope:
            node = index.find_node(name)
            for stored in bare_proto(plain).graph.initializer:
                if stored.name in node.inputs and editor.is_free(stored.name, ""):
                    editor.add_tensor("", stored)
            editor.replace_node(
                node, node.op_type, node.inputs, domain=node.domain, attrs=node.attrs
            )
        else:
            editor.replace_node(node, "Identity", node.inputs[:1])
    for tensor, high in cut.items():
        # None in the place of a pair that is taken out.
        maker = view.find_producer(tensor)
        if maker is not None:
            _cut_values(editor, maker, tensor, high)
    return editor.export()


def _cut_values(editor: Editor[ModelLike], node: NodeRef, tensor: TensorId, high: float) -> None:
    """Put a Relu, or a Clip that begins at zero, behind a node."""
    scope, name = tensor.scope, tensor.name
    bounds = {} if math.isinf(high) else {"low": 0.0, "high": high}
    op_type = "Clip" if bounds else "Relu"
    stored = [
        editor.add_constant(scope, f"{name}/{part}", as_float32(bound))
        for part, bound in bounds.items()
    ]
    linear = editor.fresh(f"{name}/linear")
    # Readers of the pair read the name that they had, as the others in the view do.
    editor.replace_output(node.name, 0, linear)
    editor.insert_node(
        scope,
        op_type,
        [linear, *stored],
        [name],
        name=editor.fresh(f"{name}/{op_type}"),
        after=node.name,
    )


def _drop_stand_ins(proto: ModelLike, names: Collection[str]) -> ModelLike:
    """A copy without nodes that hand values on: those in the place of pairs (names), and guards of an engine."""
    index = GraphIndex(proto)
    editor = Editor(proto)
    for node in index.nodes:
        source = index.find_input(node)
        if source is None or not (node.name in names or is_guard(node)):
            continue
        if not index.is_output(node.result):
            editor.rewire(node.result, source.name)
        # An output keeps its name: its maker writes it, where that stands in the main graph and
        # writes no other output.
        elif index.find_producer(source) is not None and not (
            node.scope or source.scope or index.is_output(source)
        ):
            editor.remove_node(node.name)
            editor.rename_tensor(source, node.outputs[0])
    return editor.finish()


def _is_positive(index: GraphIndex, tensor: TensorId, cut: Collection[TensorId]) -> bool:
    """True where the network itself makes no value below zero. cut: tensors behind a Relu that is put in."""
    maker = index.find_producer(tensor)
    while maker is not None and maker.op_type in _PASSING:
        bound = index.input_value(maker, 1) if maker.op_type == "Clip" else None
        if index.find_input(maker) in cut or (bound is not None and bound.min() >= 0):
            return True
        maker = index.maker(maker)
    return maker is None or maker.op_type in POSITIVE_OPS
