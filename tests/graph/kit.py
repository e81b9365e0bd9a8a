"""Small models for the graph room's tests: in text form, and random ones for hypothesis; ORT computes them."""

import random
from collections.abc import Mapping

import numpy as np
import onnx
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxq.graph.scopes import walk_graphs
from tests.networks import open_session, parse_text

SIZE = 4
BINARY = ("Add", "Sub", "Mul", "Max")
UNARY = ("Relu", "Neg", "Identity", "Abs")


def model(text: str, opset: int = 17, ir: int = 8, **arrays: object) -> ModelProto:
    """The model of a "g (…) => (…) {…}" text, with initializers (numbers become float32), and functions of `loc`."""
    domains = ("com.microsoft", "loc") if "loc." in text else ("com.microsoft",)
    return parse_text(text, *domains, opset=opset, ir=ir, **arrays)


def copy(proto: ModelProto) -> ModelProto:
    """Another model of the same content."""
    return ModelProto.FromString(proto.SerializeToString())


BRANCHES = """g (float[4] x, float[4] z, bool c) => (float[4] y) {
    [up] a = Relu(x)
    [if] i = If(c) <then_branch = t () => (float[4] b) { [n1] k = Neg(a) [n2] b = Add(k, w) },
                    else_branch = e () => (float[4] b) { [n3] k = Abs(x) [n4] b = Add(k, z) }>
    [end] y = Add(i, a)
}"""


def branches() -> ModelProto:
    """An If whose bodies use one tensor name and read the main graph: a, z and the weight w (ones)."""
    return model(BRANCHES, w=np.ones(4, np.float32))


def compute(proto: ModelProto, feeds: Mapping[str, NDArray[np.generic]] | None = None) -> list[NDArray[np.generic]]:
    """The outputs as the file says (ORT without optimizations)."""
    session = open_session(proto, optimize=False)
    if feeds is None:
        rng = np.random.default_rng(0)
        feeds = {
            i.name: np.array(True) if "bool" in i.type else rng.standard_normal(SIZE).astype(np.float32)
            for i in session.get_inputs()
        }
    return list(session.run(None, dict(feeds)))


def assert_same(a: ModelProto, b: ModelProto) -> None:
    """Both compute the same bits, whichever branch is taken."""
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal(SIZE).astype(np.float32), "z": rng.standard_normal(SIZE).astype(np.float32)}
    for flag in (True, False):
        outputs = (compute(one, {**feeds, "c": np.array(flag)}) for one in (a, b))
        for left, right in zip(*outputs, strict=True):
            np.testing.assert_array_equal(left, right)


def all_nodes(proto: ModelProto) -> list[NodeProto]:
    """Every node of every scope (functions aside)."""
    return [node for _, graph in walk_graphs(proto.graph) for node in graph.node]


class _Maker:
    """Draws one random model: elementwise nodes over vectors of SIZE, some of them Ifs with bodies that capture."""

    def __init__(self, seed: int, *, named: bool, ifs: bool) -> None:
        self.random = random.Random(seed)
        self.named, self.ifs, self.count = named, ifs, 0

    def model(self, nodes: int) -> ModelProto:
        """inputs x, z and the condition c; outputs y0 and y1."""
        weights = [
            numpy_helper.from_array(np.array([self.random.choice((-2.0, 0.5, 3.0))] * SIZE, np.float32), f"w{k}")
            for k in range(3)
        ]
        graph = GraphProto(name="g", initializer=weights)
        visible = ["x", "z", *(w.name for w in weights)]
        self.fill(graph, visible, nodes, "t", self.ifs)
        for k in range(2):
            graph.node.append(self.node("Add", [self.random.choice(visible), visible[-1]], f"y{k}"))
        vector = [SIZE]
        graph.input.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, vector) for n in ("x", "z"))
        graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
        graph.output.extend(helper.make_tensor_value_info(f"y{k}", TensorProto.FLOAT, vector) for k in range(2))
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(proto)
        return proto

    def fill(self, graph: GraphProto, visible: list[str], count: int, prefix: str, ifs: bool) -> None:
        """Append `count` random nodes; their outputs become visible."""
        for k in range(count):
            output = f"{prefix}{k}"
            roll = self.random.random()
            if ifs and roll < 0.25:
                graph.node.append(self.branch(visible, output, prefix, k))
            elif roll < 0.6:
                graph.node.append(self.node(self.random.choice(UNARY), [self.random.choice(visible)], output))
            else:
                pair = [self.random.choice(visible), self.random.choice(visible)]
                graph.node.append(self.node(self.random.choice(BINARY), pair, output))
            visible.append(output)

    def branch(self, visible: list[str], output: str, prefix: str, k: int) -> NodeProto:
        """An If whose two bodies use the same tensor names."""
        bodies = {}
        for label in ("then_branch", "else_branch"):
            body = GraphProto(name=label)
            inner = list(visible)
            nested = prefix == "t" and self.random.random() < 0.3
            self.fill(body, inner, self.random.randint(1, 3), f"{prefix}{k}b", nested)
            body.output.append(helper.make_tensor_value_info(inner[-1], TensorProto.FLOAT, [SIZE]))
            bodies[label] = body
        node = self.node("If", ["c"], output)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in bodies.items())
        return node

    def node(self, op: str, inputs: list[str], output: str) -> NodeProto:
        """Without a name, with one of a few that repeat, or (named) with its own."""
        self.count += 1
        own = f"n{self.count}" if self.named else self.random.choice(("", "", "a", "b", f"n{self.count}"))
        return helper.make_node(op, inputs, [output], name=own)


def models(*, named: bool = True, ifs: bool = True) -> st.SearchStrategy[ModelProto]:
    """Random models; named=False leaves node names empty or repeated."""
    return st.builds(
        lambda seed, nodes: _Maker(seed, named=named, ifs=ifs).model(nodes), st.integers(0, 10**6), st.integers(1, 12)
    )


def shuffled(proto: ModelProto, seed: int) -> ModelProto:
    """The same model with the nodes of every scope in another order that still runs."""
    rng, other = random.Random(seed), copy(proto)
    for _, graph in walk_graphs(other.graph):
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        placed: list[NodeProto] = []
        made = {name for node in nodes for name in node.output}
        while nodes:
            node = rng.choice([node for node in nodes if not (_reads(node) & made)])
            nodes.remove(node)
            placed.append(node)
            made -= set(node.output)
        del graph.node[:]
        graph.node.extend(placed)
    return other


def _reads(node: NodeProto) -> set[str]:
    names = set(node.input)
    for attr in node.attribute:
        if attr.HasField("g"):
            own = {name for inner in attr.g.node for name in inner.output}
            for inner in attr.g.node:
                names |= _reads(inner) - own
            names |= {value.name for value in attr.g.output} - own
    return names


def respelled(proto: ModelProto) -> ModelProto:
    """The same network with other names for every tensor but the inputs and outputs, and no node names."""
    other = copy(proto)
    kept = {value.name for value in (*proto.graph.input, *proto.graph.output)}

    def new(name: str) -> str:
        return name if not name or name in kept else f"other/{name[::-1]}"

    for _, graph in walk_graphs(other.graph):
        for node in graph.node:
            node.name = ""
            node.input[:] = [new(name) for name in node.input]
            node.output[:] = [new(name) for name in node.output]
        for values in (graph.initializer, graph.value_info, graph.output, graph.input):
            for value in values:
                value.name = new(value.name)
    return other
