"""The patterns that npu_patterns.py shows to Qualcomm's compiler, and the types that their pairs get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec

Shape = tuple[int, ...]

# Signed activations are symmetric, unsigned ones have any zero point: so the formats are used.
ACTIVATIONS = {
    "u8": QuantSpec(bits=8, signed=False, symmetric=False),
    "i8": QuantSpec(bits=8),
    "u16": QuantSpec(bits=16, signed=False, symmetric=False),
    "i16": QuantSpec(bits=16),
}


def choose_weight_spec(name: str, axis: int) -> QuantSpec:
    """The spec of a row's weight. axis: of the output channels; blocks lie along the axis of the input channels."""
    kind, _, grain = name.partition(" ")
    signed, bits = kind[0] == "i", int(kind[1:])
    if grain == "channel":
        granularity: PerTensor | PerChannel | PerBlock = PerChannel(axis)
    else:
        granularity = PerBlock(1 - axis, int(grain)) if grain.isdigit() else PerTensor()
    storage = f"{'' if signed else 'u'}int{bits}"
    return QuantSpec(
        bits=bits, signed=signed, symmetric=signed, granularity=granularity, storage=storage
    )


BYTES = ("i8 channel", "i8 tensor", "u8 tensor", "u8 channel")
ALL = (*BYTES, "i4 channel", "i4 tensor", "i16 tensor", "u16 tensor")
BLOCKS = ("i4 16", "i4 32", "i4 64", "i8 16", "i8 32", "i8 64", "u4 32")


@dataclass(frozen=True)
class Pattern:
    """One row: a graph without pairs, with the shapes of its inputs and constants.

    body: statements of ONNX's text form; the result is `y`, and "" is nothing between two pairs. Names of tensors say
        how they are quantized: `x…` are inputs of the graph and get a pair, `w` is a weight of the row's type, `b` a
        bias of int32 with the scale of `x` times that of `w`, `c…` are constants of the activation's type. `f…` are
        float constants without a pair, `i…` constants of int64, `n…` and `m…` inputs of int64 and int32, with the
        values in `integers`. Every other float tensor gets a pair, unless its name begins with `_`.
    axis: of the weight's output channels. types: tensors of another type than the activations', "float" for no pair.
    same: tensors that take scale and zero point of another. fixed: scale and zero point of tensors. low: least
        value of the inputs, for operators that are not defined everywhere.
    """

    name: str
    body: str
    shapes: Mapping[str, Shape]
    weights: tuple[str, ...] = ("",)
    axis: int = 0
    types: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Mapping[str, tuple[float, int]]] = field(default_factory=dict)
    integers: Mapping[str, object] = field(default_factory=dict)
    low: float = -3.0
    opset: int = 21


_IMAGE = {"x": (1, 16, 10, 10)}
_ROWS = {"x": (1, 48, 64)}
_CONV = {**_IMAGE, "w": (24, 16, 1, 1), "b": (24,)}


def _unary(name: str, call: str = "", **options: object) -> Pattern:
    return Pattern(name, f"y = {call or name + ' (x)'}", _ROWS, **options)  # type: ignore[arg-type]


def _unit(scale: str) -> dict[str, dict[str, tuple[float, int]]]:
    """Scales that use all levels for the results of an operator: [0, 1) or [-1, 1)."""
    if scale == "0..1":
        return {
            "y": {
                "u8": (2.0**-8, 0),
                "i8": (2.0**-7, 0),
                "u16": (2.0**-16, 0),
                "i16": (2.0**-15, 0),
            }
        }
    return {
        "y": {
            "u8": (2.0**-7, 128),
            "i8": (2.0**-7, 0),
            "u16": (2.0**-15, 2**15),
            "i16": (2.0**-15, 0),
        }
    }


_WIDE = {
    "y": {"u8": (0.02, 128), "i8": (0.02, 0), "u16": (0.02 / 256, 2**15), "i16": (0.02 / 256, 0)}
}

PATTERNS: tuple[Pattern, ...] = (
    # Products with a constant weight.
    Pattern("Conv 1x1", "y = Conv (x, w, b)", _CONV, ALL),
    Pattern(
        "Conv 1x1, blocks",
        "y = Conv (x, w, b)",
        {"x": (1, 64, 10, 10), "w": (24, 64, 1, 1), "b": (24,)},
        BLOCKS,
    ),
    Pattern("Conv 1x1, no bias", "y = Conv (x, w)", {**_IMAGE, "w": (24, 16, 1, 1)}, BYTES[:1]),
    Pattern(
        "Conv 1x1, blocks, no bias",
        "y = Conv (x, w)",
        {"x": (1, 64, 10, 10), "w": (24, 64, 1, 1)},
        BLOCKS[:2],
    ),
    Pattern(
        "Conv 3x3",
        "y = Conv <pads=[1,1,1,1]> (x, w, b)",
        {**_CONV, "w": (24, 16, 3, 3)},
        (*BYTES, "i4 channel"),
    ),
    Pattern(
        "Conv 3x3, stride 2",
        "y = Conv <strides=[2,2]> (x, w, b)",
        {**_CONV, "w": (24, 16, 3, 3)},
        BYTES[:1],
    ),
    Pattern(
        "Conv 3x3, dilation 2",
        "y = Conv <dilations=[2,2]> (x, w, b)",
        {**_CONV, "w": (24, 16, 3, 3)},
        BYTES[:1],
    ),
    Pattern(
        "Conv 3x3, 4 groups",
        "y = Conv <group=4> (x, w, b)",
        {**_CONV, "w": (24, 4, 3, 3)},
        BYTES[:1],
    ),
    Pattern(
        "Conv 3x3, depthwise",
        "y = Conv <group=16> (x, w, b)",
        {**_IMAGE, "w": (16, 1, 3, 3), "b": (16,)},
        (*BYTES, "i4 channel"),
    ),
    Pattern(
        "Conv 3, 1-D",
        "y = Conv (x, w, b)",
        {"x": (1, 16, 64), "w": (24, 16, 3), "b": (24,)},
        BYTES[:2],
    ),
    Pattern(
        "Conv 3x3x3",
        "y = Conv (x, w, b)",
        {"x": (1, 8, 6, 6, 6), "w": (8, 8, 3, 3, 3), "b": (8,)},
        BYTES[:2],
    ),
    Pattern(
        "Conv 1x1, bias in float",
        "y = Conv (x, w, f)",
        {**_IMAGE, "w": (24, 16, 1, 1), "f": (24,)},
        BYTES[:1],
    ),
    Pattern("Conv 1x1, computed weight", "y = Conv (x, x2)", {**_IMAGE, "x2": (24, 16, 1, 1)}),
    Pattern(
        "ConvTranspose 2x2",
        "y = ConvTranspose <strides=[2,2]> (x, w, b)",
        {**_IMAGE, "w": (16, 24, 2, 2), "b": (24,)},
        (*BYTES[:3], "i4 channel"),
        axis=1,
    ),
    Pattern(
        "ConvTranspose 4x4, depthwise",
        "y = ConvTranspose <strides=[2,2], group=16> (x, w, b)",
        {**_IMAGE, "w": (16, 1, 4, 4), "b": (16,)},
        BYTES[1:2],
    ),
    Pattern(
        "Gemm",
        "y = Gemm <transB=1> (x, w, b)",
        {"x": (32, 64), "w": (48, 64), "b": (48,)},
        (*ALL, *BLOCKS),
    ),
    Pattern(
        "Gemm, weight not transposed",
        "y = Gemm (x, w, b)",
        {"x": (32, 64), "w": (64, 48), "b": (48,)},
        BYTES[:2],
        1,
    ),
    Pattern(
        "Gemm, float bias",
        "y = Gemm <transB=1> (x, w, f)",
        {"x": (32, 64), "w": (48, 64), "f": (48,)},
        BYTES[:1],
    ),
    Pattern(
        "MatMul by a constant", "y = MatMul (x, w)", {**_ROWS, "w": (64, 56)}, (*ALL, *BLOCKS), 1
    ),
    Pattern(
        "MatMul by a constant, 2-D",
        "y = MatMul (x, w)",
        {"x": (48, 64), "w": (64, 56)},
        BYTES[:1],
        1,
    ),
    Pattern(
        "MatMul by a constant, 4-D",
        "y = MatMul (x, w)",
        {"x": (1, 4, 48, 64), "w": (64, 56)},
        BYTES[:1],
        1,
    ),
    Pattern(
        "MatMul by a stack of constants",
        "y = MatMul (x, w)",
        {"x": (1, 4, 48, 64), "w": (1, 4, 64, 56)},
        BYTES[1:2],
    ),
    Pattern(
        "MatMul, Add of a constant",
        "t = MatMul (x, w) y = Add (t, c)",
        {**_ROWS, "w": (64, 56), "c": (56,)},
        BYTES[:1],
        1,
    ),
    Pattern(
        "MatMul, Add of a constant, no pair between",
        "_t = MatMul (x, w) y = Add (_t, c)",
        {**_ROWS, "w": (64, 56), "c": (56,)},
        BYTES[:1],
        1,
    ),
    Pattern(
        "MatMul, Add of int32, no pair between",
        "_t = MatMul (x, w) y = Add (_t, b)",
        {**_ROWS, "w": (64, 56), "b": (56,)},
        BYTES[:1],
        1,
    ),
    Pattern(
        "MatMul, Add of float, no pair between",
        "_t = MatMul (x, w) y = Add (_t, f)",
        {**_ROWS, "w": (64, 56), "f": (56,)},
        BYTES[:1],
        1,
    ),
    # Products of two activations.
    Pattern("MatMul, 2-D", "y = MatMul (x, x2)", {"x": (48, 64), "x2": (64, 56)}),
    Pattern("MatMul, 3-D", "y = MatMul (x, x2)", {"x": (4, 48, 64), "x2": (4, 64, 56)}),
    Pattern("MatMul, 4-D", "y = MatMul (x, x2)", {"x": (1, 4, 48, 64), "x2": (1, 4, 64, 56)}),
    Pattern(
        "MatMul, right u8",
        "y = MatMul (x, x2)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 64, 56)},
        types={"x2": "u8"},
    ),
    Pattern(
        "MatMul, right i8",
        "y = MatMul (x, x2)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 64, 56)},
        types={"x2": "i8"},
    ),
    Pattern(
        "MatMul, right i16",
        "y = MatMul (x, x2)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 64, 56)},
        types={"x2": "i16"},
    ),
    Pattern(
        "MatMul, left u8",
        "y = MatMul (x, x2)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 64, 56)},
        types={"x": "u8"},
    ),
    Pattern(
        "MatMul, result u16",
        "y = MatMul (x, x2)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 64, 56)},
        types={"y": "u16"},
    ),
    Pattern(
        "Transpose, MatMul",
        "t = Transpose <perm=[0,1,3,2]> (x2) y = MatMul (x, t)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 56, 64)},
        same={"t": "x2"},
    ),
    Pattern(
        "Transpose, MatMul, no pair between",
        "_t = Transpose <perm=[0,1,3,2]> (x2) y = MatMul (x, _t)",
        {"x": (1, 4, 48, 64), "x2": (1, 4, 56, 64)},
    ),
    Pattern(
        "Einsum, bhid,bhjd->bhij",
        'y = Einsum <equation="bhid,bhjd->bhij"> (x, x2)',
        {"x": (1, 4, 48, 64), "x2": (1, 4, 56, 64)},
    ),
    # Two operands.
    Pattern("Add", "y = Add (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}),
    Pattern("Add, broadcast", "y = Add (x, x2)", {"x": (1, 48, 64), "x2": (64,)}),
    Pattern("Add of a constant", "y = Add (x, c)", {"x": (1, 48, 64), "c": (64,)}),
    Pattern("Add of a float scalar", "y = Add (x, f)", {"x": (1, 48, 64), "f": ()}),
    Pattern("Sub", "y = Sub (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}),
    Pattern("Mul", "y = Mul (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}),
    Pattern(
        "Mul, one value a channel", "y = Mul (x, x2)", {"x": (1, 16, 10, 10), "x2": (1, 16, 1, 1)}
    ),
    Pattern("Mul by a constant", "y = Mul (x, c)", {"x": (1, 48, 64), "c": (64,)}),
    Pattern("Div", "y = Div (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}, low=0.5),
    Pattern("Max", "y = Max (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}),
    Pattern("Min", "y = Min (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}),
    Pattern(
        "Pow, exponent 2",
        "y = Pow (x, c)",
        {"x": (1, 48, 64), "c": ()},
        fixed={
            "c": {
                "u8": (2 / 255, 0),
                "i8": (2 / 127, 0),
                "u16": (2 / 65535, 0),
                "i16": (2 / 32767, 0),
            }
        },
    ),
    Pattern("Equal", "y = Equal (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}, same={"x2": "x"}),
    Pattern("Greater", "y = Greater (x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}),
    Pattern(
        "Where", "_m = Greater (x, x2) y = Where (_m, x, x2)", {"x": (1, 48, 64), "x2": (1, 48, 64)}
    ),
    Pattern(
        "Where, Not",
        "_m = Greater (x, x2) _n = Not (_m) y = Where (_n, x, x2)",
        {"x": (1, 48, 64), "x2": (1, 48, 64)},
    ),
    # One operand.
    *(
        _unary(name)
        for name in (
            "Neg",
            "Abs",
            "Relu",
            "LeakyRelu",
            "Elu",
            "Erf",
            "HardSwish",
            "HardSigmoid",
            "Identity",
        )
    ),
    *(_unary(name) for name in ("Floor", "Round", "Sin", "Softplus", "Mish")),
    *(_unary(name, low=0.1) for name in ("Sqrt", "Log", "Reciprocal")),
    _unary("Exp"),
    _unary("Gelu"),
    _unary("Gelu, tanh", 'Gelu <approximate="tanh"> (x)'),
    _unary("Sigmoid"),
    _unary("Sigmoid, all levels", "Sigmoid (x)", fixed=_unit("0..1")),
    _unary("Tanh"),
    _unary("Tanh, all levels", "Tanh (x)", fixed=_unit("-1..1")),
    _unary("Tanh, wide scale", "Tanh (x)", fixed=_WIDE),
    Pattern("Sigmoid, Mul (SiLU)", "s = Sigmoid (x) y = Mul (x, s)", _ROWS),
    Pattern(
        "Sigmoid, Mul, all levels",
        "s = Sigmoid (x) y = Mul (x, s)",
        _ROWS,
        fixed={"s": _unit("0..1")["y"]},
    ),
    Pattern("PRelu", "y = PRelu (x, c)", {"x": (1, 16, 10, 10), "c": (16, 1, 1)}),
    Pattern("Clip 0 to 2", "y = Clip (x, f0, f2)", {**_ROWS, "f0": (), "f2": ()}),
    Pattern(
        "Cast of an integer",
        "t = Cast <to=1> (n) y = Add (x, t)",
        _ROWS,
        integers={"n": [1, 2, 3, 4] * 16},
    ),
    Pattern(
        "Cast of int32",
        "t = Cast <to=1> (m) y = Add (x, t)",
        _ROWS,
        integers={"m": [1, 2, 3, 4] * 16},
    ),
    Pattern("Softmax", "y = Softmax (x)", _ROWS),
    Pattern("Softmax, all levels", "y = Softmax (x)", _ROWS, fixed=_unit("0..1")),
    Pattern("Softmax, axis 1", "y = Softmax <axis=1> (x)", _ROWS),
    Pattern("LogSoftmax", "y = LogSoftmax (x)", _ROWS),
    # Norms.
    *(
        Pattern(
            f"LayerNormalization, gamma {gamma}, beta {beta}",
            "y = LayerNormalization (x, c, c2)",
            {**_ROWS, "c": (64,), "c2": (64,)},
            types={"c": gamma, "c2": beta},
        )
        for gamma, beta in (
            ("u8", "i32"),
            ("u8", "u8"),
            ("i8", "i32"),
            ("u16", "i32"),
            ("u16", "u16"),
            ("i16", "i32"),
            ("float", "float"),
        )
    ),
    Pattern(
        "LayerNormalization, no beta",
        "y = LayerNormalization (x, c)",
        {**_ROWS, "c": (64,)},
        types={"c": "u8"},
    ),
    Pattern(
        "LayerNormalization, gamma u16, no beta",
        "y = LayerNormalization (x, c)",
        {**_ROWS, "c": (64,)},
        types={"c": "u16"},
    ),
    Pattern(
        "RMSNormalization",
        "y = RMSNormalization (x, c)",
        {**_ROWS, "c": (64,)},
        types={"c": "u8"},
        opset=23,
    ),
    Pattern(
        "RMSNormalization, gamma u16",
        "y = RMSNormalization (x, c)",
        {**_ROWS, "c": (64,)},
        types={"c": "u16"},
        opset=23,
    ),
    Pattern(
        "InstanceNormalization",
        "y = InstanceNormalization (x, c, c2)",
        {**_IMAGE, "c": (16,), "c2": (16,)},
        types={"c": "u8", "c2": "i32"},
    ),
    Pattern(
        "GroupNormalization",
        "y = GroupNormalization <num_groups=4> (x, c, c2)",
        {**_IMAGE, "c": (16,), "c2": (16,)},
        types={"c": "float", "c2": "float"},
    ),
    Pattern(
        "BatchNormalization",
        "y = BatchNormalization (x, c, c2, c3, f1)",
        {**_IMAGE, "c": (16,), "c2": (16,), "c3": (16,), "f1": (16,)},
        types={"c2": "i32"},
    ),
    # Pools and reductions.
    Pattern(
        "MaxPool", "y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)", _IMAGE, same={"y": "x"}
    ),
    Pattern("MaxPool, other scale", "y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x)", _IMAGE),
    Pattern("AveragePool", "y = AveragePool <kernel_shape=[3,3]> (x)", _IMAGE),
    Pattern("GlobalAveragePool", "y = GlobalAveragePool (x)", {"x": (1, 64, 10, 10)}),
    Pattern("ReduceMean", "y = ReduceMean (x, i)", _ROWS, integers={"i": [-1]}),
    Pattern(
        "ReduceMean, image", "y = ReduceMean (x, i)", {"x": (1, 64, 10, 10)}, integers={"i": [2, 3]}
    ),
    Pattern("ReduceSum", "y = ReduceSum (x, i)", _ROWS, integers={"i": [-1]}),
    Pattern("ReduceMax", "y = ReduceMax (x, i)", _ROWS, integers={"i": [-1]}, same={"y": "x"}),
    Pattern("CumSum", "y = CumSum (x, i)", _ROWS, integers={"i": 1}),
    Pattern("ArgMax", "y = ArgMax <axis=-1> (x)", _ROWS),
    Pattern("TopK", "y, j = TopK (x, i)", _ROWS, integers={"i": [5]}, same={"y": "x"}),
    # Operators that move values.
    Pattern(
        "Concat, one scale",
        "y = Concat <axis=1> (x, x2)",
        {"x": (1, 8, 10, 10), "x2": (1, 8, 10, 10)},
        same={"x2": "x", "y": "x"},
    ),
    Pattern(
        "Concat, different scales",
        "t = Relu (x2) y = Concat <axis=1> (x, t)",
        {"x": (1, 8, 10, 10), "x2": (1, 8, 10, 10)},
    ),
    Pattern(
        "Split", "y, y2 = Split <axis=1, num_outputs=2> (x)", _IMAGE, same={"y": "x", "y2": "x"}
    ),
    Pattern(
        "Slice",
        "y = Slice (x, i0, i1, i2)",
        _IMAGE,
        integers={"i0": [2], "i1": [8], "i2": [1]},
        same={"y": "x"},
    ),
    Pattern("Reshape", "y = Reshape (x, i)", _IMAGE, integers={"i": [1, 16, 100]}, same={"y": "x"}),
    # Alone, it would lose its pairs.
    Pattern(
        "Relu, Transpose",
        "t = Relu (x) y = Transpose <perm=[0,2,3,1]> (t)",
        _IMAGE,
        same={"t": "x", "y": "x"},
    ),
    Pattern("Flatten", "y = Flatten (x)", _IMAGE, same={"y": "x"}),
    Pattern("Squeeze", "y = Squeeze (x, i)", _IMAGE, integers={"i": [0]}, same={"y": "x"}),
    Pattern("Unsqueeze", "y = Unsqueeze (x, i)", _ROWS, integers={"i": [1]}, same={"y": "x"}),
    Pattern("Expand", "y = Expand (x, i)", _ROWS, integers={"i": [4, 48, 64]}, same={"y": "x"}),
    Pattern("Tile", "y = Tile (x, i)", _ROWS, integers={"i": [1, 2, 2]}, same={"y": "x"}),
    Pattern(
        "Pad, constant",
        "y = Pad (x, i)",
        _IMAGE,
        integers={"i": [0, 0, 1, 1, 0, 0, 1, 1]},
        same={"y": "x"},
    ),
    Pattern(
        "Pad, reflect",
        'y = Pad <mode="reflect"> (x, i)',
        _IMAGE,
        integers={"i": [0, 0, 1, 1, 0, 0, 1, 1]},
        same={"y": "x"},
    ),
    Pattern(
        "Resize, nearest",
        'y = Resize <mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"> (x, , , i)',
        _IMAGE,
        integers={"i": [1, 16, 20, 20]},
        same={"y": "x"},
    ),
    Pattern(
        "Resize, linear",
        'y = Resize <mode="linear"> (x, , , i)',
        _IMAGE,
        integers={"i": [1, 16, 20, 20]},
        same={"y": "x"},
    ),
    Pattern(
        "DepthToSpace", 'y = DepthToSpace <blocksize=2, mode="CRD"> (x)', _IMAGE, same={"y": "x"}
    ),
    Pattern("SpaceToDepth", "y = SpaceToDepth <blocksize=2> (x)", _IMAGE, same={"y": "x"}),
    Pattern(
        "Gather of a constant, int64 input",
        "y = Gather (c, n)",
        {"c": (50, 64)},
        integers={"n": [[3, 1, 40, 7]]},
        same={"y": "c"},
    ),
    Pattern(
        "Gather of a constant, int32 input",
        "y = Gather (c, m)",
        {"c": (50, 64)},
        integers={"m": [[3, 1, 40, 7]]},
        same={"y": "c"},
    ),
    Pattern(
        "Gather, axis 1",
        "y = Gather <axis=1> (x, i)",
        _ROWS,
        integers={"i": [3, 1, 40, 7]},
        same={"y": "x"},
    ),
    Pattern(
        "GatherND", "y = GatherND (x, i)", _ROWS, integers={"i": [[0, 3], [0, 7]]}, same={"y": "x"}
    ),
    # Pairs next to each other.
    *(
        Pattern(f"Q/DQ to Q/DQ of {kind}", "", _ROWS, types={"y": kind})
        for kind in ("u8", "i8", "u16", "i16")
    ),
    Pattern("Conv, Relu, no pair between", "_t = Conv (x, w, b) y = Relu (_t)", _CONV, BYTES[:1]),
    Pattern(
        "Conv, Relu with a pair of its own", "t = Conv (x, w, b) y = Relu (t)", _CONV, BYTES[:1]
    ),
    Pattern(
        "Conv, Clip, no pair between",
        "_t = Conv (x, w, b) y = Clip (_t, f0, f2)",
        {**_CONV, "f0": (), "f2": ()},
        BYTES[:1],
    ),
    Pattern(
        "Conv, HardSwish, no pair between",
        "_t = Conv (x, w, b) y = HardSwish (_t)",
        _CONV,
        BYTES[:1],
    ),
    Pattern(
        "Add, Relu, no pair between",
        "_t = Add (x, x2) y = Relu (_t)",
        {"x": (1, 48, 64), "x2": (1, 48, 64)},
    ),
    Pattern(
        "Conv into another type (u16)", "y = Conv (x, w, b)", _CONV, BYTES[:1], types={"y": "u16"}
    ),
    Pattern(
        "Conv into another type (u8)", "y = Conv (x, w, b)", _CONV, BYTES[:1], types={"y": "u8"}
    ),
    Pattern("Conv, float result", "y = Conv (x, w, b)", _CONV, BYTES[:1], types={"y": "float"}),
    Pattern(
        "Conv, float input",
        "y = Conv (x, w, f)",
        {**_IMAGE, "w": (24, 16, 1, 1), "f": (24,)},
        BYTES[:1],
        types={"x": "float"},
    ),
    # Recurrent.
    Pattern(
        "LSTM",
        "y = LSTM <hidden_size=16> (x, w, c)",
        {"x": (12, 1, 32), "w": (1, 64, 32), "c": (1, 64, 16)},
        BYTES[1:2],
    ),
    Pattern(
        "GRU",
        "y = GRU <hidden_size=16> (x, w, c)",
        {"x": (12, 1, 32), "w": (1, 48, 32), "c": (1, 48, 16)},
        BYTES[1:2],
    ),
)
