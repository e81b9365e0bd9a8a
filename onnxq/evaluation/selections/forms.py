"""Judged forms of models: with the choices as outputs, or as inputs and outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto, ValueInfoProto, helper

from onnxq.evaluation.selections.search import Selection, find_axis, name_own
from onnxq.graph import GraphIndex, ModelLike, drop_named, get_index, infer_shapes, name_nodes
from onnxq.graph.light import bare_proto, rebuild
from onnxq.graph.scopes import iterate_subgraphs, join_scope, replace_items, sort_nodes, walk_graphs
from onnxq.graph.storage import omit_weights, restore_weights
from onnxq.runtime import tap_tensors
from onnxq.sites import NameSet, TensorId, is_within

# The opset that has GatherElements. Older models keep values of a TopK in their own order.
_GATHER_ELEMENTS = 11


def make_form(
    model: ModelLike,
    selections: Sequence[Selection],
    settled: NameSet = frozenset(),
    *,
    given: bool,
) -> ModelLike:
    """The judged form of a model. given: the choices are inputs; settled: outputs that they alone decide."""
    plain = name_nodes(model)
    index = get_index(infer_shapes(plain))
    proto, weights = omit_weights(bare_proto(plain))
    form = _Form(index, proto.graph, dict(walk_graphs(proto.graph)), given)
    for selection in selections:
        form.add(selection)
    if given:
        choices = {name: kind for selection in selections for name, kind in selection.choices}
        form.take(choices, frozenset() if form.lacks else settled)
    # What was added is read by nodes in front of it. Bodies first: sorting a graph makes its nodes anew.
    for graph in reversed([*form.graphs.values()]):
        replace_items(graph.node, sort_nodes(graph))
    return form.lead_out(rebuild(plain, restore_weights(proto, weights)))


@dataclass(eq=False)
class _Form:
    """A judged form as it is made, in place. graphs: by scope. given: the choices are inputs.

    inner: tensors of bodies that become outputs, by the names of these. lacks: a choice has no tensor here.
    """

    index: GraphIndex
    graph: GraphProto
    graphs: Mapping[str, GraphProto]
    given: bool
    inner: dict[str, TensorId] = field(default_factory=dict)
    lacks: bool = False

    def add(self, selection: Selection) -> None:
        """Give the choices and values of one selection as outputs, or take the choices where they are given."""
        scope = selection.scope
        graph = self.graphs.get(scope, GraphProto())
        makers = {name: node for node in graph.node for name in node.output if name}
        maker = makers.get(selection.name_inside(selection.name))
        if maker is not None and maker.op_type == selection.op_type:
            # Those that the node reads, behind a pair where it has one.
            for name, k in selection.values:
                graph.node.append(helper.make_node("Identity", [maker.input[k]], [name], name=name))
                self._give_out(name, name, scope, like=maker.input[k])
            if (
                self.given
                and selection.op_type == "TopK"
                and maker.output[0]
                and self.index.opset >= _GATHER_ELEMENTS
            ):
                _match_rows(graph, maker, selection)
        for choice, kind in selection.choices:
            name = selection.name_inside(choice)
            if name not in makers:
                self.lacks = True
            elif not self.given:
                self._give_out(choice, name, scope, like=name)
            else:
                own = name_own(name)
                self._give_out(name_own(choice), own, scope, like=name)
                outputs = makers[name].output
                outputs[:] = [own if output == name else output for output in outputs]
                if scope:
                    inner = helper.make_tensor_value_info(name, kind, None)
                    _give_inside(self.graph, scope, choice, inner)

    def take(self, choices: Mapping[str, int], settled: NameSet) -> None:
        """Make inputs of the choices, whose ONNX types these are. settled: outputs that go."""
        graph = self.graph
        for values, gone in ((graph.output, settled | choices.keys()), (graph.value_info, choices)):
            drop_named(values, gone)
        graph.input.extend(_declare(self.index, name, name, kind) for name, kind in choices.items())

    def lead_out(self, model: ModelLike) -> ModelLike:
        """The model with the tensors of bodies among its outputs."""
        if not self.inner:
            return model
        tapped = tap_tensors(infer_shapes(model), self.inner.values())
        proto, weights = omit_weights(bare_proto(tapped.proto))
        names = {
            tapped.outputs[tensor]: name
            for name, tensor in self.inner.items()
            if tensor in tapped.outputs
        }
        for value in proto.graph.output:
            if value.name in names:
                name = names[value.name]
                proto.graph.node.append(
                    helper.make_node("Identity", [value.name], [name], name=value.name)
                )
                value.name = name
        return rebuild(tapped.proto, restore_weights(proto, weights))

    def _give_out(self, output: str, name: str, scope: str, like: str) -> None:
        """Make an output of the tensor `name` in a scope. like: one of its type and rank."""
        if scope:
            self.inner[output] = TensorId(name, scope)
        elif all(value.name != output for value in self.graph.output):
            self.graph.output.append(_declare(self.index, output, like))


def _match_rows(graph: GraphProto, maker: NodeProto, selection: Selection) -> None:
    """Let the values of a TopK be those at the given positions."""
    values = maker.output[0]
    maker.output[0] = name_own(values)
    inputs = [maker.input[0], selection.name_inside(selection.name)]
    name = name_own(maker.name)
    graph.node.append(
        helper.make_node("GatherElements", inputs, [values], name=name, axis=find_axis(maker))
    )


def _give_inside(graph: GraphProto, scope: str, choice: str, inner: ValueInfoProto) -> None:
    """Let a body read an input of the model: in one that iterates, the part of each iteration. inner: by this name."""
    at = ""
    outer = choice
    while at != scope:
        bodies = (
            (node, body, join_scope(at, node.name, label))
            for node in graph.node
            for label, body in iterate_subgraphs(node)
        )
        node, body, at = next(item for item in bodies if is_within(scope, item[2]))
        part = f"{choice}/{node.name}"
        # Input 0 of its body counts the iterations, some exporters declare it as a vector of one.
        if node.op_type == "Loop":
            count = f"{part}/iteration"
            body.node.extend(
                (
                    helper.make_node("Squeeze", [body.input[0].name], [count], name=count),
                    helper.make_node("Gather", [outer, count], [part], name=part, axis=0),
                )
            )
        # What it cuts into iterations stands last among its inputs; axes and directions, where they
        # are listed, have an entry for each.
        elif node.op_type == "Scan":
            node.input.append(outer)
            body.input.append(
                helper.make_tensor_value_info(part, inner.type.tensor_type.elem_type, None)
            )
            for attr in node.attribute:
                if attr.name == "num_scan_inputs":
                    attr.i += 1
                elif attr.name in ("scan_input_axes", "scan_input_directions"):
                    attr.ints.append(0)
        graph = body
        outer = outer if node.op_type == "If" else part
    graph.node.append(helper.make_node("Identity", [outer], [inner.name], name=f"{choice}/given"))


def _declare(index: GraphIndex, name: str, like: str, kind: int = 0) -> ValueInfoProto:
    """An input or output of the type and rank of a tensor, as far as they are known. kind: where its type is not."""
    tensor = TensorId(like)
    dtype = index.find_dtype(tensor) or kind
    shape = index.find_shape(tensor)
    # Other sizes than were written down run all the same inside, and must from outside.
    return (
        helper.make_tensor_value_info(name, dtype, shape and [None] * len(shape))
        if dtype
        else ValueInfoProto(name=name)
    )
