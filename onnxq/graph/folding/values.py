"""Values of tensors that follow from constants and static shapes: by rules, by moving a weight, or by running nodes.

Shapes are followed element by element: one dynamic axis must not hide the static ones. Shape(x)[2:] of x [N, 3, 224,
224] is [224, 224] whatever N is. graphsurgeon's own shape folding is not used: it takes no notice of Shape's start and
end, and moves casts so that fractions are lost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxq.arrays import Array, ArrayDict, Shape
from onnxq.errors import MissingDependencyError
from onnxq.graph.base import LAYOUT_OPS, NodeRef
from onnxq.graph.editing import gs
from onnxq.graph.index import GraphIndex
from onnxq.graph.subgraph import assemble_model, remove_unneeded
from onnxq.sites import Indices, TensorId

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
# A shape has few entries; anything longer is data.
_LONGEST = 64


@dataclass(frozen=True)
class _Known:
    """A vector (or scalar) of which some entries are known."""

    items: tuple[int | None, ...]
    scalar: bool = False


def infer_shape_values(index: GraphIndex) -> dict[TensorId, Array]:
    """The value of every tensor that follows from static dims alone, constants themselves left out.

    Types and shapes are taken from the index as they are: it must not hold guesses.
    """
    values = _KnownValues(index)
    known = values.tensors
    for node in index.nodes:
        rule = None if node.domain else _RULES.get(node.op_type)
        if rule is None or len(node.outputs) != 1:
            continue
        found = rule(values, node)
        # Unknown entries are kept too: Gather and Slice may leave only known ones.
        if found is not None and len(found.items) <= _LONGEST:
            known[node.result] = found
    return {
        t: np.array(
            value.items[0] if value.scalar else value.items,
            helper.tensor_dtype_to_np_dtype(index.find_dtype(t)),
        )
        for t, value in known.items()
        if None not in value.items and index.find_dtype(t) in _INTEGERS and not index.is_constant(t)
    }


@dataclass(frozen=True)
class _KnownValues:
    """The tensors of a graph of which something is known, so far."""

    index: GraphIndex
    tensors: dict[TensorId, _Known] = field(default_factory=dict)

    def read_input(self, node: NodeRef, k: int) -> _Known | None:
        index = self.index
        t = index.find_input(node, k)
        if t is None or t in self.tensors:
            return None if t is None else self.tensors[t]
        # A constant then, such as the index of a Gather.
        shape = index.find_shape(t)
        if (
            index.find_dtype(t) not in _INTEGERS
            or shape is None
            or len(shape) > 1
            or not index.is_constant(t)
        ):
            return None
        # Long constants are not read: an index without weights does not hold their values.
        if shape and not (isinstance(shape[0], int) and shape[0] <= _LONGEST):
            return None
        array = index.find_constant(t)
        if array is None:
            return None
        return _Known(tuple(map(int, array.ravel())), array.ndim == 0)

    def read_parameter(self, node: NodeRef, k: int, name: str) -> Indices | None:
        """A parameter that newer opsets take as input k and older ones as an attribute; () when it is left out."""
        if name in node.attrs:
            return tuple(map(int, np.atleast_1d(node.attrs[name])))
        if not node.name_input(k):
            return ()
        parameter = self.read_input(node, k)
        if parameter is None or None in parameter.items:
            return None
        return tuple(v for v in parameter.items if v is not None)


def _infer_shape(values: _KnownValues, node: NodeRef) -> _Known | None:
    dims = values.index.input_shape(node)
    if dims is None:
        return None
    sizes = tuple(d if isinstance(d, int) else None for d in dims)
    # Attributes of Shape since opset 15.
    return _Known(sizes[node.attrs.get("start", 0) : node.attrs.get("end", len(sizes))])


def _infer_size(values: _KnownValues, node: NodeRef) -> _Known | None:
    sizes = values.index.find_sizes(values.index.find_input(node))
    return None if sizes is None else _Known((math.prod(sizes),), scalar=True)


def _infer_gather(values: _KnownValues, node: NodeRef) -> _Known | None:
    data = values.read_input(node, 0)
    at = values.read_input(node, 1)
    if data is None or at is None or data.scalar or node.attrs.get("axis", 0) not in (0, -1):
        return None
    # The places must be known, the entries there need not be.
    places = [k for k in at.items if k is not None]
    size = len(data.items)
    if len(places) != len(at.items) or not all(-size <= k < size for k in places):
        return None
    return _Known(tuple(data.items[k] for k in places), at.scalar)


def _infer_slice(values: _KnownValues, node: NodeRef) -> _Known | None:
    data = values.read_input(node, 0)
    parameters = [
        values.read_parameter(node, k, name)
        for k, name in enumerate(("starts", "ends", "axes", "steps"), start=1)
    ]
    if data is None or data.scalar or None in parameters:
        return None
    starts, ends, axes, steps = (part or () for part in parameters)
    # Shapes are vectors: there is one axis to cut.
    if len(starts) != 1 or len(ends) != 1 or axes not in ((), (0,), (-1,)):
        return None
    return _Known(data.items[starts[0] : ends[0] : steps[0] if steps else 1])


def _infer_concat(values: _KnownValues, node: NodeRef) -> _Known | None:
    parts = [values.read_input(node, k) for k in range(len(node.inputs))]
    items: list[int | None] = []
    for part in parts:
        if part is None or part.scalar:
            return None
        items.extend(part.items)
    return _Known(tuple(items))


def _infer_cast(values: _KnownValues, node: NodeRef) -> _Known | None:
    source = values.read_input(node, 0)
    # Past 2^31 a cast to int32 wraps around.
    if (
        source is None
        or node.attrs.get("to") not in _INTEGERS
        or any(abs(v) >= 2**31 for v in source.items if v)
    ):
        return None
    return source


def _infer_rank(values: _KnownValues, node: NodeRef) -> _Known | None:
    """Of Unsqueeze, which makes a vector of a scalar, and of Squeeze."""
    data = values.read_input(node, 0)
    grows = node.op_type == "Unsqueeze"
    # Squeeze alone can do without axes.
    fitting = ((0,), (-1,)) if grows else ((), (0,), (-1,))
    if data is None or data.scalar is not grows or len(data.items) != 1:
        return None
    return (
        _Known(data.items, not grows) if values.read_parameter(node, 1, "axes") in fitting else None
    )


_RULES = {
    "Shape": _infer_shape,
    "Size": _infer_size,
    "Gather": _infer_gather,
    "Slice": _infer_slice,
    "Concat": _infer_concat,
    "Identity": lambda values, node: values.read_input(node, 0),
    "Cast": _infer_cast,
    "Unsqueeze": _infer_rank,
    "Squeeze": _infer_rank,
}


# Casts in which no value changes: source type -> target types.
_WIDER: dict[int, tuple[int, ...]] = {
    TensorProto.FLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.BFLOAT16: (TensorProto.FLOAT, TensorProto.DOUBLE),
    TensorProto.FLOAT: (TensorProto.DOUBLE,),
}
_RESHAPES = LAYOUT_OPS - {"Transpose"}


def move_constant(node: NodeRef, source: Array, dtype: int, shape: Shape | None) -> Array | None:
    """Return the output of `node` for a constant first input; None unless it only moves or widens values.

    dtype: of the source. shape: of the output where inferred, None otherwise.
    """
    if (
        node.op_type in _RESHAPES
        and shape is not None
        and np.prod(shape, dtype=np.int64) == source.size
    ):
        return source.reshape(shape)
    if node.op_type == "Transpose":
        perm = node.attrs.get("perm", tuple(range(source.ndim))[::-1])
        # Another rank than the model declares: the engine says which node it is.
        fits = sorted(perm) == list(range(source.ndim))
        return np.ascontiguousarray(np.transpose(source, perm)) if fits else None
    if node.op_type == "Cast" and node.attrs.get("to") in _WIDER.get(dtype, ()):
        return source.astype(helper.tensor_dtype_to_np_dtype(node.attrs["to"]))
    return None


# graphsurgeon computes only what nothing foldable reads: every wanted tensor gets an Identity of this name behind it.
_END = " "


def evaluate_nodes(
    like: ModelProto,
    nodes: Sequence[NodeProto],
    constants: Mapping[str, TensorProto],
    wanted: Sequence[str],
) -> ArrayDict | None:
    """The values of the `wanted` tensors; None where ONNX Runtime cannot compute one of them.

    nodes: in topological order, reading `constants` and each other. like: gives opsets and IR version. Raises
    MissingDependencyError without onnxruntime.
    """
    ends = [
        helper.make_node("Identity", [name], [name + _END], name=name + _END) for name in wanted
    ]
    outputs = [ValueInfoProto(name=name + _END) for name in wanted]
    model = assemble_model(like, [*nodes, *ends], (), outputs, constants)
    remove_unneeded(model.graph)
    graph = gs.import_onnx(model)
    try:
        # Folded as it is: without error_ok=False graphsurgeon would print the fault and go on.
        graph.fold_constants(
            fold_shapes=False,
            recurse_subgraphs=False,
            flatten_subgraphs=False,
            recurse_functions=False,
            error_ok=False,
        )
    except ModuleNotFoundError as error:
        cause = "is needed to fold constants"
        raise MissingDependencyError(
            "onnxruntime", cause, "pip install onnxq[cpu]", code="Q801"
        ) from error
    except Exception:  # whatever ONNX Runtime makes of a model it cannot run
        return None
    values = {end.name: end.values for end in graph.outputs if isinstance(end, gs.Constant)}
    return {name: values[name + _END] for name in wanted if name + _END in values}
