"""Limits of OpenVINO's kernels: values of a configuration that none supports, and products summed in 16 bits."""

from onnxq.arrays import Array
from onnxq.backends.base import Data, IntegerProduct, IntegerSums
from onnxq.backends.openvino.rules import find_sum_order
from onnxq.backends.registry import NO_OPERATORS, SIGNED_BLOCKS, Limit, is_dynamic
from onnxq.graph import NodeRef
from onnxq.numerics import pair_neighbours

_PRODUCTS = {
    op: IntegerProduct(op=op, reads=Data.PAIR, weights=(1,))
    for op in ("Conv", "ConvTranspose", "Gemm", "MatMul")
}


def find_product(node: NodeRef) -> IntegerProduct | None:
    """The entry for a node that an integer kernel computes; None for other operators."""
    return None if node.domain else _PRODUCTS.get(node.op_type)


def pair_weights(node: NodeRef, weight: Array) -> Array | None:
    """The stored weights as [rows, sums, 2], one pair for each 16-bit sum; None where the node's kernel is exact."""
    order = find_sum_order(node, weight.shape)
    return None if order is None else pair_neighbours(weight, order)


SUMS = IntegerSums(find_product, pair_weights)
LIMITS = (
    Limit(
        "mode",
        lambda c: not is_dynamic(c),
        "OpenVINO reads scales that stand in the file, and none of each run",
        "write `mode: static` and give samples, or `target: ort`",
    ),
    Limit(
        "activations.granularity",
        lambda c: c.mode != "static" or c.activations.granularity == "tensor",
        "integer kernels take data with one scale a tensor",
        "write `granularity: tensor`",
    ),
    SIGNED_BLOCKS,
    Limit(
        "cpu",
        lambda c: c.cpu == "any" or (c.mode == "static" and c.placement == "rules"),
        "the kind of CPU decides which operators are worth their integers, by predicted times",
        "remove it, or write `mode: static` and `placement: rules`",
    ),
    NO_OPERATORS,
)
