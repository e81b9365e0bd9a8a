"""The cost of a node in float and in int8, which tables of the backends predict from its sizes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from onnxq.arrays import Shape

# Taken for sizes that are not known: small, so that int8 does not look cheap.
UNKNOWN_ROWS = 1
UNKNOWN_ELEMENTS = 4096
# Axes of an LSTM's data, [steps, batch, features], and of its weights, [directions, rows, features].
LSTM_RANK = 3
# Of a step of ONNX Runtime's LSTM, one thread, 1.32: 32 to 512 units, 1 to 16 sequences, 10 to 100 steps on Zen 4.
# Nanoseconds per unit and sequence for the gates, in float on both sides, and microseconds to quantize the state.
_GATE_NS = 4.5
_STATE_US = 0.12
# Share of the time to bring weights in: from step to step they stay in a cache, but for the largest.
LSTM_STREAM = 0.3
# On top with AMX, whose tiles have 16 rows however few the sequences: microseconds, and nanoseconds per weight. From
# the speeds of Sapphire Rapids in docs/dynamic.md.
_AMX_US = 0.5
_AMX_NS = 0.016


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One node as its cost depends on it; a shape that is not known is None."""

    op_type: str
    inputs: tuple[Shape | None, ...]
    output: Shape | None
    weight: Shape | None = None
    group: int = 1
    kernel: Shape = ()
    strides: Shape = ()
    # Operator of the activation behind, which the kernel computes as well; "" without one.
    activation: str = ""
    # A product of matrices that is written as a Conv of one tap in integers.
    pointwise: bool = False


@dataclass(frozen=True)
class Cost:
    """Microseconds of one node inside a float region and inside an int8 region."""

    float_us: float
    int8_us: float


class MachineCosts(Protocol):
    """The costs of one kind of machine."""

    def predict_node(self, case: OpCase) -> Cost:
        """Time of one node, float and int8; sizes that are not known are taken small."""

    def predict_quantize(
        self, elements: int | None, *, from_conv: bool = False, dynamic: bool = False
    ) -> float:
        """Microseconds from a float producer to int8 consumers.

        elements: None where they are not known. from_conv: the producer is a Conv. dynamic: on a scale of each run.
        """

    def predict_dequantize(self, elements: int | None, *, to_conv: bool = False) -> float:
        """Microseconds from an int8 producer to float consumers. to_conv: a consumer is a Conv."""


def turn_transposed(case: OpCase, weight: Shape) -> tuple[OpCase, Shape]:
    """A ConvTranspose as a Conv of as many results, whose kernel has the taps that reach one of them."""
    cin, per_group, *kernel = weight
    strides = case.strides or (1,) * len(kernel)
    taps = (-(-size // stride) for size, stride in zip(kernel, strides, strict=True))
    shape = (per_group * case.group, cin // case.group, *taps)
    return replace(case, op_type="Conv", strides=()), shape


def sum_lstm(
    case: OpCase,
    multiply: Callable[[OpCase], Cost],
    step: Callable[[OpCase], Cost],
) -> Cost:
    """One product of all inputs, and for each step one of the hidden state, which is quantized anew.

    multiply: the cost of a Gemm. step: the cost of a step, by the Gemm of its state.
    """
    assert case.weight is not None
    directions, rows, features = case.weight
    # A row for each of four gates.
    hidden = rows // 4
    shape = (case.inputs[0] if case.inputs else None) or ()
    steps, batch = shape[:2] if len(shape) == LSTM_RANK else (UNKNOWN_ROWS, UNKNOWN_ROWS)
    first, each = (
        predict(OpCase(op_type="Gemm", inputs=(), output=(count, rows), weight=(depth, rows)))
        for predict, count, depth in ((multiply, steps * batch, features), (step, batch, hidden))
    )
    float_us = first.float_us + steps * each.float_us
    int8_us = first.int8_us + steps * each.int8_us
    return Cost(directions * float_us, directions * int8_us)


def complete_step(product: Cost, part: OpCase, quantize_ns: float, *, slow: bool) -> Cost:
    """The cost of a step of ONNX Runtime's LSTM, by that of the Gemm of its state.

    quantize_ns: nanoseconds for a value of the state. slow: with AMX.
    """
    values = math.prod(part.output or ()) / 4
    gates = values * _GATE_NS / 1e3
    int8_us = product.int8_us + gates + _STATE_US + values * quantize_ns / 1e3
    if slow:
        int8_us += _AMX_US + math.prod(part.weight or ()) * _AMX_NS / 1e3
    return Cost(product.float_us + gates, int8_us)
