"""TensorRT: where pairs must stand so that its kernels run in int8, as measured on TensorRT-RTX 1.7 for SM86.

Pairs on both operands of Conv, Gemm and MatMul, on the skip branch of a residual Add, and nowhere else: the engine
computes bias, activation and the next QuantizeLinear behind the product in one kernel, so a pair between a
convolution and its activation only rounds twice. Symmetric int8, zero point 0, one scale of shape [] for an
activation (of shape [1] the convolution falls to float), weights per output channel, bias in float (a
DequantizeLinear of int32 is refused by its parser).
"""

from __future__ import annotations

import math

from onnxq.sites import Role
from onnxq.spec import FLOAT8, PerBlock, PerChannel, PerTensor, QuantSpec
from onnxq.targets.base import Candidate, Capability, Output, PlacementRule, Shape, Target
from onnxq.targets.surroundings import attention_of, backbone, cut_for_attention, resolved, skip_input, two_computed


def _conv(c: Candidate) -> str | None:
    if not c.is_constant(1):
        return "its weight is computed at run time: TensorRT has no int8 kernel for that"
    if c.is_constant(0):
        return "its data is constant"
    return None


def _gemm(c: Candidate) -> str | None:
    if c.is_constant(0):
        return "its data is constant"
    if c.is_constant(1) and c.attr("transA", 0):
        return "transA=1 turns its data around: the pair would not stand at the product"
    return None


def _gemm_unpaid(c: Candidate) -> str | None:
    if not c.is_constant(1):
        return "its weight is computed at run time: it is left float, as all products of two activations"
    return _vector(c, 0 if c.attr("transB", 0) else 1)


def _matmul(c: Candidate) -> str | None:
    if two_computed(c.index, c.node):
        return "both operands are computed"
    if not c.is_constant(1):
        return "the constant stands on the left: its channels are not the product's columns"
    if c.rank(1) != 2:
        return "its weight is not a matrix: one scale a column cannot be said"
    return None


def _matmul_unpaid(c: Candidate) -> str | None:
    return _vector(c, 1)


def _cut(c: Candidate) -> str | None:
    return _matmul(c) or (None if cut_for_attention(c.index, c.node) is not None else "its result is not cut")


def _vector(c: Candidate, axis: int) -> str | None:
    """Measured: int8 with one column is padded to two and sliced again; one row (batch 1) needs nothing of the kind."""
    weight = c.shape(1)
    if weight is not None and len(weight) == 2 and weight[axis] == 1:
        return "a product with one column: TensorRT pads it in int8, which costs more than it saves"
    return None


def _scores(c: Candidate) -> str | None:
    found = attention_of(c.index, c.node)
    return None if found is not None and found[0] == c.node.name else "not the scores of attention"


def _values(c: Candidate) -> str | None:
    found = attention_of(c.index, c.node)
    return None if found is not None and found[1] == c.node.name else "not the values of attention"


def _product(c: Candidate) -> str | None:
    return None if two_computed(c.index, c.node) else "one operand is constant"


def _partners(c: Candidate) -> tuple[str, ...]:
    return tuple(name for name in attention_of(c.index, c.node) or () if name != c.node.name)


def _residual(c: Candidate) -> str | None:
    return None if skip_input(c.index, c.node) is not None else "not the end of a residual block"


def _skip(c: Candidate) -> tuple[int, ...]:
    k = skip_input(c.index, c.node)
    return () if k is None else (k,)


def _takes_the_sum(c: Candidate, chosen: frozenset[str]) -> bool:
    """The convolution branch ends in a chosen convolution, whose kernel can take the sum in."""
    k = skip_input(c.index, c.node)
    return k is not None and backbone(c.index, resolved(c.index, c.node)[1 - k]) in chosen


def _float_data(c: Candidate) -> str | None:
    return "its data is constant" if c.is_constant(0) else None


_MHA_OFF = (
    "attention stays float: quantized it may cost accuracy, and only all four operands and the result together make "
    "TensorRT's fused kernel"
)

RULES: tuple[PlacementRule, ...] = (
    PlacementRule(
        name="conv",
        ops=("Conv",),
        kernel="correlation Int8",
        why="pairs on input and weight; bias, activation and the next QuantizeLinear follow in one kernel",
        output=Output.FLOAT,
        weight=1,
        bias=2,
        compute=True,
        check=_conv,
    ),
    PlacementRule(
        name="gemm",
        ops=("Gemm",),
        kernel="gemm Int8",
        why="pairs on input and weight",
        output=Output.FLOAT,
        weight=1,
        bias=2,
        compute=True,
        check=_gemm,
        unpaid=_gemm_unpaid,
    ),
    PlacementRule(
        name="matmul-qkv",
        ops=("MatMul",),
        kernel="gemm Int8",
        why="one weight for query, key and value: without a pair on the result TensorRT cuts up the weight instead, "
        "and dequantizes the parts",
        output=Output.PAIR,
        weight=1,
        compute=True,
        check=_cut,
        unpaid=_matmul_unpaid,
        closes=lambda c: cut_for_attention(c.index, c.node),
    ),
    PlacementRule(
        name="matmul",
        ops=("MatMul",),
        kernel="gemm Int8",
        why="pairs on input and weight; one pair serves all readers of the input (query, key, value)",
        output=Output.FLOAT,
        weight=1,
        compute=True,
        check=_matmul,
        unpaid=_matmul_unpaid,
    ),
    PlacementRule(
        name="attention-qk",
        ops=("MatMul",),
        kernel="_gemm_mha_v2 Int8",
        why="pairs on query, key, softmax and value, and on the result: with one missing the fused kernel falls apart",
        output=Output.FLOAT,
        data=(0, 1),
        compute=True,
        check=_scores,
        opt_in=_MHA_OFF,
        attention=True,
        together=_partners,
    ),
    PlacementRule(
        name="attention-pv",
        ops=("MatMul",),
        kernel="_gemm_mha_v2 Int8",
        why="pairs on query, key, softmax and value, and on the result: with one missing the fused kernel falls apart",
        output=Output.PAIR,
        data=(0, 1),
        compute=True,
        check=_values,
        opt_in=_MHA_OFF,
        attention=True,
        together=_partners,
    ),
    PlacementRule(
        name="product",
        ops=("MatMul",),
        kernel="gemm Int8",
        why="pairs on both operands: with one TensorRT computes in float and quantizes besides",
        output=Output.FLOAT,
        data=(0, 1),
        compute=True,
        check=_product,
        opt_in="a product of two activations stays float: int8 costs it accuracy",
    ),
    PlacementRule(
        name="residual-add",
        ops=("Add",),
        kernel="kgen reading Int8",
        why="a pair on the skip branch only: the kernel reads int8 and the float sum of its own convolution",
        output=Output.FLOAT,
        inputs=_skip,
        check=_residual,
        follow=_takes_the_sum,
    ),
    PlacementRule(
        name="concat",
        ops=("Concat",),
        kernel="kgen writing Int8",
        why="inputs that have pairs for other readers share one scale with the result: bytes are copied",
        output=Output.FLOAT,
        data=(),
        shares=True,
        joins=True,
    ),
    PlacementRule(
        name="max-pool",
        ops=("MaxPool",),
        kernel="maxpool Int8",
        why="pools bytes, and shares one scale with an input that has a pair for other readers",
        output=Output.FLOAT,
        shares=True,
        joins=True,
        check=_float_data,
    ),
)

_CHANNEL = ("Conv", "Gemm", "MatMul")
_NARROW = (2, 3, 4, 5, 6, 7, 8)

_BLOCKS = (16, 32, 64, 128)
# Measured: 5x5 and 3x3x3 run in FP8, 6x6 and 4x4x4 in float, with the pairs computed beside.
_FP8_TAPS = 32


def _few_taps(shape: Shape, _: QuantSpec) -> tuple[str, str] | None:
    if math.prod(shape[2:]) <= _FP8_TAPS:
        return None
    return (
        f"its kernel has {math.prod(shape[2:])} taps: beyond {_FP8_TAPS} TensorRT convolves in float, not in FP8",
        "it stays float",
    )


def _whole_blocks(shape: Shape, spec: QuantSpec) -> tuple[str, str] | None:
    grain = spec.granularity
    if not isinstance(grain, PerBlock) or shape[grain.axis] % grain.size == 0:
        return None
    fitting = [size for size in _BLOCKS if shape[grain.axis] % size == 0]
    fix = f"use block_size {fitting[-1]} for it" if fitting else "leave it float, or quantize in static mode"
    return f"its {shape[grain.axis]} rows do not make whole blocks of {grain.size}", fix


CAPABILITIES: tuple[Capability, ...] = (
    Capability(role=Role.ACTIVATION, bits=_NARROW, storage=("int8",), symmetric=(True,)),
    Capability(role=Role.OUTPUT, bits=_NARROW, storage=("int8",), symmetric=(True,)),
    Capability(
        role=Role.WEIGHT,
        ops=_CHANNEL,
        bits=_NARROW,
        storage=("int8",),
        symmetric=(True,),
        granularity=(PerTensor, PerChannel),
    ),
    Capability(role=Role.ACTIVATION, storage=(FLOAT8,), symmetric=(True,), opset=19),
    Capability(role=Role.OUTPUT, storage=(FLOAT8,), symmetric=(True,), opset=19),
    Capability(
        role=Role.WEIGHT,
        ops=_CHANNEL,
        storage=(FLOAT8,),
        symmetric=(True,),
        granularity=(PerTensor, PerChannel),
        shape=_few_taps,
        opset=19,
        warning="FP8 kernels exist from compute capability 8.9 on; on older GPUs TensorRT refuses to build",
    ),
)

WEIGHT_ONLY: tuple[Capability, ...] = (
    Capability(
        role=Role.WEIGHT,
        ops=("MatMul", "Gemm"),
        bits=(2, 3, 4),
        storage=("int4",),
        symmetric=(True,),
        granularity=(PerBlock,),
        blocks=_BLOCKS,
        shape=_whole_blocks,
        opset=21,
    ),
    Capability(
        role=Role.WEIGHT,
        ops=("MatMul", "Gemm"),
        bits=_NARROW,
        storage=("int8",),
        symmetric=(True,),
        granularity=(PerTensor, PerChannel),
    ),
)

_NO_KERNEL = {
    "ConvTranspose": "TensorRT runs transposed convolutions in float whatever stands around them",
    "AveragePool": "TensorRT averages in float whatever stands around it; a pair in front only adds a kernel",
    "LSTM": "TensorRT runs LSTM in float",
    "GRU": "TensorRT runs GRU in float",
    "RNN": "TensorRT runs RNN in float",
    "Einsum": "write it as MatMul: pairs are placed on MatMul, Gemm and Conv",
}

TRT = Target(
    name="trt",
    rules=RULES,
    capabilities=CAPABILITIES,
    costs=False,
    zero_points=False,
    int32_bias=False,
    quantizes_alone=False,
    times_itself=False,
    half=True,
    strict=True,
    no_kernel=_NO_KERNEL,
)
TRT_WEIGHT_ONLY = Target(
    name="trt",
    rules=RULES,
    capabilities=WEIGHT_ONLY,
    costs=False,
    zero_points=False,
    int32_bias=False,
    quantizes_alone=False,
    times_itself=False,
    half=True,
    strict=True,
    no_kernel={},
)
