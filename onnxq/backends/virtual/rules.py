"""No engine in particular: every bit width and scheme, for trying out and for training.

Pairs stand on the activations and the constant weight of each product (Conv, ConvTranspose, Gemm, MatMul), on both
operands of Add, Sub and Mul of two activations, and on the data of Softmax, LayerNormalization, averaging and resizing.
No pair stands between a product and the activation behind it, which engines run as one kernel. ONNX Runtime with
optimizations off computes the file as it is written; speed is not considered.
"""

from functools import partial

from onnxq.backends.base import Candidate, Capability, Output, PlacementRule, Reason, Target
from onnxq.backends.surroundings import (
    check_all_computed,
    check_data,
    check_resize,
    check_two_activations,
)
from onnxq.sites import Role
from onnxq.spec import PerBlock, PerChannel, PerTensor


def _check_weighted(c: Candidate) -> Reason:
    return check_data(c) if c.is_constant(1) else "its weight is computed at run time"


def _check_matmul(c: Candidate) -> Reason:
    rank = c.rank(1)
    if rank is not None and rank != 2:
        return "its weight is not a matrix"
    return _check_weighted(c)


def _check_two_operands(c: Candidate) -> Reason:
    # Only Softmax reads the sum: one operand is a mask.
    readers = c.index.readers(c.node.result)
    if readers and all(reader.op_type == "Softmax" for reader in readers):
        return "masks scores, maybe with -inf, which no range holds"
    return check_two_activations(c)


def _check_softmax(c: Candidate) -> Reason:
    if c.index.maker(c.node, 0, "Add", "Sub", "Where") is not None:
        return "reads scores that may be masked with -inf, which no range holds"
    return check_data(c)


def _check_resize(c: Candidate) -> Reason:
    repeats = check_resize(c) is None
    return "nearest values stay on their levels" if repeats else check_data(c)


_WEIGHTED = "a pair on each activation and on the weight"
_BOTH = "a pair on both operands"
_READ = "a pair on what it reads"
# There is no engine. Every rule computes, so that all of them are taken.
_rule = partial(PlacementRule, output=Output.FLOAT, compute=True)
_AVERAGES = ("LayerNormalization", "AveragePool", "GlobalAveragePool", "ReduceMean")

RULES = (
    _rule(
        name="conv",
        ops=("Conv", "ConvTranspose", "Gemm"),
        why=_WEIGHTED,
        weight=1,
        check=_check_weighted,
    ),
    _rule(name="matmul", ops=("MatMul",), why=_WEIGHTED, weight=1, check=_check_matmul),
    _rule(name="product", ops=("MatMul",), why=_BOTH, data=(0, 1), check=check_all_computed),
    _rule(
        name="two-operands",
        ops=("Add", "Sub", "Mul"),
        why=_BOTH,
        data=(0, 1),
        check=_check_two_operands,
    ),
    _rule(name="one-operand", ops=_AVERAGES, why=_READ, check=check_data),
    _rule(name="softmax", ops=("Softmax",), why=_READ, check=_check_softmax),
    _rule(name="resize", ops=("Resize",), why=_READ, check=_check_resize),
)

_capability = partial(
    Capability, bits=(2, 3, 4, 5, 6, 7, 8, 16), granularity=(PerTensor, PerChannel)
)
_WIDER = (*Capability.storage, "int16", "uint16", "int4", "uint4")
_blocks = partial(_capability, role=Role.WEIGHT, granularity=(PerTensor, PerChannel, PerBlock))

CAPABILITIES = (
    _capability(role=Role.ACTIVATION),
    _capability(role=Role.OUTPUT),
    _capability(role=Role.WEIGHT),
    # Types and blocks that ONNX has from opset 21 on.
    _capability(role=Role.ACTIVATION, storage=_WIDER, opset=21),
    _capability(role=Role.OUTPUT, storage=_WIDER, opset=21),
    _blocks(storage=_WIDER, opset=21),
    _blocks(storage=("int2", "uint2"), opset=25),
)

VIRTUAL = Target(
    name="virtual",
    rules=RULES,
    capabilities=CAPABILITIES,
    ideal=True,
)
