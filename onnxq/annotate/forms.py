"""Pairs of few bits rewritten in the form that an engine or a tool reads; all of them compute the same.

clip-qdq  x -> Clip in float -> QuantizeLinear -> DequantizeLinear, in bytes; loads and fuses everywhere
qcdq      x -> QuantizeLinear -> Clip of integers -> DequantizeLinear (Brevitas)
native    x -> QuantizeLinear -> DequantizeLinear in int4, uint4 (opset 21), int2, uint2 (opset 25)
qonnx     x -> Quant (domain qonnx.custom_op.general), weights in float
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnxq.annotate.bits import Notes, PairInfo, is_quantizer_clip, read_clip_levels, read_numbers
from onnxq.annotate.find import Chain, find_chains
from onnxq.annotate.read import drop_clip, find_pairs
from onnxq.annotate.write import make_record
from onnxq.arrays import Array
from onnxq.emit.pairs import PairWriter
from onnxq.errors import OnnxqError
from onnxq.graph import Editor, GraphIndex, ensure_opset
from onnxq.graph.scopes import walk_all_nodes
from onnxq.graph.storage import TENSOR_TYPES
from onnxq.numerics import clip_bounds
from onnxq.plan import SitePlan
from onnxq.plan.names import name_part, site_base
from onnxq.sites import Caution, Cautions, TensorId
from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec

FORMS = ("clip-qdq", "qcdq", "native", "qonnx")
QONNX = "qonnx.custom_op.general"
# Types of ONNX with fewer bits than a byte, and the opset that has them.
_NARROW = {4: 21, 2: 25}
# An integer Clip takes bytes, and DequantizeLinear a scale for each channel.
_OPSET = 13


def rewrite_pairs(
    proto: ModelProto, pairs: Iterable[PairInfo], form: str
) -> tuple[ModelProto, tuple[PairInfo, ...], Cautions]:
    """A copy of the model with its pairs in a form of `FORMS`, the pairs there, and a warning of those that stay.

    The nodes keep their names; those of `Quant` nodes are the names of the DequantizeLinear.
    """
    before = {pair.nodes[-1]: pair for pair in pairs if pair.nodes}
    # Only the newest type asks for the newest opset.
    newest = (_NARROW.get(pair.bits, 0) for pair in before.values() if form == "native")
    upgraded = ensure_opset(proto, max([_OPSET, *newest]))
    index = GraphIndex(upgraded)
    editor = Editor(upgraded)
    writer, stay = _FormWriter(index, editor, form), list[str]()
    for chain in find_chains(index):
        pair = before.get(chain.last.name)
        reason = "" if pair is None else writer.rewrite_pair(chain, pair)
        # Whole types need no form but Quant; nobody asks to have a bias of 32 bits in another one.
        if pair is None or not reason or (pair.bits == pair.element_type.bits and form != "qonnx"):
            continue
        if pair.storage != "int32":
            stay.append(f"{pair.site} ({reason})")
    editor.remove_unused()
    model = editor.export()
    made = {node.name for node in walk_all_nodes(model) if node.domain == QONNX}
    after = {name: replace(pair, quantize="", clip="") for name, pair in before.items() if name in made}
    if after and not any(entry.domain == QONNX for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(QONNX, 1))
    notes = Notes({name: make_record(pair) for name, pair in before.items()}, {}, {})
    after |= {pair.nodes[-1]: replace(pair, origin=before[pair.nodes[-1]].origin) for pair in find_pairs(model, notes)}
    warnings: Cautions = ()
    if stay:
        names = ", ".join(stay[:3]) + (" …" if len(stay) > 3 else "")
        warnings = (Caution("W106", f"pairs that {form} cannot write stay as they are ({len(stay)}): {names}"),)
    return model, tuple(after.get(name, pair) for name, pair in before.items()), warnings


class _FormWriter:
    """Rewrites pairs one after the other."""

    def __init__(self, index: GraphIndex, editor: Editor[Any], form: str) -> None:
        self.index, self.form, self.editor = index, form, editor
        self.pairs = PairWriter(editor, index, frozenset(), frozenset(), {})

    def rewrite_pair(self, chain: Chain, pair: PairInfo) -> str:
        """Write one pair in the form; returns why it stays as it is, "" for one that is written, or is so already."""
        numbers, kind = read_numbers(self.index, chain), pair.element_type
        if kind.bits > 16:
            return "it is as wide as an accumulator"
        if chain.lookup is not None or pair.dynamic or kind.is_float or numbers.scale is None or chain.source is None:
            return "its scale or its values are of another kind"
        if chain.dequantize is None or not _reads_alone(self.index, chain):
            return "its integers are read elsewhere"
        levels = read_clip_levels(self.index, chain, numbers)
        if not is_quantizer_clip(self.index, chain, numbers):
            chain = drop_clip(self.index, chain)
        zero = np.zeros(numbers.scale.shape, np.int64) if numbers.zero_point is None else numbers.zero_point
        try:
            spec = self._choose_spec(pair, levels)
        except OnnxqError as error:
            return error.cause
        if zero.min() < spec.qmin or zero.max() > spec.qmax:
            return f"its zero point is no level of {pair.bits} bits"
        if levels not in (None, (spec.qmin, spec.qmax)):
            return f"its Clip leaves other levels than {pair.bits} bits have"
        qparams = QParams(numbers.scale.astype(np.float32), zero.astype(np.int32))
        if self.form == "qonnx":
            return self._write_quant(chain, spec, qparams)
        behind = self.form == "qcdq" or not (spec.has_one_scale or self.index.is_constant(chain.source))
        clip = chain.inner if behind else chain.outer
        if spec.storage == pair.storage and levels is not None and clip is not None:
            return ""
        return self._write_linear(chain, pair, spec, qparams)

    def _choose_spec(self, pair: PairInfo, levels: tuple[int, int] | None) -> QuantSpec:
        """The bits in the type that the form stores them in; a narrow range where a Clip of the file has one."""
        kind, storage = pair.element_type, pair.storage
        sign = "" if kind.signed else "u"
        if self.form == "native" and pair.bits in _NARROW:
            storage = f"{sign}int{pair.bits}"
        elif kind.bits < 8 and self.form in ("clip-qdq", "qcdq"):
            storage = f"{sign}int8"
        grain, wide = pair.granularity, QuantSpec(bits=pair.bits, signed=kind.signed, storage=storage, symmetric=False)
        narrow = kind.signed and levels is not None and levels[0] == wide.qmin + 1
        return replace(wide, granularity=grain, narrow_range=narrow)

    def _write_linear(self, chain: Chain, pair: PairInfo, spec: QuantSpec, qparams: QParams) -> str:
        """Write QuantizeLinear and DequantizeLinear, with the Clip that the form has."""
        editor, quantize, dequantize = self.editor, chain.quantize, chain.last
        name = pair.site.name if isinstance(pair.site, TensorId) else site_base(pair.site)
        site = SitePlan(site=TensorId(name, dequantize.scope), role=pair.role, spec=spec, reason="")
        bounded = not spec.fills_storage or spec.narrow_range
        floats = bounded and self.form != "qcdq" and spec.has_one_scale
        constant, bounds = self.index.is_constant(chain.source), None
        if floats and not constant:
            scale = self.index.input_value(dequantize, 1)
            try:
                bounds = clip_bounds(_flatten(qparams), spec, np.float32 if scale is None else scale.dtype)
            except OnnxqError as error:
                return error.cause
        # Levels of a constant are what they are, and a Clip behind them would only keep engines from fusing.
        integers = bounded and not floats and not constant
        if integers and spec.storage not in ("int8", "uint8"):
            return f"no Clip takes {spec.storage}"
        if spec.storage != pair.storage and chain.inner is not None and chain.inner.op_type != "Clip":
            return "its integers are unpacked or turned"
        clipped = chain.inner is not None and chain.inner.op_type == "Clip"
        stored = chain.inner.inputs[0] if chain.inner is not None and clipped else dequantize.inputs[0]
        if spec.storage != pair.storage:
            stored = self._change_type(chain, spec, np.asarray(qparams.zero_point), site)
        if quantize is not None:
            source = (chain.outer or quantize).inputs[0]
            if bounds is not None:
                source, _ = self.pairs.insert_clip(site, source, bounds, before=quantize.name)
            editor.replace_input(quantize.make_edge(0), source)
            if integers:
                kind = np.dtype(spec.numpy_storage).type
                ends = kind(spec.qmin), kind(spec.qmax)
                stored, _ = self.pairs.insert_clip(site, stored, ends, after=quantize.name)
        editor.replace_input(dequantize.make_edge(0), stored)
        return ""

    def _change_type(self, chain: Chain, spec: QuantSpec, zero: Array, site: SitePlan) -> str:
        """Store the integers and the zero point in another type; returns the name of the integers."""
        editor, dequantize, dtype = self.editor, chain.last, TENSOR_TYPES[spec.storage]
        name, stored = (editor.fresh(name_part(site.site, part)) for part in ("zero_point", "quantized"))
        editor.add_initializer(dequantize.scope, name, zero.astype(spec.numpy_storage), dtype=dtype)
        for node in filter(None, (chain.quantize, dequantize)):
            # Of ONNX Runtime's own domain, whose operators do not take all types.
            editor.set_op(node.name, node.op_type)
            editor.set_attr(node.name, "output_dtype", None)
            editor.replace_input(node.make_edge(2), name)
        if chain.quantize is None:
            codes = np.asarray(self._read_codes(chain), spec.numpy_storage)
            editor.add_initializer(dequantize.scope, stored, codes, dtype=dtype)
        else:
            # Another tensor, since what the file says of the type of this one no longer holds.
            editor.replace_output(chain.quantize.name, 0, stored)
        return stored

    def _read_codes(self, chain: Chain) -> Array:
        """The stored integers of a constant; `rewrite_pair` has seen that there are some."""
        # By way of float32: ml_dtypes do not cast to every integer.
        codes = self.index.find_constant(chain.source)
        return np.asarray(codes).astype(np.float32).astype(np.int32)

    def _write_quant(self, chain: Chain, spec: QuantSpec, qparams: QParams) -> str:
        """Make the DequantizeLinear a Quant of the float tensor."""
        editor, node, grain = self.editor, chain.last, spec.granularity
        if isinstance(grain, PerBlock):
            return "Quant has no blocks"
        if chain.quantize is None and chain.inner is not None and chain.inner.op_type != "Clip":
            return "its integers are unpacked or turned"
        shape = self.index.find_shape(chain.source)
        if isinstance(grain, PerChannel) and shape is None:
            return "its shape is not known"
        sides = [1] * len(shape or ())
        if isinstance(grain, PerChannel):
            sides[grain.axis] = -1
        scale, zero = (np.asarray(x, np.float32) for x in (qparams.scale, qparams.zero_point))
        if isinstance(grain, PerChannel):
            scale, zero = scale.reshape(sides), zero.reshape(sides)
        if chain.quantize is None:
            source = editor.fresh(f"{node.name}/float")
            codes = self._read_codes(chain).astype(np.float32)
            editor.add_initializer(node.scope, source, (codes - zero) * scale)
        else:
            source = (chain.outer or chain.quantize).inputs[0]
        inputs = [source]
        for part, value in {"scale": scale, "zero_point": zero, "bits": np.asarray(spec.bits, np.float32)}.items():
            inputs.append(editor.fresh(f"{node.name}/{part}"))
            editor.add_initializer(node.scope, inputs[-1], value)
        for k, name in enumerate(inputs):
            editor.replace_input(node.make_edge(k), name)
        editor.set_op(node.name, "Quant", QONNX)
        signs = {"signed": int(spec.signed), "narrow": int(spec.narrow_range), "rounding_mode": "ROUND"}
        for key, attribute in {**dict.fromkeys(("axis", "block_size", "output_dtype", "bits")), **signs}.items():
            editor.set_attr(node.name, key, attribute)
        return ""


def _flatten(qparams: QParams) -> QParams:
    """Scale and zero point of one element, as scalars: tools write them with shape [] or [1]."""
    return QParams(np.asarray(qparams.scale).reshape(()), np.asarray(qparams.zero_point).reshape(()))


def _reads_alone(index: GraphIndex, chain: Chain) -> bool:
    """True where nothing but the pair itself reads its integers."""
    between = [node for node in (chain.quantize, chain.inner) if node is not None]
    return all(len(index.list_consumers(node.result)) == 1 and not index.is_output(node.result) for node in between)
