"""The operators whose int8 weights ONNX Runtime multiplies by uint8 data, in 16-bit sums on x86 CPUs without VNNI.

Measured on onnxruntime 1.31 with a CPU that has AVX2 only. Exact, and so not listed: ConvInteger; uint8 x uint8 and
int8 x int8 in any operator; MatMulNBits.
"""

from __future__ import annotations

import numpy as np

from onnxq.arrays import Array
from onnxq.backends.base import Data, IntegerProduct, IntegerSums
from onnxq.backends.ort.rules import CONVS, find_sum_order
from onnxq.graph import NodeRef
from onnxq.numerics import pair_neighbours

_MICROSOFT = "com.microsoft"


INTEGER_PRODUCTS: tuple[IntegerProduct, ...] = (
    IntegerProduct(op="Conv", reads=Data.PAIR, weights=(1,), result=True),
    IntegerProduct(op="Gemm", reads=Data.PAIR, weights=(1,)),
    IntegerProduct(op="MatMul", reads=Data.PAIR, weights=(1,)),
    IntegerProduct(op="QLinearConv", domains=("", _MICROSOFT), reads=Data.STORED, zero=2, weights=(3,)),
    IntegerProduct(op="QLinearMatMul", reads=Data.STORED, zero=2, weights=(3,)),
    IntegerProduct(op="MatMulInteger", reads=Data.STORED, zero=2, weights=(1,)),
    IntegerProduct(op="QGemm", domains=(_MICROSOFT,), reads=Data.STORED, zero=2, weights=(3,)),
    IntegerProduct(op="MatMulIntegerToFloat", domains=(_MICROSOFT,), reads=Data.STORED, zero=4, weights=(1,)),
    IntegerProduct(op="QAttention", domains=(_MICROSOFT,), reads=Data.STORED, zero=6, weights=(1,)),
    IntegerProduct(op="DynamicQuantizeMatMul", domains=(_MICROSOFT,), reads=Data.DYNAMIC, weights=(1,)),
    IntegerProduct(op="DynamicQuantizeLSTM", domains=(_MICROSOFT,), reads=Data.DYNAMIC, weights=(1, 2)),
)
_BY_NAME = {(domain, product.op): product for product in INTEGER_PRODUCTS for domain in product.domains}


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
        rows = weight[None] if weight.ndim == 1 else np.swapaxes(weight, -1, -2).reshape(-1, weight.shape[-2])
        return pair_neighbours(rows, (0, 1))
    order = find_sum_order(node, weight.shape)
    return None if order is None else pair_neighbours(weight, order)


SUMS = IntegerSums(find_product, pair_weights)
