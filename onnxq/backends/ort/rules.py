"""ONNX Runtime on the CPU: which pairs become quantized kernels, measured on 1.31.

Activations are uint8 asymmetric (int8 activations keep most groups float, because ORT converts only
some of them to uint8); weights int8 symmetric with zero point 0 (uint8 weights or a zero point cost the
gain). A group exists only with a QuantizeLinear behind it, save for MatMul, which writes float, and
Gemm with an int32 bias, which can.
"""

from dataclasses import replace
from functools import partial

from onnxq.arrays import Shape
from onnxq.backends import surroundings
from onnxq.backends.base import Candidate, Capability, Output, PlacementRule, Reason, Target
from onnxq.backends.cpu_costs import read_costs
from onnxq.errors import CauseAndFix
from onnxq.graph import NodeRef
from onnxq.numerics import SumOrder
from onnxq.sites import Role
from onnxq.spec import FloatType, PerBlock, PerChannel, PerTensor, QuantSpec

# Activations that fold into the QuantizeLinear behind them, since its range ends where theirs does.
_CLIPS = ("Relu", "Clip")


def _check_conv(c: Candidate) -> Reason:
    if not c.is_constant(1):
        return "its weight is computed at run time: no quantized kernel takes it"
    if c.tensor(2) is not None and not c.is_constant(2):
        return "its bias is computed at run time: no quantized kernel takes it"
    return None


def _check_gemm(c: Candidate) -> Reason:
    if not c.is_constant(1) or c.is_constant(0):
        return "its weight is computed at run time: no quantized kernel takes it"
    if c.node.transposes_data:
        return "transA=1 has no quantized kernel"
    if c.node.read_float("alpha", 1.0) != 1.0:
        return "alpha is not 1"
    factor = c.node.read_float("beta", 1.0)
    if c.tensor(2) is not None and (c.constant(2) is None or factor != 1.0):
        return "its C input is not a constant bias with beta 1"
    return surroundings.explain_columns(c)


def _check_matmul(c: Candidate) -> Reason:
    if c.is_constant(0):
        return "the constant stands on the left: no quantized kernel takes it"
    if c.is_constant(1) and c.index.find_rank(c.tensor(1)) != 2:
        return "its weight is not a matrix"
    return None


def _check_constant_weight(c: Candidate) -> Reason:
    """The reason why int8 does not pay: a MatMul of two activations has a kernel, and it is slower."""
    return (
        None
        if c.is_constant(1)
        else "both operands are activations (attention): int8 gains nothing there in ORT"
    )


def _check_maxpool(c: Candidate) -> Reason:
    return surroundings.check_max_pool(c) or (
        None if c.rank(0) in (None, 4) else "only 2-D pooling has a uint8 kernel"
    )


def _check_recurrent(c: Candidate) -> Reason:
    if not c.is_constant(1) or not c.is_constant(2):
        return "its weights are computed at run time: no quantized kernel takes them"
    return None


def _check_lstm(c: Candidate) -> Reason:
    if c.attr("layout", 0):
        return "its batch comes first (layout 1): no quantized kernel takes it"
    return _check_recurrent(c)


# In the order of precedence. Kernels and reasons: measured on onnxruntime 1.31.
RULES = (
    # A dense 3x3 is 3 to 4 times as fast as float from 20 channels on, and half as fast at 4: of
    # narrow ones the costs decide.
    PlacementRule(
        name="conv",
        ops=("Conv",),
        why="pairs on input and output; the activation behind folds into the output's QuantizeLinear",
        weight=1,
        bias=2,
        fuses=_CLIPS,
        compute=True,
        check=_check_conv,
    ),
    PlacementRule(
        name="gemm",
        ops=("Gemm",),
        why="pair on the input; with an int32 bias the kernel writes float or, before another int8 node, uint8",
        output=Output.EITHER,
        weight=1,
        bias=2,
        fuses=_CLIPS,
        compute=True,
        check=_check_gemm,
    ),
    PlacementRule(
        name="matmul",
        ops=("MatMul",),
        why="pair on the input only: a pair behind costs time and, in transformers, the answers",
        output=Output.FLOAT,
        weight=1,
        compute=True,
        check=_check_matmul,
        unpaid=_check_constant_weight,
    ),
    PlacementRule(
        name="lstm",
        ops=("LSTM",),
        why="its input and hidden state are quantized at each run, on the scale of their own values",
        output=Output.FLOAT,
        weight=1,
        more_weights=(2,),
        compute=True,
        dynamic=True,
        check=_check_lstm,
    ),
    PlacementRule(
        name="residual-add",
        ops=("Add",),
        why="pairs on both inputs and the output keep a residual net in integers",
        data=(0, 1),
        fuses=_CLIPS,
        check=surroundings.check_two_activations,
    ),
    PlacementRule(
        name="gate-mul",
        ops=("Mul",),
        why="a squeeze-excite gate between int8 convolutions",
        data=(0, 1),
        fuses=_CLIPS,
        check=surroundings.check_gate,
    ),
    surroundings.CONCAT,
    PlacementRule(
        name="global-average-pool",
        ops=("GlobalAveragePool",),
        why="pairs on both sides",
    ),
    replace(surroundings.MOVE, name="max-pool", ops=("MaxPool",), check=_check_maxpool),
    PlacementRule(
        name="leaky-relu",
        ops=("LeakyRelu",),
        why="pairs on both sides: it does not fold into the convolution before it",
    ),
    surroundings.MOVE,
    surroundings.RESIZE,
)

_NARROW = surroundings.BYTE_WIDTHS
_activation = partial(Capability, role=Role.ACTIVATION)
_weight = partial(Capability, role=Role.WEIGHT, granularity=(PerTensor, PerChannel))
# Operators whose weight may have one scale per output channel.
_channel = partial(_weight, ops=("Conv", "Gemm", "MatMul", "LSTM"))

# Rows of a table are dequantized behind the Gather: ORT would compute a DequantizeLinear in front of it for the whole
# table, when it loads. GatherBlockQuantized takes blocks of 4 bits; for bytes it is slow before 1.32.
_TABLES = (
    _weight(ops=("Gather",), symmetric=(True,), storage=("int8",), granularity=(PerChannel,)),
    _weight(
        ops=("Gather",),
        bits=(4,),
        symmetric=(True,),
        storage=("int4",),
        granularity=(PerBlock,),
        blocks=(16, 32, 64, 128, 256),
    ),
)

# The first row that accepts a spec gives the warning, so those without one come before.
CAPABILITIES = (
    _activation(storage=("uint8", "int8")),
    # DynamicQuantizeLinear makes no other type.
    _activation(
        ops=("Gemm", "MatMul", "LSTM"), storage=("uint8",), symmetric=(False,), dynamic=(True,)
    ),
    _activation(
        bits=(2, 3, 4, 5, 6, 7),
        storage=("uint8", "int8"),
        warning="activations below 8 bits run in kernels of 8 bits: they are as large, and a Clip of each costs time",
    ),
    _activation(
        bits=(16,),
        storage=("uint16", "int16"),
        opset=21,
        warning="16-bit activations have no fused kernel in ORT on the CPU: exact, but slower than float",
    ),
    _channel(bits=_NARROW, storage=("int8",), symmetric=(True,)),
    # In the file only: a Cast to int8 in front of the DequantizeLinear, which ORT (1.23 on) does once, when it loads.
    _channel(bits=(2, 3, 4), storage=("int4",), symmetric=(True,), opset=21),
    _channel(
        bits=_NARROW,
        storage=("uint8", "int8"),
        warning="weights with a zero point cost most of the int8 gain in ORT on the CPU, which before 1.27 runs no "
        "Conv with one for each channel: `weights.granularity: tensor`",
    ),
    _channel(
        bits=(16,),
        storage=("int16",),
        symmetric=(True,),
        opset=21,
        warning="16-bit weights have no fused kernel in ORT on the CPU: exact, but slower than float",
    ),
    *_TABLES,
)

# Weights of one scale that MatMulNBits reads in every release of ONNX Runtime from 1.23 on (measured to 1.32).
_WIDEST_BLOCK = 256


def _check_blocks(_shape: Shape, spec: QuantSpec) -> CauseAndFix | None:
    grain = spec.granularity
    if not isinstance(grain, PerBlock) or grain.size <= _WIDEST_BLOCK:
        return None
    cause = f"ONNX Runtime before 1.27 computes garbage in blocks of {grain.size}, and 1.27 and 1.28 load none"
    return cause, f"use block_size {_WIDEST_BLOCK}"


# Only a MatMul has a weight-only kernel: it and the DequantizeLinear of its weight become MatMulNBits.
_matmul = partial(
    _weight,
    ops=("MatMul",),
    granularity=(PerTensor, PerChannel, PerBlock),
    shape=_check_blocks,
    opset=21,
)
WEIGHT_ONLY = (
    _matmul(bits=(2, 3, 4), storage=("int4", "uint4")),
    # The type is one of opset 25.
    _matmul(bits=(2,), storage=("int2", "uint2"), opset=25),
    _matmul(bits=_NARROW),
    _weight(
        ops=("Conv", "ConvTranspose", "Gemm", "LSTM", "GRU"),
        bits=_NARROW,
        warning="ORT has no weight-only kernel for {op}: its weights are dequantized at every run, "
        "a smaller file for a slower model",
    ),
    *_TABLES,
)

_NO_FORM = {
    **surroundings.FUSED_PRODUCTS,
    "RNN": "ORT has no quantized RNN kernel",
    # What is left of them: products of two matrices became MatMuls.
    "Einsum": "ORT has no quantized Einsum kernel",
}
_NO_KERNEL = {
    **_NO_FORM,
    "ConvTranspose": "ORT has no quantized ConvTranspose kernel; `mode: weight-only` makes the file "
    "smaller, and no faster",
    "GRU": "ORT has no quantized GRU kernel; `mode: weight-only` makes the file smaller, and no faster",
}
# Its kernel is there, and loses.
_NO_GAIN = {
    "AveragePool": "ORT's quantized AveragePool is slower than the float one",
    **dict.fromkeys(
        surroundings.ATTENTION,
        "attention in one node: int8 gains nothing in ORT on products of two activations",
    ),
}


# Operators that u8 x s8 kernels compute in a Q/DQ file, and those kernels as nodes of their own, by the shape of their
# weight: [M, C / group, *taps]; [K, N], or [N, K] with transB; [K, N].
CONVS = ("Conv", "QLinearConv")
_GEMMS = ("Gemm", "QGemm")
_MATRICES = (
    "MatMul",
    "QLinearMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QAttention",
)


def find_sum_order(node: NodeRef, shape: Shape) -> SumOrder | None:
    """The order of axes in which u8 x s8 kernels read a node's weight, adding two products to a 16-bit sum.

    Conv: input channels of one tap, tap after tap. None where no sum is of 16 bits: a Conv of one input and one output
    channel per group has an exact kernel, and other operators' weights are multiplied as float or uint8. Measured on
    onnxruntime 1.31.
    """
    rank = len(shape)
    if node.op_type in CONVS and rank > 2:
        exact = shape[1] == 1 and shape[0] == node.groups
        return None if exact else (0, *range(2, rank), 1)
    if node.op_type == "LSTM" and rank == 3:
        # [directions, rows, features]: each direction is a matrix, and they share the scale of a row.
        return ((1, 0), 2)
    if node.op_type in _GEMMS and rank == 2:
        return (0, 1) if node.is_transposed else (1, 0)
    if node.op_type in _MATRICES and rank == 2:
        return (1, 0)
    return None


_BASE = Target(
    name="ort",
    rules=RULES,
    capabilities=CAPABILITIES,
    no_kernel=_NO_KERNEL,
    no_gain=_NO_GAIN,
    costs=read_costs(__package__),
    # Between pairs its optimizer gives float Convs, Gemms and ConvTransposes int8
    # weights per tensor.
    quantizes_alone=True,
    times_itself=True,
    skips=(),
    exclusions={
        "stem": surroundings.explain_stem,
        "stem-depthwise": surroundings.explain_stem_depthwise,
        **surroundings.SENSITIVE,
    },
    yielding=("stem",),
    dynamic_ops=("LSTM",),
    advice="try the presets ort-int8-mse and ort-int8-percentile",
)
ORT = replace(_BASE, sum_order=find_sum_order, looped_ops=("Gemm", "MatMul"))
# The kernels that quantize their data at each run write floats, so that each stands for itself.
_DYNAMIC_WHY = "its input is quantized at each run, on the scale of its own values"
DYNAMIC_RULES = (
    *(
        replace(rule, why=_DYNAMIC_WHY, output=Output.FLOAT, fuses=())
        for rule in RULES
        if rule.name in ("gemm", "matmul")
    ),
    *(rule for rule in RULES if rule.name == "lstm"),
)
_NO_DYNAMIC_GAIN = {
    "Conv": "ORT's ConvInteger, which quantizes its data at each run, is several times slower than the float Conv",
}
ORT_DYNAMIC = replace(
    ORT, rules=DYNAMIC_RULES, no_gain=_NO_DYNAMIC_GAIN, quantizes_alone=False, dynamic=True
)
_GRU = PlacementRule(
    name="gru",
    ops=("GRU",),
    why="integers in the file alone",
    output=Output.FLOAT,
    weight=1,
    more_weights=(2,),
    compute=True,
    check=_check_recurrent,
)
_TRANSPOSED = replace(
    _GRU,
    name="conv-transpose",
    ops=("ConvTranspose",),
    more_weights=(),
    check=surroundings.check_weighted,
)


def _refuse_narrow(c: Candidate, kind: FloatType) -> str:
    """Why a MatMul computes in float32 beside few bits in its weight; "" where it need not."""
    # 1.32: the Cast of the scales, which it puts in, is folded in the main graph only, and MatMulNBits reads zeros.
    if c.node.scope and c.node.op_type == "MatMul" and c.is_constant(1):
        return f"ONNX Runtime answers with zeros when MatMulNBits has {kind} scales in the body of an If, Loop or Scan"
    return ""


ORT_WEIGHT_ONLY = replace(
    _BASE,
    advice="take more bits or smaller blocks",
    # MatMulNBits multiplies by scales of either sign.
    signed_scales=True,
    rules=(*RULES, _GRU, _TRANSPOSED),
    capabilities=WEIGHT_ONLY,
    refuse_narrow=_refuse_narrow,
    no_kernel=_NO_FORM,
)
