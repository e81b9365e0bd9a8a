"""TensorRT: the places of pairs in which its kernels run in int8, as measured on TensorRT-RTX 1.7 for SM86.

Pairs on both operands of Conv, Gemm and MatMul, on the skip branch of a residual Add, and nowhere else: the engine
computes bias, activation and the next QuantizeLinear behind the product in one kernel, so a pair between a
convolution and its activation only rounds twice. Symmetric int8, zero point 0, one scale of shape [] for an
activation (of shape [1] the convolution falls to float), weights per output channel, bias in float (a
DequantizeLinear of int32 is refused by its parser).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from onnxq.arrays import Shape
from onnxq.backends import surroundings
from onnxq.backends.base import Candidate, Capability, Output, PlacementRule, Reason, Target
from onnxq.errors import CauseAndFix
from onnxq.graph import MICROSOFT, NodeRef
from onnxq.sites import Indices, JsonObject, Names, NameSet, Role
from onnxq.spec import FLOAT8, FloatType, PerBlock, PerChannel, PerTensor, QuantSpec

# TensorRT in narrow float types: operators that it computes in float32 only.
# Proved by building every ONNX operator with TensorRT-RTX 1.7 for SM86 in float32, float16 and bfloat16; those that
# fail in a narrow type alone stand here. tests/backends/trt/test_floats.py builds them again.

_ALL = ("Celu", "MeanVarianceNormalization", "Range")
# In bfloat16 its parser refuses these as well, and no compute capability has a transposed convolution.
_ONLY_FLOAT16 = (
    "ConvTranspose",
    "GRU",
    "GlobalLpPool",
    "HardSwish",
    "LpNormalization",
    "LpPool",
    "Mish",
    "RandomUniformLike",
    "RandomNormalLike",
    "Shrink",
)
MISSING: Mapping[FloatType, Names] = {
    FloatType.FLOAT16: _ALL,
    FloatType.BFLOAT16: (*_ALL, *_ONLY_FLOAT16),
}


def refuse_narrow(c: Candidate, kind: FloatType) -> str:
    """Why TensorRT computes this node in float32 only; "" where it has a kernel for the type."""
    op_type = c.node.op_type
    if op_type in MISSING[kind]:
        return f"TensorRT has no {kind} kernel for {op_type}"
    weight = c.shape(1)
    grouped = op_type in ("Conv", "ConvTranspose") and c.node.groups > 1
    # TensorRT-RTX has them; TensorRT 11.2 ends the build, on Ada (NVIDIA/TensorRT#4838). Depthwise ones are others.
    if grouped and weight is not None and weight[0 if op_type == "ConvTranspose" else 1] > 1:
        return f"TensorRT 11.2 does not build some grouped convolutions in {kind}"
    return ""


# Operators that TensorRT's parser does not take, of those that exporters and ONNX Runtime's optimizer write.
# Proved with the parser of TensorRT-RTX 1.7: tests/backends/trt/test_parser.py asks it again.

# Of com.microsoft. Another of these is looked for among the plugins.
TAKEN = (
    "Gelu",
    "GroupQueryAttention",
    "MatMulNBits",
    "MultiHeadAttention",
    "RotaryEmbedding",
    "SkipSimplifiedLayerNormalization",
)
_UNKNOWN = (
    "it knows this operator of ONNX Runtime only as a plugin; "
    "export the network without fusing it for ONNX Runtime"
)


def refuse_float(node: NodeRef) -> str:
    """Why TensorRT's parser does not take a node, whatever its type; "" where it does, or a plugin may."""
    if node.domain == MICROSOFT:
        if node.op_type == "GroupQueryAttention" and not node.read_float("scale", 0.0):
            return "it asks for the attribute `scale`, which the node leaves to the default"
        return "" if node.op_type in TAKEN else _UNKNOWN
    if node.is_onnx("Attention") and any(node.outputs[1:]):
        return "it takes attention with one output only; caches belong into Concats in front of it"
    if node.op_type == "DynamicQuantizeLinear":
        return "it has no scales that are computed at each run; `onnxq convert` leaves such products float"
    return ""


def _check_conv(c: Candidate) -> Reason:
    if not c.is_constant(1):
        return "its weight is computed at run time: TensorRT has no int8 kernel for that"
    return surroundings.check_data(c)


def _check_gemm(c: Candidate) -> Reason:
    if c.is_constant(0):
        return "its data is constant"
    if c.is_constant(1) and c.node.transposes_data:
        return "transA=1 turns its data around: the pair would not stand at the product"
    return None


def _check_gain(c: Candidate) -> Reason:
    """Why a product with one output channel, or of two activations, does not pay."""
    if not c.is_constant(1):
        return "its weight is computed at run time: it is left float, as all products of two activations"
    # Measured: int8 with one column is padded to two and sliced again; one row (batch 1) is not.
    weight = c.shape(1)
    columns = 0 if c.node.is_transposed else 1
    if weight is not None and len(weight) == 2 and weight[columns] == 1:
        return "a product with one column: TensorRT pads it in int8, which costs more than it saves"
    return None


def _check_matmul(c: Candidate) -> Reason:
    if surroundings.multiplies_activations(c.index, c.node):
        return "both operands are computed"
    if not c.is_constant(1):
        return "the constant stands on the left: its channels are not the product's columns"
    if c.rank(1) != 2:
        return "its weight is not a matrix: one scale a column cannot be said"
    return None


def _check_cut(c: Candidate) -> Reason:
    check = _check_gemm if c.node.op_type == "Gemm" else _check_matmul
    return check(c) or (None if surroundings.find_attention_cut(c) else "its result is not cut")


def _check_attention(c: Candidate, part: int) -> Reason:
    found = surroundings.find_attention(c.index, c.node)
    if found is not None and found[part] == c.node.name:
        return None
    return f"not the {('scores', 'values')[part]} of attention"


def _find_partners(c: Candidate) -> Names:
    return tuple(
        name for name in surroundings.find_attention(c.index, c.node) or () if name != c.node.name
    )


def _check_residual(c: Candidate) -> Reason:
    return None if surroundings.find_residual(c) else "not the end of a residual block"


def _list_skip_inputs(c: Candidate) -> Indices:
    return (surroundings.find_residual(c) or ())[:1]


def _takes_sum(c: Candidate, chosen: NameSet) -> bool:
    """True when the convolution branch ends in a chosen convolution, whose kernel can compute the sum as well."""
    residual = surroundings.find_residual(c)
    return residual is not None and surroundings.find_backbone(c.index, residual[1]) in chosen


# TensorRT fuses the two products and the softmax of attention as one kernel, "mha" in its names.
_MHA_OFF = (
    "attention stays float: quantized it may cost accuracy, and only all four operands and the result together make "
    "TensorRT's fused kernel"
)
_rule = partial(PlacementRule, output=Output.FLOAT)
_product = partial(_rule, compute=True)
_attention = partial(
    _product,
    ops=("MatMul",),
    why="pairs on query, key, softmax and value, and on the result: with one missing the fused kernel falls apart",
    data=(0, 1),
    opt_in=_MHA_OFF,
    attention=True,
    together=_find_partners,
)

# In the order of precedence: of the rules for MatMul, those for one place in the graph come before the general one.
RULES = (
    _product(
        name="conv",
        ops=("Conv",),
        why="pairs on input and weight; bias, activation and the next QuantizeLinear follow in one kernel",
        weight=1,
        bias=2,
        check=_check_conv,
    ),
    _product(
        name="matmul-qkv",
        ops=("Gemm", "MatMul"),
        why="one weight for query, key and value: without a pair on the result TensorRT cuts up the weight instead, "
        "and dequantizes the parts",
        output=Output.PAIR,
        weight=1,
        bias=2,
        check=_check_cut,
        unpaid=_check_gain,
        closes=surroundings.find_attention_cut,
    ),
    _product(
        name="gemm",
        ops=("Gemm",),
        why="pairs on input and weight",
        weight=1,
        bias=2,
        check=_check_gemm,
        unpaid=_check_gain,
    ),
    _product(
        name="matmul",
        ops=("MatMul",),
        why="pairs on input and weight; one pair serves all readers of the input (query, key, value)",
        weight=1,
        check=_check_matmul,
        unpaid=_check_gain,
    ),
    _attention(name="attention-qk", check=partial(_check_attention, part=0)),
    _attention(name="attention-pv", check=partial(_check_attention, part=1), output=Output.PAIR),
    _product(
        name="product",
        ops=("MatMul",),
        why="pairs on both operands: with one TensorRT computes in float and quantizes besides",
        data=(0, 1),
        check=surroundings.check_all_computed,
        opt_in="a product of two activations stays float: int8 costs it accuracy",
    ),
    _rule(
        name="residual-add",
        ops=("Add",),
        why="a pair on the skip branch only: the kernel reads int8 and the float sum of its own convolution",
        inputs=_list_skip_inputs,
        check=_check_residual,
        follow=_takes_sum,
    ),
    _rule(
        name="concat",
        ops=("Concat",),
        why="inputs that have pairs for other readers share one scale with the result: bytes are copied",
        data=(),
        shares=True,
        joins=True,
    ),
    _rule(
        name="max-pool",
        ops=("MaxPool",),
        why="pools bytes, and shares one scale with an input that has a pair for other readers",
        shares=True,
        joins=True,
        check=surroundings.check_data,
    ),
)

# All in int8; below 8 bits a Clip or the values themselves keep to the range.
_NARROW = surroundings.BYTE_WIDTHS
_capability = partial(Capability, storage=("int8",), symmetric=(True,))
# float8e4m3fn is a type of opset 19.
_float8 = partial(_capability, storage=(FLOAT8,), opset=19)
# Operators whose weight may have one scale per output channel.
_CHANNEL: JsonObject = {
    "role": Role.WEIGHT,
    "ops": ("Conv", "Gemm", "MatMul"),
    "granularity": (PerTensor, PerChannel),
}

# Elements per scale that its int4 kernels read.
_BLOCKS = (16, 32, 64, 128)
# Taps of a convolution's kernel, measured: 5x5 and 3x3x3 run in FP8, 6x6 and 4x4x4 in float, with the pairs computed
# beside.
_FP8_TAPS = 32


def _check_taps(shape: Shape, _: QuantSpec) -> CauseAndFix | None:
    taps = math.prod(shape[2:])
    if taps <= _FP8_TAPS:
        return None
    cause = (
        f"its kernel has {taps} taps: beyond {_FP8_TAPS} TensorRT convolves in float, not in FP8"
    )
    return cause, "it stays float"


def _check_blocks(shape: Shape, spec: QuantSpec) -> CauseAndFix | None:
    grain = spec.granularity
    if not isinstance(grain, PerBlock) or shape[grain.axis] % grain.size == 0:
        return None
    rows = shape[grain.axis]
    fitting = [size for size in _BLOCKS if rows % size == 0]
    fix = (
        f"use block_size {fitting[-1]} for it"
        if fitting
        else "leave it float, or quantize in static mode"
    )
    return f"its {rows} rows do not make whole blocks of {grain.size}", fix


CAPABILITIES = (
    _capability(role=Role.ACTIVATION, bits=_NARROW),
    _capability(role=Role.OUTPUT, bits=_NARROW),
    _capability(**_CHANNEL, bits=_NARROW),
    _float8(role=Role.ACTIVATION),
    _float8(role=Role.OUTPUT),
    _float8(
        **_CHANNEL,
        shape=_check_taps,
        warning="FP8 kernels exist from compute capability 8.9 on; on older GPUs TensorRT refuses to build",
    ),
)

# Weights of Conv in int4 are build errors.
_weight = partial(_capability, role=Role.WEIGHT, ops=("MatMul", "Gemm"))
WEIGHT_ONLY = (
    _weight(
        bits=(2, 3, 4),
        storage=("int4",),
        granularity=(PerBlock,),
        blocks=_BLOCKS,
        shape=_check_blocks,
        opset=21,
    ),
    _weight(bits=_NARROW, granularity=(PerTensor, PerChannel)),
)


# From so many weights on, reading a byte each instead of two or four repays a launch (about 2 us).
_ROW_WEIGHTS = 1 << 22


def _explain_one_row(candidate: Candidate, _: Candidate | None) -> Reason:
    """A vector times a matrix, as the classifier behind a pooling is at batch 1.

    In float product, bias and activation are one kernel, in int8 two; NVIDIA leaves GEMV out as well.
    """
    if candidate.node.op_type not in ("Gemm", "MatMul") or not candidate.is_constant(1):
        return None
    data = candidate.shape(0)
    weight = candidate.shape(1)
    if (
        data is None
        or weight is None
        or math.prod(data[:-1]) != 1
        or math.prod(weight) >= _ROW_WEIGHTS
    ):
        return None
    return "a product with one row in the samples: int8 needs one more kernel, and so few weights do not repay it"


_NO_KERNEL = {
    **surroundings.FUSED_PRODUCTS,
    "ConvTranspose": "TensorRT runs transposed convolutions in float whatever stands around them",
    "AveragePool": "TensorRT averages in float whatever stands around it; a pair in front only adds a kernel",
    "LSTM": "TensorRT runs LSTM in float",
    "GRU": "TensorRT runs GRU in float",
    "RNN": "TensorRT runs RNN in float",
    "Einsum": "it is no product of matrices by the sizes that are known: write it as MatMul",
}

# There is no table of costs for GPUs, so every node that the rules take is quantized.
TRT = Target(
    name="trt",
    rules=RULES,
    capabilities=CAPABILITIES,
    zero_points=False,
    # Its Clip takes floats.
    bounds_integers=False,
    int32_bias=False,
    high_precision=FloatType.FLOAT16,
    refuse_narrow=refuse_narrow,
    refuse_float=refuse_float,
    strict=True,
    # The stem runs in int8 too: TensorRT pads its channels, and a float stem costs two kernels of its own.
    exclusions={**surroundings.SENSITIVE, "one-row": _explain_one_row},
    advice="try another observer (mse, minmax), or trt-fp8",
    no_kernel=_NO_KERNEL,
    no_gain=dict.fromkeys(
        surroundings.ATTENTION, "attention in one node stays float: no pair can stand inside it"
    ),
)
TRT_WEIGHT_ONLY = replace(
    TRT, capabilities=WEIGHT_ONLY, no_kernel=surroundings.FUSED_PRODUCTS, no_gain={}
)
