"""Range and errors of every tensor of a float32 network, were it to compute in a narrow float type.

Beside each node of the float32 network stands a twin that reads the same tensors rounded to the narrow type. What it
makes differs by the errors that rounding its inputs causes there: cancellation, a constant that vanishes, an overflow.
All of it is reduced to a few numbers in the run itself, so that no tensor is kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from onnxq.arrays import Array64, as_float32, as_float64, as_int64, cast_quietly
from onnxq.graph import DEQUANTIZE, QUANTIZE, GraphIndex, ModelLike, get_index
from onnxq.graph.base import RANDOM_OPS
from onnxq.graph.light import WeightStore, bare_proto, copy_proto, copy_store, rebuild
from onnxq.graph.names import choose_name, list_names
from onnxq.graph.precision.narrow import CONTROL, FLOAT, MOVES, bind_types, is_float32, make_cast
from onnxq.graph.scopes import replace_items, walk_graphs
from onnxq.graph.shapes import find_contrib
from onnxq.graph.values import encode_tensor
from onnxq.planner import TensorErrors
from onnxq.progress import Progress, count_items, silent
from onnxq.runtime import Feeds, Session, tap_tensors
from onnxq.sites import TensorId
from onnxq.spec import FloatType

# Constants of the twins.
_ONE = "onnxq/one"
_ZERO = "onnxq/zero"

# They are others in every run.
_RANDOM = frozenset({*RANDOM_OPS, "Bernoulli", "Dropout"})
# No twin: these have no arithmetic, or none of their own.
_WITHOUT = MOVES | _RANDOM | {QUANTIZE, DEQUANTIZE, "Constant", "ConstantOfShape"}


def measure_float_errors(
    model: ModelLike, kind: FloatType, samples: Iterable[Feeds], *, progress: Progress = silent
) -> dict[TensorId, TensorErrors]:
    """Range and errors of every float32 tensor that samples reached, constants left out.

    model: float32, with inferred types. kind: the narrow type. Raises ModelError and DataError from the runs.
    """
    writer = _TwinWriter(
        get_index(model), kind.onnx_type, copy_store(model), list_names(bare_proto(model))
    )
    tapped = tap_tensors(writer.write_twins(model), writer.stats.values(), only=True)
    if not tapped.outputs:
        return {}
    session = Session(tapped.proto, optimize=False, arena=False)
    sums: dict[TensorId, TensorErrors] = {}
    with progress("measuring float errors") as task:
        for feeds in count_items(samples, task):
            values = session.run(feeds)
            for tensor, stat in writer.stats.items():
                stats = values.get(tapped.outputs.get(stat, ""))
                rows = (
                    np.zeros((0, _COUNT))
                    if stats is None
                    else as_float64(stats.reshape(-1, _COUNT))
                )
                # The lowest of no values, as in a cache in front of the first token, is above their highest.
                rows = rows[~(rows[:, 0] > rows[:, 1])]
                if rows.size:
                    sums[tensor] = _add_errors(sums.get(tensor), rows)
    return sums


# Numbers of each tensor: lowest, highest, power, errors by its rounded inputs and by its own rounding, elements of
# what was read for each of its own.
_COUNT = 6


def _add_errors(before: TensorErrors | None, rows: Array64) -> TensorErrors:
    """The errors with those of one run, which may have run the node several times."""
    # Where a twin overflows, its error is inf or NaN.
    power, inside, own = (float(np.nan_to_num(rows[:, k], nan=np.inf).sum()) for k in (2, 3, 4))
    low = float(rows[:, 0].min())
    high = float(rows[:, 1].max())
    count = float(rows[:, 5].max())
    if before is not None:
        low = min(low, before.low)
        high = max(high, before.high)
        count = max(count, before.count)
        power += before.power
        inside += before.inputs_noise
        own += before.own_noise
    return TensorErrors(
        low=low, high=high, power=power, inputs_noise=inside, own_noise=own, count=count
    )


@dataclass(eq=False)
class _TwinWriter:
    """Adds twins and their sums to a copy of a model.

    stats: the tensor that holds the numbers of each tensor. rounded: the rounded tensor, by the scope that reads it.
    """

    index: GraphIndex
    narrow: int
    store: WeightStore | None
    taken: set[str]
    stats: dict[TensorId, TensorId] = field(default_factory=dict)
    rounded: dict[tuple[str, TensorId], str] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)

    def write_twins(self, model: ModelLike) -> ModelLike:
        """The model with twins in all scopes."""
        out = copy_proto(model)
        self.taken.update((_ONE, _ZERO))
        one = encode_tensor(_ONE, as_int64([1]))
        out.graph.initializer.extend((one, encode_tensor(_ZERO, np.zeros(1, np.float32))))
        for scope, graph in walk_graphs(out.graph):
            self.nodes = []
            for value in () if scope else self.index.inputs:
                self._add_sums(graph, scope, value.name)
            for node in graph.node:
                self.nodes.append(node)
                self._add_twin(out.graph, graph, scope, node)
            replace_items(graph.node, self.nodes)
        return rebuild(model, out, self.store)

    def _add_twin(self, main: GraphProto, graph: GraphProto, scope: str, node: NodeProto) -> None:
        floats = [
            name for name in node.output if name and is_float32(self.index, TensorId(name, scope))
        ]
        unknown = node.domain and find_contrib(node, self.index.opset) is None
        # If, Loop and Scan compute nothing themselves: the nodes of their bodies have twins.
        if not floats or unknown or node.op_type in (*CONTROL, "Constant"):
            return
        moved = node.op_type in MOVES
        twin = NodeProto()
        twin.CopyFrom(node)
        if node.op_type not in _WITHOUT:
            ref = self.index.find_node(node.name)
            # Some are float32 in any case: scales of a Resize, which would have another size, limits of a Range.
            kinds = bind_types(self.index, ref, self.narrow, self.index.opset).inputs
            twin.input[:] = [
                name if kind is False else self._round_tensor(main, scope, name)
                for name, kind in zip(node.input, kinds, strict=True)
            ]
        # A node that reads no float32, such as a Cast of integers, has nothing to be rounded.
        if twin.input[:] != node.input[:]:
            twin.name = choose_name(f"{node.name}/twin", self.taken)
            twin.output[:] = [
                choose_name(f"{name}/twin", self.taken) if name else "" for name in node.output
            ]
            self.nodes.append(twin)
        for name, other in zip(node.output, twin.output, strict=True):
            if name in floats:
                read = node.input[0] if node.input else ""
                self._add_sums(
                    graph, scope, name, "" if other == name else other, read, moved=moved
                )

    def _round_tensor(self, main: GraphProto, scope: str, name: str) -> str:
        """The tensor rounded to the narrow type, as this scope reads it."""
        tensor = self.index.resolve_tensor(name, scope)
        if tensor is None or not is_float32(self.index, tensor):
            return name
        value = self.index.find_constant(tensor)
        # A constant is rounded in the main graph, where every scope sees it; a Cast stands in the
        # scope that reads its result, since the tensor may be computed beside it.
        key = ("" if value is not None else scope), tensor
        if key in self.rounded:
            return self.rounded[key]
        rounded = self.rounded[key] = choose_name(f"{name}/rounded", self.taken)
        if value is not None:
            narrow = cast_quietly(value, helper.tensor_dtype_to_np_dtype(self.narrow))
            main.initializer.append(encode_tensor(rounded, as_float32(narrow), store=self.store))
        else:
            between = choose_name(f"{rounded}/narrow", self.taken)
            self.nodes += (
                make_cast(name, between, self.narrow, choose_name(f"{rounded}/down", self.taken)),
                make_cast(between, rounded, FLOAT, choose_name(f"{rounded}/up", self.taken)),
            )
        return rounded

    def _add_sums(
        self,
        graph: GraphProto,
        scope: str,
        name: str,
        twin: str = "",
        read: str = "",
        *,
        moved: bool = False,
    ) -> None:
        """Append the nodes that reduce a tensor and its twin to numbers. moved: its values are those of another."""
        if not is_float32(self.index, TensorId(name, scope)):
            return
        base = choose_name(f"{name}/errors", self.taken)

        def add(op_type: str, *inputs: str, **attributes: Any) -> str:
            result = choose_name(f"{base}/{op_type}", self.taken)
            self.nodes.append(
                helper.make_node(op_type, inputs, [result], name=result, **attributes)
            )
            return result

        def sum_squares(other: str = "") -> str:
            return add("ReduceSumSquare", add("Sub", name, other) if other else name, keepdims=0)

        # In the order of the columns that `_add_errors` reads.
        parts = [add("ReduceMin", name, keepdims=0), add("ReduceMax", name, keepdims=0)]
        if not moved:
            own = self._round_tensor(graph, scope, name)
            parts += [sum_squares(), sum_squares(twin) if twin else _ZERO, sum_squares(own)]
            # Sequences have no size, and ONNX Runtime has no Size of every type.
            source = (
                read if is_float32(self.index, self.index.resolve_tensor(read, scope)) else name
            )
            parts.append(
                add("Div", *(add("Cast", add("Size", part), to=FLOAT) for part in (source, name)))
            )
        parts = [part if part == _ZERO else add("Reshape", part, _ONE) for part in parts]
        parts += [_ZERO] * (_COUNT - len(parts))
        self.nodes.append(helper.make_node("Concat", parts, [base], name=base, axis=0))
        graph.value_info.append(helper.make_tensor_value_info(base, TensorProto.FLOAT, [_COUNT]))
        self.stats[TensorId(name, scope)] = TensorId(base, scope)
