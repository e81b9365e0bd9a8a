"""Qualcomm's NPU (HTP): a pair on every input and every output of every node, so that the graph is one partition.

Nodes without pairs on all sides run in float, or on the CPU: what pays on a CPU node by node is an exception here. The
activations of an operator have one width, 8 or 16 bits, weights 8 or 4 and biases 32. Relu and Clip are taken up by the
zero point of the operator in front. docs/engines.md has the kernel and the exactness of each pattern, from
`benchmarks/npu_patterns.py`, whose rows the rules are called after.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from onnxq.arrays import as_float32, as_int32
from onnxq.backends import surroundings
from onnxq.backends.base import Candidate, Capability, PlacementRule, Reason, Target
from onnxq.sites import Indices, Role
from onnxq.spec import FIXED, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

_CLIPS = ("Relu", "Clip")
# The scale of a Softmax's 8-bit result below which its kernel is poorer than that: no value reaches a quarter.
_SPREAD_OUT = 2.0**-10


def _check_conv(c: Candidate) -> Reason:
    if c.node.op_type == "ConvTranspose" and c.node.groups > 1:
        return "the NPU computes transposed convolutions of one channel a group wrongly, and refuses other groups"
    return surroundings.check_weighted(c)


def _check_matrix(c: Candidate) -> Reason:
    return surroundings.check_weighted(c) or (
        None if c.rank(1) == 2 else "its weight is not a matrix"
    )


def _check_clip(c: Candidate) -> Reason:
    fusing = c.index.maker(c.node, 0, *_FUSING)
    # With a second reader the result without the Relu is needed as well.
    if fusing is None or c.index.find_sole_reader(fusing.result) is None:
        return None
    return "the pair behind it takes it up"


def _list_floats(c: Candidate) -> Indices:
    """All inputs, constants too."""
    # The provider takes a node in integers only with a DequantizeLinear on each input.
    return tuple(k for k, name in enumerate(c.node.inputs) if name)


def _fix_unit_range(spec: QuantSpec) -> QParams:
    """From 0 up to 1, which itself is no value: of a Sigmoid."""
    # In 16 bits the provider replaces any other scale in the file by this one, without a word.
    return _fix_range(spec, 2.0**-spec.bits, 0)


def _fix_sign_range(spec: QuantSpec) -> QParams | None:
    """From -1 up to 1, which itself is no value: of a Tanh in 16 bits. In 8 any scale is right, and sound is soft."""
    return _fix_range(spec, 2.0**-15, 1 << 15) if spec.bits == 16 else None


def _is_spread_out(result: QParams) -> bool:
    """True for rows without a large value: a Softmax of 8 bits computes in steps of 1/256, whatever its result's scale.

    Rows of 65 like values have 17 to 29 dB, where the file says 43 to 58; a 16-bit result has 55 and more.
    """
    return bool(np.max(result.scale) < _SPREAD_OUT)


def _fix_range(spec: QuantSpec, scale: float, zero_point: int) -> QParams:
    return QParams(as_float32(scale), as_int32(zero_point), FIXED, spec.levels)


def _adapt_second(k: int, spec: QuantSpec) -> QuantSpec:
    """The second operand beside 16 bits: signed and symmetric. uint16 would be read as 8 bits, or not at all."""
    return (
        replace(spec, storage="int16", signed=True, symmetric=True)
        if k == 1 and spec.bits == 16
        else spec
    )


# Products of 8 bits that the matrix unit computes while the vector unit passes over one element. Qualcomm tells no
# times; the order in which operators are narrowed hangs little on it.
_PRODUCTS_AN_ELEMENT = 32


def estimate_work(c: Candidate) -> float:
    """Elements that a node writes, and its products by the speed at which they are computed."""
    written = math.prod(c.output_shape() or ())
    first = c.shape(0)
    second = c.shape(1)
    products = 0
    if c.node.op_type in ("Conv", "ConvTranspose") and second is not None:
        # A weight [C, M / group, …] of a transposed one says what becomes of an element that is read.
        places = written if c.node.op_type == "Conv" else math.prod(first or ())
        products = places * math.prod(second[1:])
    elif c.node.op_type in ("Gemm", "MatMul") and first:
        products = written * first[-1]
    return written + products / _PRODUCTS_AN_ELEMENT


_FUSING = (
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "AveragePool",
    "GlobalAveragePool",
)
_ALL = "pairs on all that it reads and on its result"
_WIDE = "in 16 bits: the kernel of 8 is coarser than its result"
_TABLE = "pairs on both sides; the scale of its result is built into the kernel"
_MOVED = surroundings.MOVE.why

RULES = (
    PlacementRule(
        name="conv",
        ops=("Conv", "ConvTranspose"),
        why=_ALL,
        weight=1,
        bias=2,
        fuses=_CLIPS,
        compute=True,
        check=_check_conv,
    ),
    PlacementRule(
        name="gemm",
        ops=("Gemm",),
        why=_ALL,
        weight=1,
        bias=2,
        fuses=_CLIPS,
        compute=True,
        check=surroundings.check_gemm,
    ),
    PlacementRule(
        name="matmul",
        ops=("MatMul",),
        why=_ALL,
        weight=1,
        fuses=_CLIPS,
        compute=True,
        check=_check_matrix,
    ),
    PlacementRule(
        name="product",
        ops=("MatMul",),
        why=_ALL,
        data=(0, 1),
        compute=True,
        adapt=_adapt_second,
    ),
    PlacementRule(
        name="binary",
        ops=("Add", "Sub", "Mul", "Div", "Pow"),
        why=_ALL,
        data=(0, 1),
        fuses=_CLIPS,
    ),
    PlacementRule(
        name="extremes",
        ops=("Max", "Min"),
        why=_ALL,
        inputs=_list_floats,
    ),
    # Its input 0 is a condition, which has no scale.
    PlacementRule(name="where", ops=("Where",), why=_ALL, data=(1, 2)),
    PlacementRule(name="clip", ops=_CLIPS, why=_ALL, check=_check_clip),
    # Unlike Relu and Clip, no product takes these up: they need a pair on each side.
    PlacementRule(
        name="unary",
        ops=("Abs", "Elu", "Exp", "Gelu", "HardSwish", "LeakyRelu", "Neg", "Sqrt"),
        why=_ALL,
    ),
    PlacementRule(name="prelu", ops=("PRelu",), why=_ALL, data=(0, 1)),
    PlacementRule(
        name="sigmoid",
        ops=("Sigmoid", "HardSigmoid"),
        why=_TABLE,
        result=_fix_unit_range,
    ),
    PlacementRule(name="tanh", ops=("Tanh",), why=_TABLE, result=_fix_sign_range),
    PlacementRule(
        name="softmax",
        ops=("Softmax", "LogSoftmax"),
        why=_ALL,
        coarse=_is_spread_out,
    ),
    # In 8 bits it has 36 dB against the file, in 16 bits 83.
    PlacementRule(
        name="layer-norm",
        ops=("LayerNormalization",),
        why=_WIDE,
        data=(0, 1),
        bias=2,
        bits=16,
        adapt=_adapt_second,
    ),
    PlacementRule(
        name="rms-norm",
        ops=("RMSNormalization",),
        why=_WIDE,
        data=(0, 1),
        bits=16,
    ),
    # In 8 bits its results are wrong, whichever scales they have.
    PlacementRule(name="sums", ops=("CumSum",), why=_WIDE, bits=16),
    PlacementRule(
        name="pool",
        ops=(
            "AveragePool",
            "GlobalAveragePool",
            "ReduceMean",
            "ReduceSum",
            "ReduceMax",
            "ReduceMin",
        ),
        why=_ALL,
    ),
    PlacementRule(name="concat", ops=("Concat",), why=_ALL, inputs=_list_floats),
    PlacementRule(name="max-pool", ops=("MaxPool",), why=_MOVED, shares=True),
    PlacementRule(
        name="move",
        ops=(*surroundings.MOVES, "Expand", "Tile", "Gather", "Pad", "Resize"),
        why=_MOVED,
        shares=True,
    ),
)

# They read a second operand of 16 bits only as `_adapt_second` makes it.
_SECOND = ("MatMul", "LayerNormalization")
# Symmetric int8 and int16 are refused by many operators.
_ACTIVATIONS = ("uint8", "uint16")
# uint8 weights lose accuracy, most of it beside 16-bit activations (54 dB instead of 80).
_weight = partial(
    Capability, role=Role.WEIGHT, symmetric=(True,), granularity=(PerTensor, PerChannel)
)
# Blocks need 16-bit activations, and are computed in float16.
CAPABILITIES = (
    Capability(role=Role.ACTIVATION, bits=(8, 16), storage=_ACTIVATIONS, symmetric=(False,)),
    Capability(
        role=Role.ACTIVATION, ops=_SECOND, bits=(16,), storage=("int16",), symmetric=(True,)
    ),
    Capability(role=Role.OUTPUT, bits=(8, 16), storage=_ACTIVATIONS, symmetric=(False,)),
    _weight(storage=("int8",)),
    _weight(bits=(4,), storage=("int4",), opset=21),
    _weight(
        ops=("MatMul", "Gemm"), bits=(4,), storage=("int4",), granularity=(PerBlock,), opset=21
    ),
)

_NO_KERNEL = {
    **surroundings.FUSED_PRODUCTS,
    **dict.fromkeys(
        surroundings.ATTENTION, "the NPU has no kernel for attention in one node: export its parts"
    ),
    "com.microsoft.QuickGelu": "the NPU has no QuickGelu",
    "Log": "the NPU's Log answers wrongly in 16 bits, without a message",
    "Erf": "the NPU has no Erf; as part of a Gelu it has",
    "LSTM": "the NPU computes LSTM in float16",
    "GRU": "the NPU computes GRU in float16",
    "RNN": "the NPU has no RNN",
}

QNN = Target(
    name="qnn",
    rules=RULES,
    capabilities=CAPABILITIES,
    no_kernel=_NO_KERNEL,
    skips=("residual", "prelu", "upsampling"),
    whole=True,
    # A Log of 16 bits, and scattered values, which are taken as if all had one scale.
    misreads=("Log", "ScatterElements"),
    exclusions=surroundings.SENSITIVE,
    # The compiler gives up where one of these reads the floats of a model's input and another node its integers.
    reads_pairs=(
        "Equal",
        "GatherElements",
        "GatherND",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Round",
        "ScatterElements",
        "ScatterND",
    ),
    estimate_work=estimate_work,
    advice="try the presets qnn-mixed and qnn-a16w8, which have 16 bits where they are needed and everywhere",
)
