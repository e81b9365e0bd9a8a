"""QONNX's operators read as pairs: Quant (IntQuant), BipolarQuant and Trunc, of Brevitas, QKeras and FINN.

x -> Quant(scale, zero point, bits)  ->  x -> QuantizeLinear -> [Clip of integers ->] DequantizeLinear
constant -> Quant                    ->  integers -> DequantizeLinear

A pair rounds to nearest and has a whole zero point. Where an operator rounds otherwise, takes signs or cuts bits off,
the same is computed in float, and a pair of the result's levels stands behind: it changes none of these values. Of
levels that no pair has, more than 8 bits but 16 among them, the float operators alone are left.

Pappalardo et al. 2022, "QONNX: Representing Arbitrary-Precision Quantized Neural Networks".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from onnx import NodeProto

from onnxq.arrays import Array, Interval, are_finite, as_float32, as_float64
from onnxq.errors import ModelError
from onnxq.graph import Editor, GraphIndex, ensure_opset, infer_shapes, inline_functions, name_nodes
from onnxq.graph.base import DEQUANTIZE, QUANTIZE, Attrs, NodeRef
from onnxq.graph.light import M, bare_proto
from onnxq.graph.scopes import drop_named, walk_all_nodes
from onnxq.graph.storage import TENSOR_TYPES
from onnxq.sites import Caution, Cautions
from onnxq.spec import WIDTHS, Granularity, PerChannel, PerTensor, QuantSpec
from onnxq.wording import join_names

DOMAINS = ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
_OPS = ("Quant", "IntQuant", "BipolarQuant", "Trunc")
# QuantizeLinear of 16 bits, and of bytes.
_WIDE_OPSET = 21
_OPSET = 13


_Steps = tuple[tuple[str, Array | None], ...]
T = TypeVar("T")
# Gives the result of an operator of ONNX on values and then on constants, by the parts that name these.
_Apply = Callable[..., T]
# Way of rounding -> the operator of ONNX, and what is added to the magnitude where that is rounded: ways that are alike
# on both sides of 0.
_ROUNDING = {
    "ROUND": ("Round", None),
    "HALF_EVEN": ("Round", None),
    "CEIL": ("Ceil", None),
    "FLOOR": ("Floor", None),
    "UP": ("Ceil", 0.0),
    "DOWN": ("Floor", 0.0),
    "HALF_UP": ("Floor", 0.5),
    "HALF_DOWN": ("Ceil", -0.5),
}
_NUMPY: dict[str, Callable[..., Array]] = {
    "Div": np.divide,
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Min": np.minimum,
    "Max": np.maximum,
    "Round": np.rint,
    "Ceil": np.ceil,
    "Floor": np.floor,
    "Sign": np.sign,
    "Abs": np.abs,
    "GreaterOrEqual": np.greater_equal,
    "Where": np.where,
}


@dataclass(frozen=True, eq=False)
class _Grid:
    """The values that an operator leaves: (level - zero) * scale, with levels from low to high."""

    scale: Array
    zero: Array
    low: float
    high: float

    @property
    def limits(self) -> _Steps:
        """The steps that cut levels off; () where there are levels without end."""
        ends = ("Min", as_float32(self.high)), ("Max", as_float32(self.low))
        return () if np.isinf(self.high) else ends

    @property
    def values(self) -> _Steps:
        """The steps from levels to what they stand for."""
        return ("Sub", self.zero), ("Mul", self.scale)


@dataclass(frozen=True, eq=False)
class _Quantizer:
    """One operator. steps: what is done to its input, one after the other, in front of the rounding to its grid.

    Each step is an operator of ONNX and its second operand, None for one that has none. exact: the pair alone computes
    it, without the steps.
    """

    node: NodeRef
    grid: _Grid
    steps: _Steps
    exact: bool


def read_quant_nodes(proto: M) -> tuple[M, Cautions]:
    """A copy with pairs in the place of QONNX's operators, and a warning of those that become float operators alone.

    The model itself without any. The node that gives the result keeps its name. Raises ModelError naming an operator
    whose numbers are not constant.
    """
    if not any(map(_is_quantizer, walk_all_nodes(bare_proto(proto)))):
        return proto, ()
    named = infer_shapes(name_nodes(inline_functions(proto)))
    index = GraphIndex(named)
    version = max(
        [entry.version for entry in proto.opset_import if entry.domain in DOMAINS], default=1
    )
    quantizers = [
        _read_quantizer(index, node, version) for node in filter(_is_quantizer, index.nodes)
    ]
    specs = [_find_spec(index, quantizer) for quantizer in quantizers]
    # Only what needs the newer opset asks for it: older engines read the older one.
    wide = any(spec is not None and spec.bits == 16 for spec in specs)
    editor = Editor(ensure_opset(named, _WIDE_OPSET if wide else _OPSET))
    writer = _Writer(index, editor)
    for quantizer, spec in zip(quantizers, specs, strict=True):
        writer.write(quantizer, spec)
    model = editor.finish()
    drop_named(model.opset_import, DOMAINS, by="domain")
    # Notes of QONNX, of tensors that may be gone.
    del model.graph.quantization_annotation[:]
    left = [
        quantizer.node.name
        for quantizer, spec in zip(quantizers, specs, strict=True)
        if spec is None
    ]
    if not left:
        return model, ()
    text = (
        f"{len(left)} quantizers of QONNX are no pairs; {join_names(left, 3)}: no pair has their levels, so they are "
        "float operators"
    )
    return model, (Caution("W145", text),)


def _is_quantizer(node: NodeProto | NodeRef) -> bool:
    return node.domain in DOMAINS and node.op_type in _OPS


def _read_quantizer(index: GraphIndex, node: NodeRef, version: int) -> _Quantizer:
    def read(k: int) -> Array:
        value = index.input_value(node, k)
        if value is None or not are_finite(value):
            fault = "computed at run time" if value is None else "not finite"
            fix = "export it with constant numbers"
            raise ModelError(node.name, f"its input {k} is {fault}", fix, code="Q518")
        return as_float32(value)

    scale = read(1)
    if not (scale > 0).all():
        cause = "has a scale that is not above 0"
        raise ModelError(node.name, cause, "export the network again", code="Q518")
    if node.op_type == "BipolarQuant":
        return _read_bipolar(node, scale)
    zero = read(2)
    usual = "FLOOR" if node.op_type == "Trunc" else "ROUND"
    mode = str(node.attrs.get("rounding_mode", usual)).upper()
    if mode not in _ROUNDING:
        fix = f"use one of {', '.join(_ROUNDING)}"
        raise ModelError(node.name, f"rounds by {mode!r}", fix, code="Q518")
    # Trunc of version 1 has no sign and no limits.
    signed = bool(node.attrs.get("signed", 1))
    narrow = bool(node.attrs.get("narrow", 0))
    steps: _Steps = (("Div", scale), ("Add", zero))
    if node.op_type != "Trunc":
        bits = float(read(3).ravel()[0])
        # Brevitas writes a binary quantizer so; QONNX's own executor takes it for one.
        if bits == 1 and signed:
            return _read_bipolar(node, scale, zero)
        grid = _Grid(scale, zero, *_list_levels(bits, signed, narrow))
        # QuantizeLinear rounds halves to even, and adds its zero point, an integer, behind that.
        to_nearest = mode in ("ROUND", "HALF_EVEN") and not (zero % 1).any()
        steps = (*steps, *grid.limits, (mode, None), *grid.values)
        return _Quantizer(node, grid, steps, to_nearest)
    if version < 2 or len(node.inputs) < 6:
        shift = 2.0 ** (read(3) - read(4))
        grid = _Grid(scale, zero, -np.inf, np.inf)
    else:
        coarse = read(4)
        # The ratio is a power of two, but for the rounding of both scales.
        shift = (2.0 ** np.rint(np.log2(coarse / scale))).astype(np.float32)
        levels = _list_levels(float(read(5).ravel()[0]), signed, narrow)
        grid = _Grid(coarse, zero / shift, *levels)
    steps = (*steps, ("ROUND", None), ("Div", shift), *grid.limits, (mode, None), *grid.values)
    return _Quantizer(node, grid, steps, False)


def _read_bipolar(node: NodeRef, scale: Array, zero: Array | None = None) -> _Quantizer:
    """A quantizer to the two values around zero."""
    if zero is None:
        # The sign is that of the value itself, whatever its scale.
        grid = _Grid(scale, np.zeros((), np.float32), -1.0, 1.0)
        return _Quantizer(node, grid, (("sign", None), ("Mul", scale)), False)
    grid = _Grid(scale, zero, -1.0, 1.0)
    steps: _Steps = (("Div", scale), ("Add", zero), ("sign", None))
    return _Quantizer(node, grid, (*steps, *grid.values), False)


def _list_levels(bits: float, signed: bool, narrow: bool) -> Interval:
    """Lowest and highest level; bits may be a fraction."""
    if signed:
        return -(2.0 ** (bits - 1)) + narrow, 2.0 ** (bits - 1) - 1
    return 0.0, 2.0**bits - 1 - narrow


def _find_spec(index: GraphIndex, quantizer: _Quantizer) -> QuantSpec | None:
    """The spec of a pair with the levels of a quantizer's grid; None where no pair has them."""
    grid = quantizer.grid
    if (grid.zero % 1).any() or not np.isfinite(grid.high) or grid.low % 1 or grid.high % 1:
        return None
    # One zero point may serve several scales, and no other way round.
    rank = index.find_rank(index.find_input(quantizer.node))
    grain = _find_granularity(grid.scale, rank)
    if grain is None or grid.zero.size not in (1, grid.scale.size):
        return None
    signed = grid.low < 0
    # The narrowest type that holds both ends, and the zero point.
    ends = (grid.low, grid.high, float(np.min(grid.zero)), float(np.max(grid.zero)))
    for bits in WIDTHS:
        spec = QuantSpec(
            bits=bits,
            signed=signed,
            symmetric=False,
            narrow_range=signed and grid.low == -grid.high,
            granularity=grain,
        )
        if spec.qmin <= min(ends) and max(ends) <= spec.qmax:
            constant = index.has_constant(quantizer.node, 0)
            # Integers of 32 bits are those of biases; and no Clip takes 16.
            whole = bits < 16 or (bits == 16 and (grid.low, grid.high) == (spec.qmin, spec.qmax))
            return spec if whole or constant else None
    return None


def _find_granularity(scale: Array, rank: int | None) -> Granularity | None:
    """The granularity of scales; None where they lie along several axes of the tensor."""
    if scale.size == 1:
        return PerTensor()
    wide = [k for k, d in enumerate(scale.shape) if d != 1]
    if rank is None or len(wide) != 1 or scale.ndim > rank:
        return None
    # Scales broadcast from the last axis, as in numpy.
    return PerChannel(wide[0] + rank - scale.ndim)


@dataclass(eq=False)
class _Writer:
    """Writes pairs and float operators in the place of quantizers."""

    index: GraphIndex
    editor: Editor[Any]

    def write(self, quantizer: _Quantizer, spec: QuantSpec | None) -> None:
        """Put the pair of one quantizer, or its steps, in its place."""
        node = quantizer.node
        name = node.inputs[0]
        value = self.index.input_value(node, 0)
        if value is not None:
            value = _apply_steps(quantizer.steps, as_float32(value), _compute)
        if spec is None:
            source = (
                self._write_steps(quantizer, name)
                if value is None
                else self._add(node, name, "rounded", value)
            )
            self.editor.replace_node(node, "Identity", [source])
            return
        count = () if spec.has_one_scale else (quantizer.grid.scale.size,)
        scale, zero = (
            np.broadcast_to(x.ravel() if x.size > 1 else x.reshape(()), count).copy()
            for x in (quantizer.grid.scale, quantizer.grid.zero)
        )
        inputs = [
            self._add(node, name, "scale", scale),
            self._add_integers(node, name, "zero_point", zero, spec),
        ]
        attrs = spec.granularity.attributes
        # Integers in the file, so that nothing rounds them again.
        if value is not None:
            sides = [1] * value.ndim
            if isinstance(spec.granularity, PerChannel):
                sides[spec.granularity.axis] = -1
            # In float64, which holds the ends of 32 bits.
            codes = np.rint(as_float64(value) / scale.reshape(sides) + zero.reshape(sides))
            source = self._add_integers(
                node, name, "quantized", np.clip(codes, spec.qmin, spec.qmax), spec
            )
        else:
            source = name if quantizer.exact else self._write_steps(quantizer, name)
            source = self._write_quantize(node, name, source, inputs, attrs, spec, quantizer.grid)
        self.editor.replace_node(node, DEQUANTIZE, [source, *inputs], attrs=attrs)

    def _write_quantize(
        self,
        node: NodeRef,
        base: str,
        source: str,
        numbers: list[str],
        attrs: Attrs,
        spec: QuantSpec,
        grid: _Grid,
    ) -> str:
        name = self.editor.fresh(f"{base}/{QUANTIZE}")
        inputs = [source, *numbers]
        result = self._insert(node, QUANTIZE, inputs, name, f"{base}/quantized", attrs)
        # Saturation of the type does it.
        if (
            (grid.low, grid.high) == (spec.qmin, spec.qmax)
            and spec.fills_storage
            and not spec.narrow_range
        ):
            return result
        bounds = [
            self._add_integers(node, base, part, np.asarray(end), spec)
            for part, end in (("clip_min", grid.low), ("clip_max", grid.high))
        ]
        # On the integers: ONNX Runtime makes no integer kernel of a convolution in front of a float
        # Clip.
        name = self.editor.fresh(f"{base}/Clip")
        return self._insert(node, "Clip", [result, *bounds], name, f"{base}/clipped")

    def _write_steps(self, quantizer: _Quantizer, source: str) -> str:
        """The float operators in front of a quantizer; returns the name of their result."""
        node = quantizer.node

        def write(op_type: str, *inputs: str, **constants: ArrayLike) -> str:
            added = [self._add(node, node.name, part, value) for part, value in constants.items()]
            name = self.editor.fresh(f"{node.name}/{op_type}")
            return self._insert(node, op_type, [*inputs, *added], name, f"{name}/result")

        return _apply_steps(quantizer.steps, source, write)

    def _insert(
        self,
        node: NodeRef,
        op_type: str,
        inputs: list[str],
        name: str,
        result: str,
        attrs: Attrs | None = None,
    ) -> str:
        """A node in front of the quantizer's; returns its result, of about this name."""
        made = self.editor.fresh(result)
        self.editor.insert_node(
            node.scope, op_type, inputs, [made], name=name, attrs=attrs, before=node.name
        )
        return made

    def _add(self, node: NodeRef, base: str, part: str, value: ArrayLike) -> str:
        return self.editor.add_constant(node.scope, f"{base}/{part}", as_float32(value))

    def _add_integers(
        self, node: NodeRef, base: str, part: str, value: Array, spec: QuantSpec
    ) -> str:
        array = np.asarray(value).astype(spec.numpy_storage)
        return self.editor.add_constant(
            node.scope, f"{base}/{part}", array, dtype=TENSOR_TYPES[spec.storage]
        )


def _apply_steps(steps: _Steps, x: T, apply: _Apply[T]) -> T:
    """The result of steps on a value, an array or the name of a tensor."""
    for step, operand in steps:
        if operand is not None:
            x = apply(step, x, **{step: operand})
        elif step == "sign":
            x = apply("Where", apply("GreaterOrEqual", x, zero=0.0), high=1.0, low=-1.0)
        else:
            op_type, offset = _ROUNDING[step]
            if offset is None:
                x = apply(op_type, x)
                continue
            sign = apply("Sign", x)
            size = apply("Abs", x)
            size = apply("Add", size, offset=offset) if offset else size
            x = apply("Mul", sign, apply(op_type, size))
    return x


def _compute(op_type: str, *values: Array, **constants: ArrayLike) -> Array:
    return _NUMPY[op_type](*values, *map(as_float32, constants.values()))
