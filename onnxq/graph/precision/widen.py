"""float16 and bfloat16 models computed in float32, which is exact where they are and needs no kernels of their types.

Loading makes a float32 network of such a model, inputs and outputs included, and remembers the types, which the
finished file gets back. ORT's CPU provider computes float16 node by node in float32 itself, has no bfloat16, and fuses
no quantized kernel between the Casts that it puts in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnxq.arrays import Array, as_float32, as_float64
from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.light import (
    M,
    ModelLike,
    WeightStore,
    bare_proto,
    copy_proto,
    copy_store,
    rebuild,
    store_of,
)
from onnxq.graph.names import choose_name, list_names
from onnxq.graph.precision.narrow import FLOAT, MOVES, TYPE_NAMES, make_cast
from onnxq.graph.scopes import map_end_types, rename_reads, replace_items, walk_graphs, walk_nodes
from onnxq.graph.shapes import infer_shapes, is_custom
from onnxq.graph.values import decode_tensor, encode_tensor
from onnxq.sites import NameSet, TensorId

NARROW = frozenset({int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)})
# They read tables stored in a narrow type, for networks that compute in float32.
_READING = ("Cast", "Constant", "Gather", "Identity", "Reshape", "Shape", "Transpose")
# Elements. Below this a Cast costs more in the file than it saves.
_WORTH = 1024
# Of a weight's energy, that may be lost: normal numbers of float16 lose 2e-8 on average, denormal ones more.
_ROUNDING = 1e-7
NodeProtos = list[NodeProto]


@dataclass(frozen=True)
class SourceTypes:
    """The narrow float types of a model as it was loaded, by onnx.TensorProto number.

    computes: the type that it computes in; 0 for float32. interface: the types of its narrow inputs and outputs.
    stored: float32 tensors -> the name and type of the narrow initializer that each comes from.
    fixed: inputs and outputs that have their types whatever is asked for, for nodes that are not in the model.
    """

    computes: int = 0
    interface: Mapping[str, int] = field(default_factory=dict)
    stored: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    fixed: NameSet = frozenset()

    @property
    def narrow(self) -> bool:
        """True for a model that is widened: its samples are float32 then."""
        return bool(self.computes or self.interface)


def read_types(model: ModelLike) -> SourceTypes:
    """The narrow types of a model whose nodes are named and whose functions are inlined."""
    computes = _find_compute_type(model)
    kinds = map_end_types(model.graph)
    interface = {name: kind for name, kind in kinds.items() if kind in NARROW}
    return SourceTypes(computes, interface, _map_stored(model))


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """True for numpy's float16, and for bfloat16."""
    return any(dtype == helper.tensor_dtype_to_np_dtype(kind) for kind in NARROW)


def _find_compute_type(model: ModelLike) -> int:
    """The narrow type that the first node to compute in one reads, as declared or inferred; 0 without one."""
    if not _mentions_narrow(bare_proto(model)):
        return 0
    index = get_index(infer_shapes(model))
    # Weights stored in a narrow type, behind a Cast, say nothing of the type that is computed in.
    computing = (node for node in index.nodes if node.op_type not in _READING)
    dtypes = (index.find_dtype(tensor) for node in computing for tensor in index.list_inputs(node))
    return next((dtype for dtype in dtypes if dtype in NARROW), 0)


def _mentions_narrow(proto: ModelProto) -> bool:
    """True where anything in the model has a narrow type, so that a closer look is worth its time."""
    dtypes = set(map_end_types(proto.graph).values())
    for _, graph in walk_graphs(proto.graph):
        dtypes.update(tensor.data_type for tensor in graph.initializer)
        for node in graph.node:
            # Any integer of the same value leads to a closer look as well, which costs only time.
            dtypes.update(dtype for attr in node.attribute for dtype in (attr.t.data_type, attr.i))
    return not NARROW.isdisjoint(dtypes)


def widen_model(model: M) -> M:
    """A copy that has float32 wherever `model` has float16 or bfloat16, inputs and outputs included.

    Custom operators, which may know the one type that they read, keep it, with Casts named `<node>/in<k>/Cast` around.
    """
    out = copy_proto(model)
    store = copy_store(model)
    for scope, graph in walk_graphs(out.graph):
        for tensor in graph.initializer:
            _widen_tensor(tensor, None if scope else store)
        for sparse in graph.sparse_initializer:
            _widen_tensor(sparse.values)
        for node in graph.node:
            _widen_node(node)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in NARROW:
                value.type.tensor_type.elem_type = FLOAT
    if any(map(is_custom, walk_nodes(out.graph))):
        before = get_index(infer_shapes(model))
        taken = list_names(out)
        for scope, graph in walk_graphs(out.graph):
            nodes: NodeProtos = []
            for node in graph.node:
                tails = _keep_node(node, scope, before, taken, nodes) if is_custom(node) else []
                nodes += [node, *tails]
            replace_items(graph.node, nodes)
    return rebuild(model, out, store)


def _widen_tensor(tensor: TensorProto, store: WeightStore | None = None) -> None:
    if tensor.data_type in NARROW:
        wide = encode_tensor(tensor.name, as_float32(decode_tensor(tensor, store)), store=store)
        wide.metadata_props.extend(tensor.metadata_props)
        tensor.CopyFrom(wide)


def _widen_node(node: NodeProto) -> None:
    attr: AttributeProto
    for attr in node.attribute:
        if attr.type == AttributeProto.TENSOR:
            _widen_tensor(attr.t)
        # Of Cast; of EyeLike and random operators; of QuantizeLinear and DequantizeLinear.
        elif attr.name in ("to", "dtype", "output_dtype") and attr.i in NARROW:
            attr.i = FLOAT


def _keep_node(
    node: NodeProto, scope: str, before: GraphIndex, taken: set[str], heads: NodeProtos
) -> NodeProtos:
    """Let one node read and write the types it had. Casts in front go to `heads`; those behind are returned."""
    dtypes = [before.find_dtype(before.resolve_tensor(name, scope)) for name in node.input]

    def name_cast(place: str, dtype: int) -> tuple[str, str]:
        return choose_name(f"{place}/{TYPE_NAMES[dtype]}", taken), choose_name(
            f"{place}/Cast", taken
        )

    for k, dtype in enumerate(dtypes):
        if dtype in NARROW:
            narrow, cast = name_cast(f"{node.name}/in{k}", dtype)
            heads.append(make_cast(node.input[k], narrow, dtype, cast))
            node.input[k] = narrow
    tails = []
    for k, name in enumerate(node.output):
        # Without a declared type, most operators write what they read.
        dtype = before.find_dtype(TensorId(name, scope)) or max(dtypes, default=0)
        if name and dtype in NARROW:
            narrow, cast = name_cast(f"{node.name}/out{k}", dtype)
            tails.append(make_cast(narrow, name, FLOAT, cast))
            node.output[k] = narrow
    return tails


def restore_stored(model: M, stored: Mapping[str, tuple[str, int]]) -> M:
    """Store float32 initializers in the narrow type they came in, behind a Cast, where it holds their values.

    Those that were scaled since are rounded to float16, which has eight times the steps of the int8 beside it.
    Only the main graph's larger initializers: a quantized model must not grow by the weights that stayed float.
    ORT folds such a Cast when it loads the model.
    """
    if not stored:
        return model
    out = copy_proto(model)
    store = copy_store(model)
    graph = out.graph
    taken = list_names(out)
    casts = []
    for tensor in graph.initializer:
        name = tensor.name
        source, dtype = stored.get(name, ("", 0))
        if not source or tensor.data_type != FLOAT or np.prod(tensor.dims, dtype=np.int64) < _WORTH:
            continue
        wide = decode_tensor(tensor, store)
        # Of what overflows, inf differs from the value, and the tensor stays as it is.
        with np.errstate(over="ignore"):
            narrow = wide.astype(helper.tensor_dtype_to_np_dtype(dtype))
        if not _holds(narrow, wide, dtype):
            continue
        source = choose_name(source if source != name else f"{name}/{TYPE_NAMES[dtype]}", taken)
        tensor.CopyFrom(encode_tensor(source, narrow, dtype, store=store))
        casts.append(make_cast(source, name, FLOAT, choose_name(f"{name}/Cast", taken)))
    if casts:
        # In front of all nodes that read them.
        replace_items(graph.node, [*casts, *graph.node])
    return rebuild(model, out, store)


def _holds(narrow: Array, wide: Array, kind: int) -> bool:
    """True where the values are the same, or differ by rounding to float16 and by nothing that it cannot reach."""
    # In float64 the difference of two close float32 numbers is exact.
    error = as_float64(narrow) - wide
    if kind != TensorProto.FLOAT16 or not error.any():
        return not error.any()
    return bool(np.square(error).sum() <= _ROUNDING * np.square(wide, dtype=np.float64).sum())


def _map_stored(original: ModelLike) -> dict[str, tuple[str, int]]:
    """Map float32 tensors to the narrow initializer each comes from: itself, or the one a Cast reads."""
    narrow = {
        tensor.name: tensor.data_type
        for tensor in original.graph.initializer
        if tensor.data_type in NARROW
    }
    sources = {name: (name, dtype) for name, dtype in narrow.items()}
    index = get_index(original)
    for node in index.nodes:
        # Bodies have names of their own, which may be the same.
        if node.scope:
            continue
        result = node.outputs[0]
        dtype = index.find_dtype(node.result) if node.op_type == "Constant" else 0
        if dtype in NARROW:
            narrow[result] = dtype
            sources[result] = result, dtype
        if node.op_type == "Cast" and node.inputs[0] in narrow:
            sources[result] = node.inputs[0], narrow[node.inputs[0]]
    return sources


def emulate_types(model: M) -> M:
    """A copy with float32 inputs and outputs that computes in float32 and rounds as the types of `model` say.

    Nodes must be named. Their names stay; the tensors that they make before they are rounded get others.
    """
    index = get_index(infer_shapes(model))
    wide = widen_model(model)
    out = copy_proto(wide)
    taken = list_names(out)
    for scope, graph in walk_graphs(out.graph):
        nodes = [] if scope else _round_inputs(graph, index, taken)
        for node in graph.node:
            nodes.append(node)
            nodes += _round_outputs(node, index, taken)
        replace_items(graph.node, nodes)
    return rebuild(wide, out, store_of(wide))


def _round_inputs(graph: GraphProto, index: GraphIndex, taken: set[str]) -> NodeProtos:
    """The nodes that round the inputs of the main graph, whose readers read what these make."""
    nodes = []
    for value in graph.input:
        dtype = index.find_dtype(TensorId(value.name))
        if dtype in NARROW:
            rounded = choose_name(f"{value.name}/rounded", taken)
            rename_reads(graph, {value.name: rounded})
            nodes += _round_tensor(value.name, rounded, dtype, taken)
    return nodes


def _round_outputs(node: NodeProto, index: GraphIndex, taken: set[str]) -> NodeProtos:
    ref = index.find_node(node.name)
    # Operators that only know the narrow type still compute in it.
    if ref.is_onnx(*MOVES) or is_custom(ref) or ref.op_type == "Constant":
        return []
    nodes = []
    for k, name in enumerate(node.output):
        dtype = index.find_dtype(ref.make_result(k)) if name else 0
        if dtype in NARROW:
            node.output[k] = choose_name(f"{name}/exact", taken)
            nodes += _round_tensor(node.output[k], name, dtype, taken)
    return nodes


def _round_tensor(source: str, target: str, kind: int, taken: set[str]) -> NodeProtos:
    narrow = choose_name(f"{target}/{TYPE_NAMES[kind]}", taken)
    return [
        make_cast(source, narrow, kind, choose_name(f"{target}/round", taken)),
        make_cast(narrow, target, FLOAT, choose_name(f"{target}/widen", taken)),
    ]
