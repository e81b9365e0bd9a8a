"""The model of a planned state: pairs written, what an engine needs guarded.

A guard is a Clip without bounds between a DequantizeLinear and its reader.

Two things make them needed.

ORT quantizes on its own the nodes between a DequantizeLinear and a QuantizeLinear: Conv and Gemm (and MatMul + Add of
static shapes, which it makes a Gemm) with float weights get int8 weights per tensor; AveragePool and Softmax become
integer kernels slower than the float ones. Reshape, Transpose and MaxPool between do not stop it, it moves the
DequantizeLinear through them. A Clip without bounds stays in the graph and does stop it.

Where it moves a DequantizeLinear through a node whose output a body (of If, Loop or Scan) reads from outside, it looks
for that reader among the inputs of If, where it is not, and ends the process (ONNX Runtime 1.32).
"""

from collections.abc import Sequence, Set
from itertools import islice

from onnxq.arrays import is_float
from onnxq.backends import find_target
from onnxq.config import Config
from onnxq.emit import emit_pairs, emit_types, replace_biases, write_matrices
from onnxq.errors import PlanError
from onnxq.evaluation.metric import Metric
from onnxq.graph import ModelLike, NodeRef, ensure_opset, infer_shapes, keep_named, verify_graph
from onnxq.graph.base import MOVING_OPS
from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.integer_products import write_integer_products
from onnxq.graph.nbits import write_nbits
from onnxq.graph.precision.narrow import write_types
from onnxq.graph.precision.widen import restore_stored
from onnxq.graph.qoperators import write_qoperators
from onnxq.passes.patterns import INVARIANTS, Edit
from onnxq.passes.state import FloatState
from onnxq.plan import Plan, name_part
from onnxq.progress import Progress, silent
from onnxq.sites import Edge, MaybeTensor, Names
from onnxq.spec import FloatType

# ORT moves a DequantizeLinear through these, or they keep integers integers.
_TRANSPARENT = MOVING_OPS | {"ReduceMax", "ReduceMin", "Concat", "Tile"}
# What ONNX Runtime joins to a product, or looks for an int8 product in front of.
_JOINED = {"MatMul": ("Add", "Relu", "Clip"), "Gemm": ("Relu", "Clip")}
# A node that changes nothing, that ONNX Runtime leaves in the graph, and that runs on WebGPU, too.
_NOTHING = ("LeakyRelu", (), {"alpha": 1.0})
# Nodes of that kind in a row; exporters write two or three.
_REACH = 6


def guard_float(proto: ModelLike, nodes: Sequence[str]) -> ModelLike:
    """A copy in which ORT leaves these nodes float, and moves no pair to bodies; the model itself if it does so anyway.

    For each of them, every computed input that comes from a DequantizeLinear (also through Reshape, Transpose, MaxPool
    and their like) gets one guard, shared by the named readers of the same tensor, when a QuantizeLinear follows within
    a few nodes; without one ORT does nothing by itself. Run it after the pairs are in.

    Raises ModelError for a node that is not there.
    """
    edit = Edit(proto)
    index = edit.index
    guards = {}
    named = [index.find_node(name) for name in dict.fromkeys(nodes)]
    guarded = [node for node in named if _is_quantized_behind(index, node)]
    # ORT moves a DequantizeLinear through these, to where a body reads.
    guarded += [
        node
        for node in index.nodes
        if node.op_type in _TRANSPARENT
        and any(map(index.captured, node.results))
        and node not in guarded
    ]
    for node in guarded:
        for k, tensor in enumerate(index.list_inputs(node)):
            if tensor is None or not _from_pair(index, tensor):
                continue
            # One for each scope, since it stands in front of its first reader.
            key = (tensor, node.scope)
            if key not in guards:
                guards[key] = edit.insert_before(
                    node, "Clip", (tensor.name,), f"{tensor.name}/guard"
                )
            edit.read(node.make_edge(k), guards[key])
    return edit.export() if guards else proto


def _from_pair(index: GraphIndex, tensor: MaybeTensor) -> bool:
    """True when a tensor is dequantized from something computed, directly or through nodes that pass it on."""
    *_, origin = (None, *islice(index.walk_back(tensor, _TRANSPARENT), _REACH))
    node = index.find_onnx_producer(origin, "DequantizeLinear")
    return node is not None and not index.has_constant(node, 0)


def _is_quantized_behind(index: GraphIndex, node: NodeRef) -> bool:
    """True when a QuantizeLinear is reached within a few nodes. Too many guards cost little, one too few accuracy."""
    front = {node}
    for _ in range(_REACH):
        front = {
            reader for at in front for tensor in at.results for reader in index.readers(tensor)
        }
        if any(at.op_type == "QuantizeLinear" for at in front):
            return True
    return False


def keep_products(proto: ModelLike, nodes: Sequence[str], paired: Set[Edge]) -> ModelLike:
    """A copy in which ORT finds the integer kernels of these products, whose weights are quantized.

    paired: inputs behind pairs. Before ORT looks for quantized groups, its MatMulAddFusion makes Gemm of MatMul + Add
    when the data is 2-D, or of higher rank with only static dimensions and the Add of [N]; without a pair behind it
    that Gemm stays float (0.36x on a transformer of fixed shape), and takes in the activation behind it. An Add of
    [1, .., 1, N] as long as the input's rank escapes it for rank 3 and up; for 2-D inputs Sub(x, -b) does, to the same
    bits: x - (-b) = x + b. In front of a Relu or Clip that one node reads, ORT 1.32 takes the product for the front of
    a QuantizeLinear, and gives up where none is. There, and in front of an Add of computed rows, a node that changes
    nothing keeps it from that.

    For MatMuls that will be quantized without a pair on their output; left float or with a pair behind, Gemm is fine.
    The bias is a copy of its own, so other readers of it see no change. Nodes that ORT fuses nothing of stay: other
    operators, and MatMuls whose bias has the form already, or that become MatMulNBits with it.

    Raises ModelError for a node that is not there.
    """
    # Types inferred on the way help to see ranks; the finished model has only those it declared.
    index = get_index(infer_shapes(proto))
    edit = Edit(proto)
    changed = [
        name
        for name in dict.fromkeys(nodes)
        if _keep_product(index, edit, index.find_node(name), paired)
    ]
    return edit.export() if changed else proto


def _keep_product(index: GraphIndex, edit: Edit, node: NodeRef, paired: Set[Edge]) -> bool:
    """Give the reader of a product another form; False where ORT joins nothing to it."""
    kinds = _JOINED.get(node.op_type, ())
    reader = index.find_reader(node.result, *kinds) if kinds else None
    if reader is None:
        return False
    behind, k = reader
    rank = index.find_rank(node.result) or 0
    deep = rank >= 3
    bias = index.input_value(behind, 1 - k)
    if behind.op_type != "Add":
        # A QuantizeLinear will be there, or nothing that it looks at.
        readers = index.list_consumers(behind.result)
        apart = index.is_output(behind.result) or not paired.isdisjoint(readers)
    elif bias is None:
        # Of an unknown rank ORT makes no Gemm, either.
        apart = rank != 2 or behind.make_edge(k) in paired
    else:
        # MatMulNBits, which weights alone become, takes biases of [N].
        has_form = deep and (bias.ndim >= 3 or node.make_edge(0) not in paired)
        apart = has_form or not is_float(bias)
    if apart:
        return False
    if behind.op_type != "Add" or bias is None:
        edit.append(node, [_NOTHING])
    elif deep:
        shaped = bias.reshape((1,) * (rank - bias.ndim) + bias.shape)
        constant = edit.add_constant(behind.scope, f"{behind.inputs[1 - k]}/rank{rank}", shaped)
        edit.read(behind.make_edge(1 - k), constant)
    else:
        negated = edit.add_constant(behind.scope, f"{behind.inputs[1 - k]}/negated", -bias)
        edit.replace_node(behind, "Sub", (node.outputs[0], negated))
    return True


def keep_pools(proto: ModelLike, paired: Set[Edge]) -> ModelLike:
    """A copy in which ORT leaves a MaxPool float that reads floats: it would move the QuantizeLinear in front of it.

    On bytes it has a kernel for plain layouts alone, 20 times slower than the float one, which has those of Conv.
    """
    edit = Edit(proto)
    index = edit.index
    pools = [
        node
        for node in index.nodes
        if node.is_onnx("MaxPool")
        and node.make_edge(0) not in paired
        and not paired.isdisjoint(index.list_consumers(node.result))
    ]
    for node in pools:
        edit.append(node, [_NOTHING])
    return edit.export() if pools else proto


def write_pairs(state: FloatState, plan: Plan, *, fold_constants: bool = False) -> ModelLike:
    """The plan's pairs alone, for runs that leave pairs as they are: `build_quantized` changes no value beyond them.

    fold_constants: as of `emit_pairs`.
    """
    return emit_pairs(_with_biases(state, plan), plan, fold_constants=fold_constants)


def build_quantized(state: FloatState, plan: Plan) -> ModelLike:
    """Write the plan's pairs, with the nodes that the target needs around them, and check that the graph is legal.

    All floats are float32, inputs and outputs too: for trials and times in ONNX Runtime.
    """
    proto = _write_operators(_write_all(state, plan), plan)
    verify_graph(proto, kept=plan.kept)
    return proto


def build_file(state: FloatState, plan: Plan, progress: Progress = silent) -> ModelLike:
    """The finished model: `build_quantized` with the plan's float types, inputs and outputs in theirs, checked.

    The model as loaded where nothing changes and its loops read weights from outside: with float weights that are
    constants ONNX Runtime computes a step slower.
    """
    changes = plan.sites or plan.precision or state.types.narrow
    if INVARIANTS in state.rewrites and not changes:
        return state.named
    typed = _write_operators(emit_types(_write_all(state, plan, progress), plan, state.types), plan)
    proto = restore_stored(typed, state.types.stored)
    verify_graph(proto, kept=plan.kept)
    return proto


def _write_all(state: FloatState, plan: Plan, progress: Progress = silent) -> ModelLike:
    proto = _with_biases(state, plan)
    target = find_target(plan.target)
    if target.quantizes_alone:
        index = get_index(proto)
        paired = {
            edge
            for site in plan.all_sites
            if site.role.is_measured
            for edge in site.find_readers(index)
        }
        proto = keep_pools(keep_products(proto, _list_products(plan), paired), paired)
    done = guard_float(emit_pairs(proto, plan, progress), plan.float_nodes)
    # Only the types the model declared itself: inferred ones let ORT fuse more, and not for the better.
    declared = {value.name for value in state.named.graph.value_info}
    keep_named(done.graph.value_info, declared)
    return write_matrices(done, target.fits_matrix) if target.writes_matrices else done


def _write_operators(proto: ModelLike, plan: Plan) -> ModelLike:
    """The model with the operators that the plan asks for in the place of pairs, last, when floats have their types.

    Those of dynamic data as well, whose scale is a product of two that float16 need not hold.
    """
    proto = write_integer_products(proto)
    weights = {name_part(site.site, "dq_node"): site for site in plan.sites if site.role.is_weight}
    minima = {
        name: site.qparams.minimum
        for name, site in weights.items()
        if site.qparams is not None and site.qparams.minimum is not None
    }
    if plan.nbits is not None:
        return write_nbits(
            proto, plan.nbits, {name: site.spec.bits for name, site in weights.items()}, minima
        )
    for name in minima:
        cause = "its blocks begin at floats, which MatMulNBits alone has"
        raise PlanError(weights[name].site, cause, "write `nbits: 0` into the plan", code="Q407")
    return write_qoperators(proto) if plan.qoperators else proto


def run_metric(metric: Metric, config: Config, state: FloatState, model: ModelLike) -> float:
    """The metric of a float32 model, whose inputs and outputs a person's function expects in the types they came in.

    Where some are bfloat16 all stay float32: ONNX Runtime takes no bfloat16 from numpy.
    """
    interface = state.types.interface
    if interface and FloatType.BFLOAT16.onnx_type not in interface.values():
        model = write_types(model, FloatType.FLOAT16.onnx_type, None, interface=interface)
    return metric(
        model,
        optimize=find_target(config.target).times_itself,
        threads=config.verify.threads,
    )


def _with_biases(state: FloatState, plan: Plan) -> ModelLike:
    return replace_biases(ensure_opset(state.model, plan.opset), plan)


def _list_products(plan: Plan) -> Names:
    """Consumers of quantized weights that ONNX Runtime has to find the kernels of, by node name."""
    # These become operators on integers, whose bias ORT takes into the kernel in any form.
    dynamic = {
        edge.node for site in plan.sites if site.spec.dynamic for edge in site.named_consumers
    }
    return tuple(
        edge.node
        for site in plan.sites
        if site.role.is_weight and plan.nbits is None
        for edge in site.named_consumers
        if edge.node not in dynamic
    )
