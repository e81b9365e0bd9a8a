"""No engine in particular: every bit width and scheme, for trying out and for training.

Pairs stand on the activations and the constant weight of each product (Conv, ConvTranspose, Gemm, MatMul), on both
operands of Add, Sub and Mul of two activations, and on the data of Softmax, LayerNormalization, averaging and resizing.
No pair stands between a product and the activation behind it, which engines run as one kernel. ONNX Runtime with
optimizations off computes the file as it is written; speed is not considered.
"""

from __future__ import annotations

from onnxq.sites import Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor
from onnxq.targets.base import Candidate, Capability, Output, PlacementRule, Target


def _check_data(c: Candidate) -> str | None:
    return "its data is constant" if c.is_constant(0) else None


def _check_weighted(c: Candidate) -> str | None:
    if not c.is_constant(1):
        return "its weight is computed at run time"
    return _check_data(c)


def _check_matmul(c: Candidate) -> str | None:
    rank = c.rank(1)
    if rank is not None and rank != 2:
        return "its weight is not a matrix"
    return _check_weighted(c)


def _check_product(c: Candidate) -> str | None:
    return "one operand is constant" if c.is_constant(0) or c.is_constant(1) else None


def _check_two_operands(c: Candidate) -> str | None:
    # Only Softmax reads the sum: one operand is a mask.
    readers = c.index.consumers(TensorId(c.node.outputs[0], c.node.scope))
    if readers and all(c.index.node(reader.node).op_type == "Softmax" for reader in readers):
        return "masks scores, maybe with -inf, which no range holds"
    if c.node.inputs[0] == c.node.inputs[1]:
        return "both operands are the same tensor"
    return _check_product(c)


def _check_softmax(c: Candidate) -> str | None:
    scores = c.tensor(0)
    maker = None if scores is None else c.index.producer(scores)
    if maker is not None and maker.op_type in ("Add", "Sub", "Where"):
        return "reads scores that may be masked with -inf, which no range holds"
    return _check_data(c)


def _check_resize(c: Candidate) -> str | None:
    mode = c.attr("mode", "nearest")
    return "nearest values stay on their levels" if mode in ("nearest", b"nearest") else _check_data(c)


# Shared by the rules for products with a weight.
_WHY = "a pair on each activation and on the weight"

# No kernel is named: there is no engine. Every rule computes, so that all of them are taken.
RULES: tuple[PlacementRule, ...] = (
    PlacementRule(
        name="conv",
        ops=("Conv", "ConvTranspose", "Gemm"),
        kernel="",
        why=_WHY,
        output=Output.FLOAT,
        weight=1,
        compute=True,
        check=_check_weighted,
    ),
    PlacementRule(
        name="matmul",
        ops=("MatMul",),
        kernel="",
        why=_WHY,
        output=Output.FLOAT,
        weight=1,
        compute=True,
        check=_check_matmul,
    ),
    PlacementRule(
        name="product",
        ops=("MatMul",),
        kernel="",
        why="a pair on both operands",
        output=Output.FLOAT,
        data=(0, 1),
        compute=True,
        check=_check_product,
    ),
    PlacementRule(
        name="two-operands",
        ops=("Add", "Sub", "Mul"),
        kernel="",
        why="a pair on both operands",
        output=Output.FLOAT,
        data=(0, 1),
        compute=True,
        check=_check_two_operands,
    ),
    PlacementRule(
        name="one-operand",
        ops=("LayerNormalization", "AveragePool", "GlobalAveragePool", "ReduceMean"),
        kernel="",
        why="a pair on what it reads",
        output=Output.FLOAT,
        compute=True,
        check=_check_data,
    ),
    PlacementRule(
        name="softmax",
        ops=("Softmax",),
        kernel="",
        why="a pair on what it reads",
        output=Output.FLOAT,
        compute=True,
        check=_check_softmax,
    ),
    PlacementRule(
        name="resize",
        ops=("Resize",),
        kernel="",
        why="a pair on what it reads",
        output=Output.FLOAT,
        compute=True,
        check=_check_resize,
    ),
)

_BITS = (2, 3, 4, 5, 6, 7, 8, 16)
_STORAGE = ("int8", "uint8", "int16", "uint16")
_GRAINS = (PerTensor, PerChannel, PerBlock)

CAPABILITIES: tuple[Capability, ...] = (
    Capability(role=Role.ACTIVATION, bits=_BITS, storage=("int8", "uint8"), granularity=(PerTensor, PerChannel)),
    Capability(role=Role.OUTPUT, bits=_BITS, storage=("int8", "uint8"), granularity=(PerTensor, PerChannel)),
    Capability(role=Role.WEIGHT, bits=_BITS, storage=("int8", "uint8"), granularity=(PerTensor, PerChannel)),
    # Types and blocks that ONNX has from opset 21 on.
    Capability(
        role=Role.ACTIVATION, bits=_BITS, storage=(*_STORAGE, "int4", "uint4"), granularity=(PerTensor, PerChannel),
        opset=21,
    ),
    Capability(
        role=Role.OUTPUT, bits=_BITS, storage=(*_STORAGE, "int4", "uint4"), granularity=(PerTensor, PerChannel),
        opset=21,
    ),
    Capability(role=Role.WEIGHT, bits=_BITS, storage=(*_STORAGE, "int4", "uint4"), granularity=_GRAINS, opset=21),
)  # fmt: skip

VIRTUAL = Target(
    name="virtual",
    rules=RULES,
    capabilities=CAPABILITIES,
    costs=False,
    quantizes_alone=False,
    times_itself=False,
)
