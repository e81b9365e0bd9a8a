"""Time of a node in onnxruntime-web, float and int8, for the minimum cut of placement.

Microseconds of one thread: a sum of what a node does, each times a constant that was measured. int8 means uint8
activations, int8 weights with zero point 0, and the pair on the output where the kernel needs one. Kernels of integers
multiply twice as fast as float ones, but are some nanoseconds slower for each result, which they round one by one.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from onnxq.arrays import Shape
from onnxq.backends.costs import LSTM_RANK, UNKNOWN_ELEMENTS, UNKNOWN_ROWS, Cost, OpCase, sum_lstm
from onnxq.backends.cpu_costs import name_kind, round_up

# Taken for a side that is not known: small, so that int8 does not look cheap.
_SIDE = 7
# A matrix in the place of a float depthwise Conv: of 7 x 7 pixels at most, so that one of all pixels has few zeros; of
# 1 MiB at most, for caches; and worth the nodes around it where so many rows would be copied, one for each tap.
_PAIRS = 49 * 49
_VALUES = 1 << 18
_LINES = 4096
# Nanoseconds by what a node has: a launch, multiplications, results …
Prices = Mapping[str, float]
# The kind of a node, and what it does.
_Work = tuple[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class WebCosts:
    """The costs of kernels in WebAssembly.

    origin: machine, versions and day of the measurement. prices: by kind of node and side, "float" or "int8".
    """

    origin: str
    prices: Mapping[str, Mapping[str, Prices]]

    def predict_node(self, case: OpCase) -> Cost:
        """Time of one node. An operator without an int8 kernel costs its float time plus a pair."""
        kind, counts = count_work(case)
        if kind == "LSTM":
            return self._predict_lstm(case)
        if kind in self.prices:
            cost = Cost(self._add_up(kind, "float", counts), self._add_up(kind, "int8", counts))
            # Without sizes int8 is never cheaper.
            return (
                cost
                if case.output is not None
                else Cost(cost.float_us, max(cost.float_us, cost.int8_us))
            )
        elements = int(counts["results"])
        float_us = self._add_up("unknown", "float", counts)
        return Cost(
            float_us, float_us + self.predict_quantize(elements) + self.predict_dequantize(elements)
        )

    def predict_quantize(
        self, elements: int | None, *, from_conv: bool = False, dynamic: bool = False
    ) -> float:
        """Microseconds from a float producer to int8 consumers: QuantizeLinear, and NCHW to NHWC behind a Conv."""
        kinds = [
            "quantize",
            *(["quantize map"] if from_conv else []),
            *(["quantize dynamic"] if dynamic else []),
        ]
        return self._convert(kinds, elements)

    def predict_dequantize(self, elements: int | None, *, to_conv: bool = False) -> float:
        """Microseconds from an int8 producer to float consumers: DequantizeLinear, and NHWC to NCHW before a Conv."""
        return self._convert(["dequantize", *(["dequantize map"] if to_conv else [])], elements)

    def _convert(self, kinds: list[str], elements: int | None) -> float:
        counts = {
            "launch": 1.0,
            "results": float(UNKNOWN_ELEMENTS if elements is None else elements),
        }
        return sum(self._add_up(kind, "int8", counts) for kind in kinds)

    def _add_up(self, kind: str, side: str, counts: Mapping[str, float]) -> float:
        return (
            sum(price * counts.get(name, 0.0) for name, price in self.prices[kind][side].items())
            / 1e3
        )

    def _predict_lstm(self, case: OpCase) -> Cost:
        def step(part: OpCase) -> Cost:
            cost = self.predict_node(part)
            values = math.prod(part.output or ()) // 4
            return Cost(cost.float_us, cost.int8_us + self.predict_quantize(values, dynamic=True))

        return sum_lstm(case, self.predict_node, step)


def count_work(case: OpCase) -> _Work:
    """The kind of a node, and what it does. Sizes that are not known are taken small."""
    op_type = case.op_type
    output = case.output
    weight = case.weight
    if op_type == "LSTM" and len(weight or ()) == LSTM_RANK:
        return "LSTM", {}
    if op_type == "Conv" and weight is not None:
        return _count_conv(case, weight)
    if op_type in ("Gemm", "MatMul") and weight is not None and len(weight) > 1:
        made = output[-1] if output else weight[-1]
        rows = math.prod(output) // max(made, 1) if output else UNKNOWN_ROWS
        weights = math.prod(weight)
        counts = {"products": rows * weights, "results": rows * made}
        return op_type, {"launch": 1.0, "weights": weights, **counts}
    shapes = [shape for shape in (output, *case.inputs) if shape is not None]
    shape = max(shapes, key=math.prod, default=None) if op_type == "GlobalAveragePool" else output
    elements = UNKNOWN_ELEMENTS if shape is None else math.prod(shape)
    # Elsewhere an activation is a part of its kernel, or has a kernel on both sides.
    clamps = elements if op_type == "Add" and case.activation else 0
    return name_kind(case), {"launch": 1.0, "results": float(elements), "clamps": float(clamps)}


def _count_conv(case: OpCase, weight: Shape) -> _Work:
    """Kinds: pointwise, which multiplies the map as it is; dense and grouped, which gather columns first; depthwise."""
    made, per_group, *kernel = weight
    group = case.group
    batch, _, *sides = (
        case.output if case.output is not None else (1, made, *([_SIDE] * len(kernel)))
    )
    taps = math.prod(kernel)
    pixels = batch * math.prod(sides)
    plain = taps == 1 and math.prod(case.strides or (1,)) == 1
    kind = "grouped" if group > 1 else "pointwise" if plain else "dense"
    pairs = 0
    if per_group == 1 and group > 1:
        before, after = ((shape or ())[1:] for shape in (case.inputs[0], case.output))
        kind = (
            "matrix"
            if len(after) == len(before) == 3 and fits_matrix(before, after, taps)
            else "depthwise"
        )
        pairs = math.prod(before) * math.prod(sides)
    depth = per_group * taps
    counts = {
        "products": pixels * made * depth,
        # Multiplications with those that fill up tiles: of 16 pixels in float, of 4 pixels and 8 channels in int8.
        "float products": round_up(pixels, 16) * made * depth,
        "int8 products": round_up(pixels, 4) * round_up(made, 8) * depth,
        "results": pixels * made,
        # What a Max behind takes, and those results that integer kernels clamp all the same, one by one.
        "clamps": pixels * made if case.activation else 0,
        "weights": made * depth,
        "columns": pixels * depth * group,
        "gathers": pixels * taps * group,
        # Float kernels go through a map row by row, and short rows fill no vectors.
        "lines": pixels // max(sides[-1], 1) * taps * group,
        "groups": batch * group,
        # Multiplications of each pixel that is made with all that are read.
        "pairs": batch * pairs,
    }
    return kind, {"launch": 1.0, **{name: float(count) for name, count in counts.items()}}


def fits_matrix(data: Shape, result: Shape, taps: int) -> bool:
    """Whether a float depthwise Conv is faster as a product of each channel by a matrix; shapes without the batch."""
    pairs = math.prod(data[1:]) * math.prod(result[1:])
    return pairs <= _PAIRS and data[0] * pairs <= _VALUES and data[0] * taps * result[1] >= _LINES


def parse_costs(text: str) -> WebCosts:
    """The table in a data file, as `benchmarks/web_costs.py fit` writes it."""
    return WebCosts(**json.loads(text))


_TABLE = resources.files(__package__).joinpath("costs.json")
# One kind of machine: the virtual one. Where it runs scales both sides alike.
COSTS: Mapping[str, WebCosts] = {"wasm": parse_costs(_TABLE.read_text(encoding="utf-8"))}
