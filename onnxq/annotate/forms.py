"""Pairs of few bits rewritten in the form that an engine or a tool reads; all of them compute the same.

clip-qdq  x -> Clip in float -> QuantizeLinear -> DequantizeLinear, in bytes; loads and fuses everywhere
qcdq      x -> QuantizeLinear -> Clip of integers -> DequantizeLinear (Brevitas)
native    x -> QuantizeLinear -> DequantizeLinear in int4, uint4 (opset 21), int2, uint2 (opset 25)
qonnx     x -> Quant (domain qonnx.custom_op.general), weights in float
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnxq.annotate.bits import Levels, Notes, PairInfo, PairInfos, read_clip_levels, read_numbers
from onnxq.annotate.find import Chain, find_chains, is_read_once
from onnxq.annotate.read import ATTRIBUTE, drop_clip, find_pairs
from onnxq.annotate.write import make_record, warn_of_sites
from onnxq.arrays import Array, as_float32
from onnxq.emit.pairs import PairWriter
from onnxq.errors import OnnxqError
from onnxq.graph import TENSOR_TYPES, Editor, GraphIndex, ensure_opset, walk_all_nodes
from onnxq.numerics import clip_bounds
from onnxq.plan import PARTS, SitePlan, name_part
from onnxq.sites import Cautions, TensorId
from onnxq.spec import PerChannel, QParams, QuantSpec, find_numpy_storage, name_int

FORMS = ("clip-qdq", "qcdq", "native", "qonnx")
QONNX = "qonnx.custom_op.general"
# Types of ONNX with fewer bits than a byte, and the opset that has them.
_NARROW = {4: 21, 2: 25}
# An integer Clip takes bytes, and DequantizeLinear a scale for each channel.
_OPSET = 13


def rewrite_pairs(
    proto: ModelProto, pairs: Iterable[PairInfo], form: str
) -> tuple[ModelProto, PairInfos, Cautions]:
    """A copy of the model with its pairs in a form of `FORMS`, the pairs there, and a warning of those that stay.

    The nodes keep their names; those of `Quant` nodes are the names of the DequantizeLinear.
    """
    before = {pair.nodes[-1]: pair for pair in pairs if pair.nodes}
    # Only the newest type asks for the newest opset.
    newest = (_NARROW.get(pair.bits, 0) for pair in before.values() if form == "native")
    upgraded = ensure_opset(proto, max([_OPSET, *newest]))
    index = GraphIndex(upgraded)
    editor: Editor[Any] = Editor(upgraded)
    pair_writer = PairWriter(editor, index, frozenset(), frozenset(), {})
    writer = _FormWriter(index, form, editor, pair_writer)
    stay = []
    for chain in find_chains(index):
        pair = before.get(chain.last.name)
        if pair is None:
            continue
        reason = writer.rewrite_pair(chain, pair)
        # Whole types need no form but Quant; nobody asks to have a bias of 32 bits in another one.
        narrow = pair.bits != pair.element_type.bits or form == "qonnx"
        if reason and narrow and pair.storage != "int32":
            stay.append(f"{pair.site} ({reason})")
    # Clips, scales and constants that the old form alone read.
    model = editor.finish()
    made = {node.name for node in walk_all_nodes(model) if node.domain == QONNX}
    after = {
        name: replace(pair, quantize="", clip="") for name, pair in before.items() if name in made
    }
    if after and not any(entry.domain == QONNX for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(QONNX, 1))
    notes = Notes({name: make_record(pair) for name, pair in before.items()}, {}, {})
    after |= {
        pair.nodes[-1]: replace(pair, origin=before[pair.nodes[-1]].origin)
        for pair in find_pairs(model, notes)
    }
    warnings = warn_of_sites(f"pairs that {form} cannot write stay as they are", stay)
    return model, tuple(after.get(name, pair) for name, pair in before.items()), warnings


@dataclass(frozen=True)
class _FormWriter:
    """Rewrites pairs one after the other."""

    index: GraphIndex
    form: str
    editor: Editor[Any]
    pairs: PairWriter

    def rewrite_pair(self, chain: Chain, pair: PairInfo) -> str:
        """Write one pair in the form; returns why it stays as it is, "" for one that is written, or is so already."""
        index = self.index
        numbers = read_numbers(index, chain)
        qparams = numbers.qparams
        if (
            pair.lookup
            or pair.dynamic
            or pair.element_type.is_float
            or qparams is None
            or chain.source is None
        ):
            return "its scale or its values are of another kind"
        if chain.dequantize is None or not _reads_alone(index, chain):
            return "its integers are read elsewhere"
        if chain.inner_op not in ("", "Clip"):
            return "its integers are unpacked or turned"
        # Before the network's own Clip is taken for the pair's.
        levels = read_clip_levels(index, chain, numbers)
        chain = drop_clip(index, chain, numbers)
        shape = () if qparams.scale.size == 1 else qparams.scale.shape
        zero = qparams.zero_point.reshape(shape)
        qparams = QParams(qparams.scale.reshape(shape), zero)
        try:
            spec = self._choose_spec(pair, levels)
            if zero.min() < spec.qmin or zero.max() > spec.qmax:
                return f"its zero point is no level of {pair.bits} bits"
            if levels not in (None, (spec.qmin, spec.qmax)):
                return f"its Clip leaves other levels than {pair.bits} bits have"
            if self.form == "qonnx":
                return self._write_quant(chain, spec, qparams)
            return self._write_linear(chain, pair, spec, qparams)
        except OnnxqError as error:
            return error.cause

    def _choose_spec(self, pair: PairInfo, levels: Levels | None) -> QuantSpec:
        """The bits in the type that the form stores them in; a narrow range where a Clip of the file has one."""
        kind = pair.element_type
        storage = pair.storage
        if self.form == "native" and pair.bits in _NARROW:
            storage = name_int(pair.bits, signed=kind.signed)
        elif kind.bits < 8 and self.form in ("clip-qdq", "qcdq"):
            storage = find_numpy_storage(storage)
        spec = QuantSpec(
            bits=pair.bits,
            signed=kind.signed,
            symmetric=False,
            granularity=pair.granularity,
            storage=storage,
        )
        return replace(
            spec, narrow_range=kind.signed and levels is not None and levels[0] == spec.qmin + 1
        )

    def _write_linear(self, chain: Chain, pair: PairInfo, spec: QuantSpec, qparams: QParams) -> str:
        """Write QuantizeLinear and DequantizeLinear, with the Clip that the form has."""
        editor = self.editor
        quantize = chain.quantize
        dequantize = chain.last
        # Levels of a constant are what they are, and a Clip behind them would only keep engines from fusing.
        bounded = spec.is_narrow and not self.index.is_constant(chain.source)
        behind = self.form == "qcdq" or not spec.has_one_scale
        clip = chain.inner if behind else chain.outer
        if spec.storage == pair.storage and clip is not None and (bounded or self.form == "qcdq"):
            return ""
        if bounded and behind and spec.storage not in ("int8", "uint8"):
            return f"no Clip takes {spec.storage}"
        name = name_part(pair.site, "clipped").removesuffix(PARTS["clipped"])
        site = SitePlan(site=TensorId(name, dequantize.scope), role=pair.role, spec=spec)
        stored = (chain.inner or dequantize).inputs[0]
        source = (chain.outer or quantize or dequantize).inputs[0]
        if bounded and not behind and quantize is not None:
            scale = np.asarray(self.index.input_value(dequantize, 1))
            source, _ = self.pairs.insert_clip(
                site, source, clip_bounds(qparams, spec, scale.dtype), before=quantize.name
            )
        if spec.storage != pair.storage:
            stored = self._change_type(chain, spec, np.asarray(qparams.zero_point), site)
        if quantize is not None:
            editor.replace_input(quantize.make_edge(0), source)
        if bounded and behind and quantize is not None:
            kind = np.dtype(spec.numpy_storage).type
            stored, _ = self.pairs.insert_clip(
                site, stored, (kind(spec.qmin), kind(spec.qmax)), after=quantize.name
            )
        editor.replace_input(dequantize.make_edge(0), stored)
        return ""

    def _change_type(self, chain: Chain, spec: QuantSpec, zero: Array, site: SitePlan) -> str:
        """Store the integers and the zero point in another type; returns the name of the integers."""
        editor = self.editor
        dequantize = chain.last
        dtype = TENSOR_TYPES[spec.storage]
        name, stored = (
            editor.fresh(name_part(site.site, part)) for part in ("zero_point", "quantized")
        )
        editor.add_initializer(dequantize.scope, name, zero.astype(spec.numpy_storage), dtype=dtype)
        for node in filter(None, (chain.quantize, dequantize)):
            # Of ONNX's own domain, since operators of ONNX Runtime's do not take all types.
            editor.set_op(node.name, node.op_type)
            editor.set_attr(node.name, "output_dtype", None)
            editor.replace_input(node.make_edge(2), name)
        if chain.quantize is not None:
            # Another tensor, since what the file says of the type of this one no longer holds.
            editor.replace_output(chain.quantize.name, 0, stored)
        else:
            codes = self._read_codes(chain).astype(spec.numpy_storage)
            editor.add_initializer(dequantize.scope, stored, codes, dtype=dtype)
        return stored

    def _read_codes(self, chain: Chain) -> Array:
        """The stored integers of a constant, as floats: ml_dtypes do not cast to every integer."""
        return as_float32(np.asarray(self.index.find_constant(chain.source)))

    def _write_quant(self, chain: Chain, spec: QuantSpec, qparams: QParams) -> str:
        """Make the DequantizeLinear a Quant of the float tensor."""
        editor = self.editor
        node = chain.last
        grain = spec.granularity
        shape = self.index.find_shape(chain.source)
        if spec.has_blocks or shape is None or spec.bits > 16:
            return "Quant has no blocks, and takes no tensor of unknown rank"
        # Quant has no axis: its scale must broadcast, as [1, C, 1, 1] for channels along axis 1.
        sides = []
        if isinstance(grain, PerChannel):
            sides = [1] * len(shape)
            sides[grain.axis] = -1
        scale, zero = (as_float32(x).reshape(sides) for x in (qparams.scale, qparams.zero_point))
        # A constant is stored in float: Quant rounds it itself.
        floats = None if chain.quantize is not None else (self._read_codes(chain) - zero) * scale
        numbers = {
            "float": floats,
            "scale": scale,
            "zero_point": zero,
            "bits": as_float32(spec.bits),
        }
        for k, (part, value) in enumerate(numbers.items()):
            name = (chain.outer or chain.quantize or node).inputs[0]
            if value is not None:
                name = editor.add_constant(node.scope, f"{node.name}/{part}", value)
            editor.replace_input(node.make_edge(k), name)
        editor.set_op(node.name, "Quant", QONNX)
        # Attributes of DequantizeLinear that Quant does not have.
        none = dict.fromkeys(("axis", "block_size", "output_dtype", ATTRIBUTE))
        signs = {
            "signed": int(spec.signed),
            "narrow": int(spec.narrow_range),
            "rounding_mode": "ROUND",
        }
        for key, attribute in {**none, **signs}.items():
            editor.set_attr(node.name, key, attribute)
        return ""


def _reads_alone(index: GraphIndex, chain: Chain) -> bool:
    """True where nothing but the pair itself reads its integers."""
    between = filter(None, (chain.quantize, chain.inner))
    return all(is_read_once(index, node.result) for node in between)
