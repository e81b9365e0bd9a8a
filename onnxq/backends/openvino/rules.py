"""OpenVINO on the CPU: which pairs become integer kernels, measured on 2026.4.

A pair on the data and on the constant weight of a product is all that its kernel needs: bias, activation and the
QuantizeLinear behind it follow into the kernel, and without one it writes float. Data are uint8 with any zero point;
int8 data with one, and weights in uint8, are dequantized in front. docs/engines.md has the kernel of each pattern.
"""

from dataclasses import replace
from functools import partial

from onnxq.arrays import Shape
from onnxq.backends import surroundings
from onnxq.backends.base import Candidate, Capability, Output, PlacementRule, Reason, Target
from onnxq.backends.cpu_costs import read_costs
from onnxq.backends.openvino.misreads import (
    ACTIVATIONS,
    check_conv,
    check_gemm,
    check_matmul,
    check_transposed,
    explain_multiplied,
    find_swish,
)
from onnxq.graph import NodeRef
from onnxq.numerics import SumOrder
from onnxq.sites import Indices, Role
from onnxq.spec import PerBlock, PerChannel, PerTensor


def _list_sum_inputs(c: Candidate) -> Indices:
    """Both inputs, but not the result of a convolution that nothing else reads: behind a pair it computes the sum too.

    It does not round in between then, unlike the file.
    """
    residual = surroundings.find_residual(c)
    if residual is None:
        return 0, 1
    skip, branch = residual
    maker = c.index.find_producer(branch)
    alone = (
        maker is not None and maker.op_type == "Conv" and len(c.index.list_consumers(branch)) == 1
    )
    return (skip,) if alone else (0, 1)


# EfficientNet-Lite0: 26.3 -> 26.8 dB, and no slower.
def _explain_behind_stem(c: Candidate, maker: Candidate | None) -> Reason:
    """The reader of the depthwise convolution of a stem, which stays float."""
    name = None if maker is None else surroundings.find_backbone(c.index, maker.tensor(0))
    if maker is None or name is None:
        return None
    stem = Candidate(c.index.find_node(name), c.index, c.shapes)
    if surroundings.explain_stem_depthwise(maker, stem) is None:
        return None
    return "right behind the float depthwise of a stem: quantizing its large map takes what int8 saves, and adds noise"


# A kernel writes float where nothing asks for integers, and requantizes in passing where something does.
_rule = partial(PlacementRule, output=Output.FOLLOWS)
_product = partial(_rule, weight=1, bias=2, fuses=ACTIVATIONS, compute=True, closes=find_swish)
_FUSED = "pairs on data and weight; bias, activation and the pair behind follow into the kernel"

# In the order of precedence.
RULES = (
    _product(name="conv", ops=("Conv",), why=_FUSED, check=check_conv),
    _product(
        name="conv-transpose",
        ops=("ConvTranspose",),
        why=_FUSED,
        check=check_transposed,
    ),
    _product(name="gemm", ops=("Gemm",), why=_FUSED, check=check_gemm),
    _product(
        name="matmul",
        ops=("MatMul",),
        why=_FUSED,
        bias=None,
        check=check_matmul,
        # Integers of matrices are slower than floats with AVX2 (.7 to .85), those of a Conv twice as fast.
        pointwise=("any", "avx2"),
    ),
    _rule(
        name="residual-add",
        ops=("Add",),
        why="a pair on the skip branch, and on the other unless a convolution makes it for the sum alone",
        inputs=_list_sum_inputs,
        fuses=ACTIVATIONS,
        check=surroundings.check_two_activations,
    ),
    _rule(
        name="gate-mul",
        ops=("Mul",),
        why="a squeeze-excite gate between integer convolutions",
        data=(0, 1),
        fuses=ACTIVATIONS,
        check=surroundings.check_gate,
    ),
    surroundings.CONCAT,
    _rule(
        name="average-pool",
        ops=("GlobalAveragePool", "AveragePool"),
        why="sums integers",
    ),
    replace(
        surroundings.MOVE, name="max-pool", ops=("MaxPool",), check=surroundings.check_max_pool
    ),
    surroundings.MOVE,
    surroundings.RESIZE,
)

_NARROW = surroundings.BYTE_WIDTHS
_weight = partial(Capability, role=Role.WEIGHT, symmetric=(True,), storage=("int8",))
_channel = partial(_weight, granularity=(PerTensor, PerChannel))
_matrix = partial(
    Capability,
    role=Role.WEIGHT,
    ops=("MatMul", "Gemm"),
    granularity=(PerTensor, PerChannel, PerBlock),
)
CAPABILITIES = (
    Capability(role=Role.ACTIVATION, storage=("uint8",)),
    # With a zero point these are dequantized in front of the kernel.
    Capability(role=Role.ACTIVATION, storage=("int8",), symmetric=(True,)),
    _channel(ops=("Conv", "ConvTranspose", "Gemm", "MatMul"), bits=_NARROW),
    _weight(ops=("Gather",), granularity=(PerChannel,)),
)
# Beside float data only the kernel of matrices reads integers; others have their weights dequantized at every run.
WEIGHT_ONLY = (
    _matrix(bits=_NARROW),
    _matrix(bits=(2, 3, 4), storage=("int4", "uint4"), opset=21),
    Capability(
        role=Role.WEIGHT,
        ops=("Conv",),
        bits=_NARROW,
        granularity=(PerTensor, PerChannel),
        warning="OpenVINO dequantizes the weights of Conv at every run: a smaller file for a slower model",
    ),
    _weight(ops=("Gather",), granularity=(PerChannel,)),
)

_NO_KERNEL = {
    **surroundings.FUSED_PRODUCTS,
    "com.microsoft.QuickGelu": "an operator of ONNX Runtime's own",
    "LSTM": "OpenVINO has no integer LSTM kernel for weights in pairs",
    "GRU": "OpenVINO has no integer GRU kernel for weights in pairs",
    "RNN": "OpenVINO has no integer RNN kernel",
    "Einsum": "OpenVINO has no integer Einsum kernel",
    **dict.fromkeys(surroundings.ATTENTION, "attention in one node: export its parts"),
}


def find_sum_order(node: NodeRef, shape: Shape) -> SumOrder | None:
    """The order of axes in which u8 x s8 kernels for AVX2 read a node's weight, adding two products to a 16-bit sum.

    Convolutions: input channels of one tap; an odd one is added alone, so that kernels of one channel a group are
    exact. Measured on 2026.4 with weights of two positions.
    """
    rank = len(shape)
    if node.op_type in ("Conv", "ConvTranspose") and rank > 2:
        into, out = (1, 0) if node.op_type == "Conv" else (0, 1)
        # A flat order would let a sum cross from one tap to the next where channels are odd.
        taps = range(2, rank)
        if shape[into] % 2:
            return ((out, *taps), into) if shape[into] > 1 else None
        return (out, *taps, into)
    if node.op_type == "Gemm" and rank == 2:
        return (0, 1) if node.is_transposed else (1, 0)
    return (1, 0) if node.op_type == "MatMul" and rank == 2 else None


def _check_tensors(rule: PlacementRule, c: Candidate) -> Reason:
    """The rule's own check, and why a tensor that it wants a pair at takes none."""
    tensors = list(map(c.tensor, rule.list_inputs(c)))
    if rule.output is Output.PAIR:
        tensors.append(c.node.result)
    reasons = (explain_multiplied(tensor, c.index) for tensor in tensors)
    return rule.check(c) or next(filter(None, reasons), None)


_BASE = Target(
    name="openvino",
    rules=tuple(replace(rule, check=partial(_check_tensors, rule)) for rule in RULES),
    capabilities=CAPABILITIES,
    no_kernel=_NO_KERNEL,
    costs=read_costs(__package__),
    # Products compute a Gelu, but not one whose factor of a half went into weights.
    skips=("layernorm", "residual", "prelu", "pool", "upsampling"),
    exclusions={
        "stem": surroundings.explain_stem,
        "stem-depthwise": surroundings.explain_stem_depthwise,
        "stem-project": _explain_behind_stem,
        **surroundings.SENSITIVE,
    },
    yielding=("stem",),
)
OPENVINO = replace(_BASE, sum_order=find_sum_order)
# 2026.4 multiplies by scales of blocks as they are; NNCF, which makes its files, writes negative ones, too.
OPENVINO_WEIGHT_ONLY = replace(_BASE, capabilities=WEIGHT_ONLY, signed_scales=True)
