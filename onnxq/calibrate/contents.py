"""Sketches of a model's tensors on seeded inputs, by which a plan is found again in a file that other tools rewrote."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from onnxq.calibrate.taps import Taps
from onnxq.data import Batch, make_synthetic
from onnxq.errors import OnnxqError
from onnxq.graph import GraphIndex, ModelLike, get_index, is_large_model
from onnxq.graph.identity import hash_topology
from onnxq.plan import Contents, NodeContents, Plan, SitePlan, Sketch, sketch_values
from onnxq.plan.contents import Feed, make_feeds, read_sketch
from onnxq.planner.recognize import MOVERS, Recognized, recognize_graph
from onnxq.runtime.tap import list_float_tensors
from onnxq.sites import Edge, MaybeTensor, TensorId


def note_contents(plan: Plan, model: ModelLike) -> Plan:
    """The plan with sketches of the tensors and nodes it names.

    Without them where the model runs on no seeded inputs, and for large models.
    model: the prepared float model, before any scaling.
    """
    if is_large_model(model):
        # One more run, of gigabytes.
        return replace(plan, contents=None)
    index = get_index(model)
    nodes = {name: index.find_node(name) for name in sorted(_list_nodes(plan, index))}
    tensors = {
        TensorId(name)
        for node in nodes.values()
        for name in (*node.inputs, node.outputs[0])
        if name
    }
    tensors |= {tensor for site in plan.sites if (tensor := _find_tensor(site)) is not None}
    tensors |= {scaling.tensor for scaling in plan.scalings}
    try:
        sample = make_synthetic(index.inputs, samples=1, model=model)[0]
        feeds = {name: _describe_feed(np.asarray(value)) for name, value in sample.items()}
        sketches = sketch_tensors(model, feeds, tensors)
    except OnnxqError:
        # The plan then goes by names and structure alone.
        return replace(plan, contents=None)
    described = {
        name: NodeContents(
            node.op_type,
            tuple(read if index.resolve_tensor(read, "") else "" for read in node.inputs),
            node.outputs[0],
            turned=node.is_transposed,
        )
        for name, node in nodes.items()
    }
    # As they are read again from the plan's file.
    figures = {tensor.name: read_sketch(str(sketch)) for tensor, sketch in sorted(sketches.items())}
    return replace(plan, contents=Contents(hash_topology(index), feeds, figures, described))


def _find_tensor(site: SitePlan) -> MaybeTensor:
    return site.site if isinstance(site.site, TensorId) else site.tensor


def sketch_tensors(
    model: ModelLike, feeds: Mapping[str, Feed], only: Collection[TensorId] | None = None
) -> dict[TensorId, Sketch]:
    """Sketches of the float tensors of the main graph, or of some of them.

    Raises ModelError or DataError where the model does not run on these inputs.
    """
    index = get_index(model)
    wanted = [t for t in list_float_tensors(index) if not t.scope and (only is None or t in only)]
    taps = Taps(model, wanted)
    sketches = {}
    batch = Batch(make_feeds(feeds), 0, 1)
    for group in taps.form_groups([batch]) if wanted else ():
        for _, tensor, value in taps.run(group, [batch]):
            sketches[tensor] = sketch_values(value)
    # Last: a model that does not run needs none.
    return _sketch_constants(index, only) | sketches


def _sketch_constants(
    index: GraphIndex, only: Collection[TensorId] | None = None
) -> dict[TensorId, Sketch]:
    read = dict.fromkeys(
        TensorId(name) for node in index.nodes if not node.scope for name in node.inputs if name
    )
    # Kind V: bfloat16 and float8 of ml_dtypes.
    return {
        tensor: sketch_values(value, constant=True)
        for tensor in read
        if (only is None or tensor in only)
        and (value := index.find_constant(tensor)) is not None
        and value.dtype.kind in "fV"
    }


def _sketch_by_name(contents: Contents, index: GraphIndex) -> dict[TensorId, Sketch]:
    """Sketches where the model cannot run: of constants their own, of others those of the node of their name."""
    sketches = _sketch_constants(index)
    for name, wanted in contents.nodes.items():
        node = index.named.get(name)
        if node is None:
            continue
        reads = (index.find_input(node, k) for k in range(len(wanted.inputs)))
        for tensor, likely in zip(
            (node.result, *reads), (wanted.output, *wanted.inputs), strict=True
        ):
            if tensor is not None and not index.is_constant(tensor) and likely in contents.tensors:
                sketches[tensor] = contents.tensors[likely]
    return sketches


def _list_nodes(plan: Plan, index: GraphIndex) -> set[str]:
    """Names of the main graph's nodes that the plan names, or that read one of its tensors."""
    edges = [bias.edge for bias in plan.biases]
    for site in plan.sites:
        edges += [*site.named_consumers, *index.list_consumers(_find_tensor(site))]
        edges += [site.site] if isinstance(site.site, Edge) else []
    names = {*plan.float_nodes}
    if plan.precision is not None:
        edges += plan.precision.limited
        names.update(float32.node for float32 in plan.precision.kept)
    names.update(edge.node for edge in edges)
    for node in index.nodes:
        # Also the readers behind nodes that tools may take away.
        if node.name in names and node.op_type in MOVERS:
            names |= {edge.node for edge in index.list_consumers(node.result)}
    return {node.name for node in index.nodes if node.name in names and not node.scope}


def _describe_feed(value: np.ndarray) -> Feed:
    whole = value.size > 0 and value.dtype.kind in "iub"
    return Feed(
        dtype=value.dtype.name,
        shape=value.shape,
        low=int(value.min()) if whole else 0,
        high=int(value.max()) + 1 if whole else 0,
    )


def recognize_model(plan: Plan, model: ModelLike) -> Recognized | None:
    """The plan's tensors and nodes in a model of another graph than its own; None for one of the same graph.

    model: prepared, before any scaling. None also for a plan without sketches, and where the model neither runs on
    their inputs nor has the plan's names and weights: structure then decides.
    """
    contents = plan.contents
    index = get_index(model)
    if contents is None or plan.existing or contents.topology == hash_topology(index):
        return None
    try:
        return recognize_graph(contents, index, sketch_tensors(model, contents.feeds))
    except OnnxqError:
        # Of inputs of other sizes, as prefill and decode are: then names and weights decide, if all of them agree.
        named = recognize_graph(contents, index, _sketch_by_name(contents, index))
        return named if named.nodes.keys() == contents.nodes.keys() else None
