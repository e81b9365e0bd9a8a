"""Random small graphs end to end: shared tensors and weights, outputs in the middle, inputs that are outputs."""

import math
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.backends import load_config
from onnxq.plan import from_json, to_json
from tests.cpus.kernels import cpu_saturates

# Averages of noise around zero are small beside the levels of what they are computed from: 15 dB have been seen.
FLOOR_DB = 12.0
SAMPLES = 24
Shape = tuple[int, ...]


@dataclass
class Builder:
    """A graph in the making; tensors by name with their shapes, the batch axis first."""

    rng: np.random.Generator
    shapes: dict[str, Shape] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def weight(self, shape: Shape, fan: int, reuse: bool) -> str:
        """A weight of about unit gain; reuse: one of that shape that is there already."""
        if reuse:
            for name, value in self.weights.items():
                if value.shape == shape:
                    return name
        name = f"w{len(self.weights)}"
        self.weights[name] = (self.rng.standard_normal(shape) * math.sqrt(1.6 / fan)).astype(np.float32)
        return name

    def bias(self, size: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = (self.rng.standard_normal(size) / 4).astype(np.float32)
        return name

    def node(self, op: str, inputs: list[str], shape: Shape, **attrs: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"{op}_{len(self.nodes)}", **attrs))
        self.shapes[name] = shape
        return name

    def of_rank(self, rank: int) -> list[str]:
        return [name for name, shape in self.shapes.items() if len(shape) == rank]


def conv(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(b.of_rank(4)))
    n, c, h, w = b.shapes[x]
    k = draw(st.sampled_from((1, 3)))
    depthwise = draw(st.booleans()) and draw(st.booleans())
    out, group = (c, c) if depthwise else (draw(st.sampled_from((8, 16))), 1)
    weight = b.weight((out, c // group, k, k), c // group * k * k, draw(st.booleans()))
    inputs = [x, weight, b.bias(out)] if draw(st.booleans()) else [x, weight]
    b.node("Conv", inputs, (n, out, h, w), pads=[k // 2] * 4, group=group)


def unary(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(sorted(b.shapes)))
    op = draw(st.sampled_from(("Relu", "Relu", "LeakyRelu", "Sigmoid", "Identity")))
    b.node(op, [x], b.shapes[x])


def clip(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(sorted(b.shapes)))
    b.weights.setdefault("zero", np.float32(0))
    b.weights.setdefault("six", np.float32(6))
    b.node("Clip", [x, "zero", "six"], b.shapes[x])


def binary(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(sorted(b.shapes)))
    y = draw(st.sampled_from([name for name, shape in b.shapes.items() if shape == b.shapes[x]]))
    b.node("Add", [x, y], b.shapes[x])


def concat(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(sorted(b.shapes)))
    like = [n for n, s in b.shapes.items() if len(s) == len(b.shapes[x]) and s[2:] == b.shapes[x][2:]]
    y = draw(st.sampled_from(like))
    joined = b.shapes[x][1] + b.shapes[y][1]
    if joined <= 48:
        b.node("Concat", [x, y], (b.shapes[x][0], joined, *b.shapes[x][2:]), axis=1)


def pool(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(b.of_rank(4)))
    n, c, h, w = b.shapes[x]
    if draw(st.booleans()):
        b.node("MaxPool", [x], (n, c, h, w), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    elif h > 1:
        b.node("GlobalAveragePool", [x], (n, c, 1, 1))


def move(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(sorted(b.shapes)))
    shape = b.shapes[x]
    if len(shape) == 4 and draw(st.booleans()):
        b.node("Transpose", [x], (shape[0], shape[1], shape[3], shape[2]), perm=[0, 1, 3, 2])
    elif len(shape) == 4 and math.prod(shape[1:]) <= 512:
        b.node("Flatten", [x], (shape[0], math.prod(shape[1:])))
    elif len(shape) == 4:
        size = np.array([0, shape[1], -1], np.int64)
        name = f"shape{len(b.weights)}"
        b.weights[name] = size
        b.node("Reshape", [x, name], (shape[0], shape[1], shape[2] * shape[3]))


def product(b: Builder, draw: st.DrawFn) -> None:
    flat = [name for name, shape in b.shapes.items() if len(shape) in (2, 3)]
    if not flat:
        return
    x = draw(st.sampled_from(flat))
    shape, out = b.shapes[x], draw(st.sampled_from((8, 16)))
    inner = shape[-1]
    if len(shape) == 3 or draw(st.booleans()):
        b.node("MatMul", [x, b.weight((inner, out), inner, draw(st.booleans()))], (*shape[:-1], out))
        return
    turned = draw(st.booleans())
    weight = b.weight((out, inner) if turned else (inner, out), inner, draw(st.booleans()))
    inputs = [x, weight, b.bias(out)] if draw(st.booleans()) else [x, weight]
    b.node("Gemm", inputs, (shape[0], out), transB=int(turned))


def scalar(b: Builder, draw: st.DrawFn) -> None:
    """Arithmetic with a constant, of one number or one a channel, which preparation folds where it may."""
    x = draw(st.sampled_from(sorted(b.shapes)))
    shape, op = b.shapes[x], draw(st.sampled_from(("Add", "Sub", "Mul", "Div")))
    name = f"w{len(b.weights)}"
    size = (shape[1], *[1] * (len(shape) - 2)) if draw(st.booleans()) else ()
    b.weights[name] = b.rng.uniform(0.5, 1.5, size).astype(np.float32)
    first = op in ("Add", "Mul") and draw(st.booleans())
    b.node(op, [name, x] if first else [x, name], shape)


def norm(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(b.of_rank(4)))
    names = [f"w{len(b.weights)}_{k}" for k in range(4)]
    for name in names:
        b.weights[name] = b.rng.uniform(0.5, 1.5, b.shapes[x][1]).astype(np.float32)
    b.node("BatchNormalization", [x, *names], b.shapes[x])


def pad(b: Builder, draw: st.DrawFn) -> None:
    x = draw(st.sampled_from(b.of_rank(4)))
    n, c, h, w = b.shapes[x]
    if h <= 8:
        b.weights.setdefault("pads", np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
        b.node("Pad", [x, "pads"], (n, c, h + 2, w + 2))


def swish(b: Builder, draw: st.DrawFn) -> None:
    """x · sigmoid(x) or x · clip(x + 3, 0, 6) / 6, with parts that others may read."""
    x = draw(st.sampled_from(sorted(b.shapes)))
    shape = b.shapes[x]
    if draw(st.booleans()):
        b.node("Mul", [x, b.node("Sigmoid", [x], shape)], shape)
        return
    for name, value in (("zero", 0), ("six", 6), ("three", 3)):
        b.weights.setdefault(name, np.float32(value))
    moved = b.node("Clip", [b.node("Add", [x, "three"], shape), "zero", "six"], shape)
    b.node("Div", [b.node("Mul", [x, moved], shape), "six"], shape)


STEPS = (conv, conv, conv, unary, unary, clip, binary, concat, pool, move, product, product, scalar, norm, pad, swish)


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    """A checker-valid model of one or two inputs, 4 to 13 steps, with outputs anywhere."""
    b = Builder(np.random.default_rng(draw(st.integers(0, 2**16))))
    batch = draw(st.sampled_from((1, "N")))
    inputs = {f"x{k}": (1, 8, 6, 6) for k in range(draw(st.integers(1, 2)))}
    b.shapes.update(inputs)
    for step in (conv, *draw(st.lists(st.sampled_from(STEPS), min_size=3, max_size=12))):
        step(b, draw)
    made = [node.output[0] for node in b.nodes]
    read = {name for node in b.nodes for name in node.input}
    outputs = [name for name in made if name not in read]
    outputs += draw(st.lists(st.sampled_from(sorted(b.shapes)), max_size=3, unique=True))
    return model(b, inputs, list(dict.fromkeys(outputs)), batch)


def model(b: Builder, inputs: dict[str, Shape], outputs: list[str], batch: int | str) -> onnx.ModelProto:
    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *b.shapes[name][1:]])

    used = {name for node in b.nodes for name in node.input}
    graph = helper.make_graph(
        b.nodes,
        "random",
        [info(name) for name in inputs],
        [info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in b.weights.items() if k in used],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto, full_check=True)
    return proto


@pytest.mark.recent_ort
@pytest.mark.parametrize("target", ["ort", "trt"])
# Each example runs the whole engine: one in five of what the profile has.
@settings(
    max_examples=settings().max_examples // 5, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(proto=graphs())
def test_any_graph_is_quantized_soundly(target: str, proto: onnx.ModelProto) -> None:
    config = load_config(f"{target}-int8", {"rules": [{"op": "*", "set": {"quantize": True}}]})
    before = proto.SerializeToString()
    rng = np.random.default_rng(7)
    samples = {one.name: rng.standard_normal((SAMPLES, 8, 6, 6)).astype(np.float32) for one in proto.graph.input}
    result = onnxq.quantize(proto, samples, config, overrides={"latency": False})
    assert proto.SerializeToString() == before
    onnx.checker.check_model(result.model, full_check=True)
    assert list(result.model.graph.input) == list(proto.graph.input)
    assert list(result.model.graph.output) == list(proto.graph.output)
    # TensorRT adds in 32 bits, so its weights keep no 16-bit sums; where the CPU adds in 16, ORT's kernels are others.
    alike = target == "ort" or not cpu_saturates()
    for check in result.report.checks:
        off, on = check.sqnr_db
        assert off > FLOOR_DB, check
        # In float16 around the pairs ORT's optimizations say nothing.
        assert not alike or not check.optimized or on > FLOOR_DB, check
        assert not alike or not check.optimized or check.agreement_db > min(40.0, off - 3.0), check
    plan = from_json(to_json(result.plan))
    again = onnxq.apply(proto, plan, config=config, overrides={"latency": False})
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)
