"""Limits of ONNX Runtime's kernels: values of a configuration that none supports, and products summed in 16 bits.

Sums are measured on onnxruntime 1.31 with a CPU that has AVX2 only. Exact, and so not listed: ConvInteger;
uint8 x uint8 and int8 x int8 in any operator; MatMulNBits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onnxq.arrays import Array
from onnxq.backends.base import Data, IntegerProduct, IntegerSums
from onnxq.backends.ort.rules import CONVS, find_sum_order
from onnxq.backends.registry import SIGNED_BLOCKS, Limit, is_dynamic
from onnxq.graph import MICROSOFT, NodeRef
from onnxq.numerics import pair_neighbours

if TYPE_CHECKING:
    from onnxq.config.model import Config


# The operators whose int8 weights ONNX Runtime multiplies by uint8 data in 16-bit sums on x86 CPUs without VNNI.
# W and R: input and hidden state are quantized.
INTEGER_PRODUCTS = (
    # A Conv becomes a QLinearConv only with a QuantizeLinear behind it; the others
    # write float as well.
    IntegerProduct(op="Conv", reads=Data.PAIR, weights=(1,), result=True),
    IntegerProduct(op="Gemm", reads=Data.PAIR, weights=(1,)),
    IntegerProduct(op="MatMul", reads=Data.PAIR, weights=(1,)),
    IntegerProduct(
        op="QLinearConv", domains=("", MICROSOFT), reads=Data.STORED, zero=2, weights=(3,)
    ),
    IntegerProduct(op="QLinearMatMul", reads=Data.STORED, zero=2, weights=(3,)),
    IntegerProduct(op="MatMulInteger", reads=Data.STORED, zero=2, weights=(1,)),
    IntegerProduct(op="QGemm", domains=(MICROSOFT,), reads=Data.STORED, zero=2, weights=(3,)),
    IntegerProduct(
        op="MatMulIntegerToFloat", domains=(MICROSOFT,), reads=Data.STORED, zero=4, weights=(1,)
    ),
    IntegerProduct(op="QAttention", domains=(MICROSOFT,), reads=Data.STORED, zero=6, weights=(1,)),
    IntegerProduct(
        op="DynamicQuantizeMatMul", domains=(MICROSOFT,), reads=Data.DYNAMIC, weights=(1,)
    ),
    IntegerProduct(
        op="DynamicQuantizeLSTM", domains=(MICROSOFT,), reads=Data.DYNAMIC, weights=(1, 2)
    ),
)
_BY_NAME = {
    (domain, product.op): product for product in INTEGER_PRODUCTS for domain in product.domains
}


def find_product(node: NodeRef) -> IntegerProduct | None:
    """The table's entry for a node; None for other operators."""
    return _BY_NAME.get((node.domain, node.op_type))


def pair_weights(node: NodeRef, weight: Array) -> Array | None:
    """The stored weights as [rows, sums, 2], one pair for each 16-bit sum; None where the node's kernel is exact.

    A vector is one row; of a stack of matrices [..., K, N] (recurrent weights, batched MatMul) each column is one.
    """
    # Batched and recurrent weights are no case of `find_sum_order`: each [K, N] in them is multiplied as one matrix.
    if node.op_type not in CONVS and weight.ndim != 2:
        if weight.ndim < 1:
            return None
        columns = weight[None] if weight.ndim == 1 else np.swapaxes(weight, -1, -2)
        return pair_neighbours(columns.reshape(-1, columns.shape[-1]), (0, 1))
    order = find_sum_order(node, weight.shape)
    return None if order is None else pair_neighbours(weight, order)


SUMS = IntegerSums(find_product, pair_weights)


def _has_operator_blocks(config: Config) -> bool:
    size = config.weights.block_size or 0
    return config.emit != "nbits" or size in (16, 32, 64, 128, 256)


def _can_be_dynamic(config: Config) -> bool:
    data = config.activations
    usual = (
        data.bits == 8
        and data.scheme == "asymmetric"
        and not data.is_signed
        and data.granularity == "tensor"
    )
    return not is_dynamic(config) or (usual and data.storage in ("", "uint8"))


LIMITS = (
    Limit(
        "cpu",
        lambda c: c.cpu == "any" or c.mode in ("static", "dynamic", "auto"),
        "weights alone are placed without regard to time",
        "remove it, or write `mode: static`",
    ),
    Limit(
        "activations",
        _can_be_dynamic,
        "what is quantized at each run becomes 8-bit asymmetric uint8, with one scale for the tensor",
        "remove what it says of bits, scheme, signed and granularity, or write `mode: static`",
    ),
    Limit(
        "high_precision",
        lambda c: not is_dynamic(c) or c.high_precision in (None, "float32"),
        "ONNX quantizes nothing but float32 at each run",
        "remove it, or write `mode: static`",
    ),
    Limit(
        "placement",
        lambda c: not is_dynamic(c) or c.placement == "rules",
        "placements are timed for scales that stand in the file",
        "write `placement: rules`",
    ),
    Limit(
        "cpu",
        lambda c: c.cpu == "any" or c.placement == "rules",
        "a measured placement is made for the machine that measures it",
        "remove it, or write `placement: rules`",
    ),
    Limit(
        "emit",
        lambda c: c.emit != "nbits" or c.mode == "weight-only",
        "MatMulNBits computes on float data",
        "remove it, or write `mode: weight-only`",
    ),
    Limit(
        "emit",
        lambda c: (
            c.emit != "qoperator"
            or (c.mode != "weight-only" and c.high_precision in (None, "float32"))
        ),
        "these operators compute on integers, with scales in float32",
        "remove it, or what asks for weights alone or for another float type",
    ),
    Limit(
        "emit",
        _has_operator_blocks,
        "MatMulNBits has blocks of 16, 32, 64, 128 or 256 weights",
        "remove it, or write `weights: {granularity: block, block_size: 32}`",
    ),
    Limit(
        "accuracy_level",
        lambda c: c.accuracy_level == 0 or c.emit == "nbits",
        "pairs have none: a session's option sets it",
        "remove it, or write `emit: nbits`",
    ),
    SIGNED_BLOCKS,
    Limit(
        "attention",
        lambda c: c.attention == "float",
        "ONNX Runtime on the CPU is slower with attention in int8",
        "write `attention: float`",
    ),
)
