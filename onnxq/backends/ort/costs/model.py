"""Time of a node in ONNX Runtime's CPU provider, float and int8, for the minimum cut of placement.

Microseconds of one thread, from the constants of a kind of CPU. The model is static: shapes in, time out, so that the
same graph is always placed the same way. Only differences and ratios matter; another machine scales both sides.

    time = launch + work / throughput + elements * ns

int8 means uint8 activations, int8 weights with zero point 0, and the pair on the output where the kernel needs one;
MatMul is MatMulIntegerToFloat with its bias Add, the pair on its input not counted.
"""

from __future__ import annotations

import json
import math
from typing import Any

from onnxq.arrays import Shape
from onnxq.backends.costs import Cost, OpCase
from onnxq.backends.ort.costs.base import (
    ConvCosts,
    CpuCosts,
    DepthwiseCosts,
    LinearCosts,
    Moves,
    PairCosts,
    interpolate,
)
from onnxq.backends.ort.costs.convs import INT8_BLOCK, conv_cost

# Taken for sizes that are not known: small, so that int8 does not look cheap.
UNKNOWN_ROWS = 1
UNKNOWN_ELEMENTS = 4096
# Share of the time to bring weights in that shows: one row hides most of it, 16 rows and more none.
STREAM_ONE_ROW, STREAM_ALL_ROWS = 0.35, 16
# Axes of an LSTM's data, [steps, batch, features], and of its weights, [directions, rows, features].
LSTM_RANK = 3
# Nanoseconds per weight that the int8 product of the hidden state takes beyond MatMul's, at each step: 64 to 512
# units, one thread with VNNI (Zen 5 and Sapphire Rapids), onnxruntime 1.32. Products of few rows are slower there than
# elsewhere.
LSTM_STATE_NS = 0.02
# Activations that the kernel in front of them computes as well.
_FOLDED = ("Relu", "Clip")
_NOTHING = Moves(0.0, 0.0, 0.0, 0.0)


class OrtCosts(CpuCosts):
    """The costs of one kind of CPU."""

    def predict_quantize(self, elements: int | None, *, from_conv: bool = False, dynamic: bool = False) -> float:
        """Microseconds from a float producer to int8 consumers: QuantizeLinear, and the change from NCHWc to NHWC.

        elements: None where they are not known. from_conv: the producer is a Conv. dynamic: on a scale of each run.
        """
        n, pairs = UNKNOWN_ELEMENTS if elements is None else elements, self.pairs
        layout = pairs.from_conv_launch + n * pairs.from_conv_ns / 1e3 if from_conv else 0.0
        scale = pairs.dynamic_launch + n * pairs.dynamic_ns / 1e3 if dynamic else 0.0
        return pairs.q_launch + n * pairs.q_ns / 1e3 + layout + scale

    def predict_dequantize(self, elements: int | None, *, to_conv: bool = False) -> float:
        """Microseconds from an int8 producer to float consumers: DequantizeLinear, and the change from NHWC to NCHWc.

        elements: None where they are not known. to_conv: a consumer is a Conv.
        """
        n, pairs = UNKNOWN_ELEMENTS if elements is None else elements, self.pairs
        layout = pairs.to_conv_launch + n * pairs.to_conv_ns / 1e3 if to_conv else 0.0
        return pairs.dq_launch + n * pairs.dq_ns / 1e3 + layout

    def predict_node(self, case: OpCase) -> Cost:
        """Time of one node, float and int8.

        Where sizes are unknown they are taken small. An operator without an int8 kernel costs its float time plus a
        pair.
        """
        if case.op_type == "LSTM" and case.weight is not None and len(case.weight) == LSTM_RANK:
            return _compute_lstm_cost(case, case.weight, self)
        if case.op_type == "Conv" and case.weight is not None:
            cost = conv_cost(case, case.weight, self)
        elif case.op_type in ("Gemm", "MatMul") and case.weight is not None and len(case.weight) > 1:
            cost = _compute_linear_cost(case, case.weight, self)
        else:
            return _compute_moves_cost(case, self)
        return Cost(cost.float_us, cost.int8_us * self.int8_network)


def parse_costs(text: str) -> OrtCosts:
    """The table in a data file, as `benchmarks/op_costs.py fit` writes it."""
    table = json.loads(text)
    for name, kind in _GROUPS.items():
        table[name] = kind(**{field: _parse_table(value) for field, value in table[name].items()})
    table["elements"] = {op_type: Moves(**times) for op_type, times in table["elements"].items()}
    return OrtCosts(**table)


_GROUPS = {"pairs": PairCosts, "conv": ConvCosts, "depthwise": DepthwiseCosts, "linear": LinearCosts}


def _parse_table(value: Any) -> Any:
    # JSON has words for keys only, a table has sizes.
    return {int(size): entry for size, entry in value.items()} if isinstance(value, dict) else value


def _compute_linear_cost(case: OpCase, weight: Shape, cpu: CpuCosts) -> Cost:
    """Gemm (uint8 in, uint8 out) and MatMul by a constant (uint8 in, float out)."""
    linear, weights = cpu.linear, math.prod(weight)
    outputs, rows = weight[-1], UNKNOWN_ROWS
    if case.output:
        outputs = case.output[-1]
        rows = max(1, math.prod(case.output[:-1]))
    depth = weights // max(outputs, 1)
    # Microseconds per million weights, as the tables have them.
    exposed = weights * min(1.0, STREAM_ONE_ROW + (1 - STREAM_ONE_ROW) * math.log(rows, STREAM_ALL_ROWS)) / 1e6
    float_us = linear.launch + max(rows / linear.gmacs, 1 / linear.one_row_gmacs) * weights / 1e3
    float_us += rows * (linear.row_ns + outputs * linear.out_ns) / 1e3
    float_us += exposed * interpolate(linear.stream_float, weights)
    int8_us = linear.int8_launch + max(rows / linear.int8_gmacs, 1 / linear.int8_one_row_gmacs) * weights / 1e3
    int8_us += rows * (linear.int8_row_ns + outputs * linear.int8_out_ns + depth * linear.int8_in_ns) / 1e3
    int8_us += exposed * interpolate(linear.stream_int8, weights)
    if case.op_type == "MatMul":
        float_us += linear.matmul_bias_launch + rows * outputs * linear.matmul_bias_ns / 1e3
        int8_us += linear.matmul_int8_bias_launch + rows * outputs * linear.matmul_int8_bias_ns / 1e3
    return Cost(float_us, int8_us)


def _compute_lstm_cost(case: OpCase, weight: Shape, cpu: CpuCosts) -> Cost:
    """DynamicQuantizeLSTM: one product of all inputs, and one of the hidden state, quantized anew, for each step."""
    directions, rows, features = weight
    hidden = rows // 4
    shape = case.inputs[0] if case.inputs else None
    steps, batch = shape[:2] if shape is not None and len(shape) == LSTM_RANK else (UNKNOWN_ROWS, UNKNOWN_ROWS)

    def multiply(count: int, depth: int) -> Cost:
        part = OpCase(op_type="Gemm", inputs=(), output=(count, rows), weight=(depth, rows))
        return _compute_linear_cost(part, (depth, rows), cpu)

    first, each = multiply(steps * batch, features), multiply(batch, hidden)
    state = (batch * hidden * (cpu.pairs.q_ns + cpu.pairs.dynamic_ns) + hidden * rows * LSTM_STATE_NS) / 1e3
    float_us, int8_us = first.float_us + steps * each.float_us, first.int8_us + steps * (each.int8_us + state)
    return Cost(directions * float_us, directions * int8_us * cpu.int8_network)


def _find_row(case: OpCase, cpu: CpuCosts) -> Moves:
    """The row of `CpuCosts.elements` for a node."""
    shape = case.output
    if case.op_type in _FOLDED:
        return _NOTHING
    if case.op_type == "Add" and shape is not None and len(shape) == 4:
        return cpu.elements["residual"]
    if case.op_type == "Mul" and any(known is not None and known != shape for known in case.inputs):
        return cpu.elements["gate"]
    return cpu.elements.get(case.op_type) or _add_pair(cpu.elements["unknown"], cpu)


def _add_pair(row: Moves, cpu: CpuCosts) -> Moves:
    """The row of a kernel that computes in float between integers: with the pair around it."""
    pairs = cpu.pairs
    launch, ns = pairs.q_launch + pairs.dq_launch, pairs.q_ns + pairs.dq_ns
    return Moves(row.float_us, row.float_ns, row.int8_us + launch, row.int8_ns + ns)


def _compute_moves_cost(case: OpCase, cpu: CpuCosts) -> Cost:
    """Time of an operator by its elements. Without sizes int8 is never cheaper than float."""
    row = _find_row(case, cpu)
    shapes = [shape for shape in (case.output, *case.inputs) if shape is not None]
    shape = max(shapes, key=math.prod) if case.op_type == "GlobalAveragePool" and shapes else case.output
    if shape is None:
        shape = shapes[0] if shapes else None
    elements = UNKNOWN_ELEMENTS if shape is None else math.prod(shape)
    channels = shape[1] if shape is not None and len(shape) > 2 else INT8_BLOCK
    taps = math.prod(case.kernel) if row.taps and case.kernel else 1
    pixel_ns = (row.pixel_ns + row.odd_pixel_ns * (channels % INT8_BLOCK != 0)) / max(channels, 1)
    float_us = row.float_us + elements * taps * (row.float_ns + row.odd_ns * (channels % cpu.conv.block != 0)) / 1e3
    int8_us = row.int8_us + elements * taps * (row.int8_ns + pixel_ns) / 1e3
    return Cost(float_us, max(float_us, int8_us) if shape is None else int8_us)
