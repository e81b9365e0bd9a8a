"""Random networks of products between which shapes are computed, given and followed."""

import random
from collections.abc import Callable

import numpy as np
import onnx
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxq.graph import infer_shapes, name_nodes

Array = NDArray[np.generic]
CHANNELS = 4


class ShapeNet:
    """Draws one network on x [1, 4, H, W].

    kinds: of what is between two products, each the name of a method.
    """

    def __init__(self, seed: int, kinds: list[str], opset: int = 18) -> None:
        self.rng, self.opset = random.Random(seed), opset
        self.graph = onnx.GraphProto(name="g")
        self.graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, CHANNELS, "H", "W"]))
        self.constants: dict[str, Array] = {}
        self.given: dict[str, Callable[[int, int], Array]] = {}
        self.count = 0
        # Tensors of rank 4 with as many channels.
        self.earlier = ["x"]
        now = self.multiply("x")
        for kind in kinds:
            now = self.multiply(getattr(self, kind)(now))
        self.graph.output.append(helper.make_tensor_value_info(now, TensorProto.FLOAT, [*"ABCD"]))
        self.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in self.constants.items())

    def model(self) -> ModelProto:
        """Nodes named, shapes inferred as far as onnx can."""
        opsets = [helper.make_opsetid("", self.opset)]
        proto = name_nodes(helper.make_model(self.graph, opset_imports=opsets, ir_version=8))
        onnx.checker.check_model(proto)
        return infer_shapes(proto)

    def feeds(self, *sizes: tuple[int, int]) -> list[dict[str, Array]]:
        """A sample for each height and width."""
        rng = np.random.default_rng(1)
        samples = []
        for height, width in sizes:
            x = rng.standard_normal((1, CHANNELS, height, width)).astype(np.float32)
            samples.append({"x": x, **{name: make(height, width) for name, make in self.given.items()}})
        return samples

    # How nodes are written.

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        """The first output of a new node."""
        self.count += 1
        names = [f"{op.lower()}{self.count}", *(f"{op.lower()}{self.count}_{k}" for k in range(1, outputs))]
        self.graph.node.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0]

    def const(self, value: object, dtype: type = np.int64) -> str:
        """A new initializer."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def give(self, make: Callable[[int, int], Array], shape: list[int | str]) -> str:
        """A new input of int64, made of height and width."""
        name = f"n{len(self.given)}"
        self.given[name] = make
        self.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, shape))
        return name

    def shape_of(self, start: int, stop: int) -> str:
        """Some of the sizes of an earlier tensor."""
        shape = self.node("Shape", self.rng.choice(self.earlier))
        return self.node("Slice", shape, self.const([start]), self.const([stop]))

    def multiply(self, name: str) -> str:
        """A Conv, and at times a Relu or a MaxPool behind it."""
        weight = np.random.default_rng(self.count).standard_normal((CHANNELS, CHANNELS, 3, 3)) / 6
        name = self.node("Conv", name, self.const(weight, np.float32), pads=[1] * 4)
        name = self.node("Relu", name) if self.rng.random() < 0.5 else name
        self.earlier.append(name)
        if self.rng.random() < 0.4:
            name = self.node("MaxPool", name, kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1])
        return name

    # What is between products.

    def resize_to_earlier(self, name: str) -> str:
        channels = self.node("Slice", self.node("Shape", name), self.const([0]), self.const([2]))
        sizes = self.node("Concat", channels, self.shape_of(2, 4), axis=0)
        return self.node("Resize", name, "", "", sizes, mode=self.rng.choice(["nearest", "linear"]))

    def resize_axes(self, name: str) -> str:
        return self.node("Resize", name, "", "", self.shape_of(2, 4), mode="linear", axes=[2, 3])

    def resize_given(self, name: str) -> str:
        sizes = self.give(lambda h, w: np.array([1, CHANNELS, h, w + 2]), [4])
        return self.node("Resize", name, "", "", sizes, mode="nearest")

    def resize_scales(self, name: str) -> str:
        halves = [self.node("Cast", self.node("Shape", one), to=1) for one in (self.rng.choice(self.earlier), name)]
        return self.node("Resize", name, "", self.node("Div", *halves), mode="nearest")

    def reshape(self, name: str) -> str:
        rows = self.node("Concat", self.const([1, CHANNELS]), self.const([-1]), axis=0)
        flat = self.node("Neg", self.node("Reshape", name, rows))
        return self.node("Reshape", flat, self.node("Identity", self.node("Shape", name)))

    def expand(self, name: str) -> str:
        mean = self.node("GlobalAveragePool", name)
        return self.node("Add", name, self.node("Expand", mean, self.node("Shape", name)))

    def range(self, name: str) -> str:
        width = self.node("Gather", self.node("Shape", name), self.const(3))
        steps = self.node("Range", self.const(0), width, self.const(1))
        return self.node("Add", name, self.node("Cast", steps, to=1))

    def pad(self, name: str) -> str:
        odd = self.node(
            "Mod", self.node("Slice", self.node("Shape", name), self.const([2]), self.const([4])), self.const([2])
        )
        pads = self.node("Concat", self.const([0] * 6), odd, axis=0)
        return self.node("Pad", name, pads)

    def slice(self, name: str) -> str:
        ends = self.node("Max", self.node("Sub", self.shape_of(2, 4), self.const([1])), self.const([1]))
        return self.node("Slice", name, self.const([0, 0]), ends, self.const([2, 3]))

    def tile(self, name: str) -> str:
        repeats = self.give(lambda h, w: np.array([1, 1, 1, 2]), ["ranks"])
        return self.node("Tile", name, repeats)

    def zeros(self, name: str) -> str:
        return self.node("Add", name, self.node("ConstantOfShape", self.node("Shape", name)))

    def squeeze(self, name: str) -> str:
        axes = self.give(lambda h, w: np.array([0]), [1])
        return self.node("Unsqueeze", self.node("Squeeze", name, axes), axes)

    def reduce(self, name: str) -> str:
        axes = self.give(lambda h, w: np.array([2, 3]), [2])
        return self.node("Sub", name, self.node("ReduceMean", name, axes))

    def topk(self, name: str) -> str:
        size = self.node("Slice", self.node("Shape", name), self.const([3]), self.const([4]))
        return self.node("TopK", name, self.node("Min", size, self.const([2])), outputs=2, axis=3)

    def sequence(self, name: str) -> str:
        rows = self.node("SplitToSequence", name, self.const(1), axis=1)
        more = self.node("Mul", name, self.const(0.5, np.float32))
        inserted = self.node("SequenceInsert", rows, self.node("SequenceAt", rows, self.const(2)), self.const(0))
        halves = self.node("ConcatFromSequence", inserted, axis=1)
        return self.node(
            "Add", more, self.node("Slice", halves, self.const([0]), self.const([CHANNELS]), self.const([1]))
        )

    def loop(self, name: str) -> str:
        text = """b (int64 i, bool go, float[1,4,h,w] s) => (bool on, float[1,4,h,w] t)
            { on = Identity(go) k = Cast<to = 1>(i) t = Add(s, k) }"""
        trips = self.node("Gather", self.node("Shape", self.rng.choice(self.earlier)), self.const(1))
        return self._nest("Loop", [trips, "", name], text, 1)

    def scan(self, name: str) -> str:
        # ORT takes no Scan without ranks, and knows none behind these.
        known = not {"Loop", "Squeeze"}.intersection(node.op_type for node in self.graph.node)
        captured = self.node("ReduceMax", name, self.const([0, 1]), keepdims=0)
        rows = self.node("Squeeze", name, self.const([0]))
        shape = "" if known and self.rng.random() < 0.7 else "[h,w]"
        text = f"""b (float{shape} s, float{shape} r) => (float{shape} t, float{shape} o)
            {{ m = Max(s, r) t = Identity(m) o = Add(m, {captured}) }}"""
        zeros = self.node(
            "ConstantOfShape", self.node("Slice", self.node("Shape", rows), self.const([1]), self.const([3]))
        )
        made = self._nest("Scan", [zeros, rows], text, 2, num_scan_inputs=1)
        return self.node("Unsqueeze", f"{made}_1", self.const([0]))

    def branch(self, name: str) -> str:
        size = self.node("Gather", self.node("Shape", self.rng.choice(self.earlier)), self.const(2))
        large = self.node("Greater", size, self.const(7))
        then = onnx.parser.parse_graph(f"b () => (float t) {{ t = Neg({name}) }}")
        other = onnx.parser.parse_graph(f"b () => (float e) {{ e = Identity({name}) }}")
        for body in (then, other):
            body.output[0].type.tensor_type.ClearField("shape")
            self._rename(body)
        return self.node("If", large, then_branch=then, else_branch=other)

    def _nest(self, op: str, inputs: list[str], text: str, outputs: int, **attributes: object) -> str:
        body = onnx.parser.parse_graph(text)
        for value in (*body.input, *body.output):
            if not value.type.tensor_type.shape.dim and value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.ClearField("shape")
        self._rename(body)
        return self.node(op, *inputs, outputs=outputs, body=body, **attributes)

    def _rename(self, body: onnx.GraphProto) -> None:
        """Let no name of the body be used elsewhere."""
        inner = {value.name for value in body.input} | {name for node in body.node for name in node.output}
        self.count += 1
        prefix = f"b{self.count}"
        for node in body.node:
            for names in (node.input, node.output):
                names[:] = [f"{prefix}{name}" if name in inner else name for name in names]
        for value in (*body.input, *body.output):
            value.name = f"{prefix}{value.name}"


KINDS = (
    "resize_to_earlier", "resize_axes", "resize_given", "resize_scales", "reshape", "expand", "range", "pad", "slice",
    "tile", "zeros", "squeeze", "reduce", "topk", "sequence", "loop", "scan", "branch",
)  # fmt: skip


def shape_nets(kinds: tuple[str, ...] = KINDS) -> st.SearchStrategy[ShapeNet]:
    """Random networks of up to three kinds."""
    drawn = st.lists(st.sampled_from(kinds), min_size=1, max_size=3)
    return st.builds(ShapeNet, st.integers(0, 10**6), drawn)
