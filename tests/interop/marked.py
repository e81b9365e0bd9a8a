"""Networks with markers in them, and what they compute: the reference evaluator with onnxq's own rounding."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxq.numerics import fake_quant
from onnxq.runtime import Session
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec

DOMAIN = "ai.onnxq"
ACT = QuantSpec(bits=8, signed=False, symmetric=False)
WEIGHT = QuantSpec(bits=8, granularity=PerChannel(0))


class FakeQuantize(OpRun):
    """The marker as it computes."""

    op_domain = DOMAIN

    def _run(self, x: Any, scale: Any, zero: Any, **attrs: Any) -> tuple[Any]:  # type: ignore[override]
        grain: Any = PerTensor()
        if attrs.get("axis") is not None:
            size = attrs.get("block_size") or 0
            grain = PerBlock(attrs["axis"], size) if size else PerChannel(attrs["axis"])
        signed = attrs["qmin"] < 0
        spec = QuantSpec(
            bits=attrs["bits"], signed=signed, symmetric=attrs["scheme"] == "symmetric",
            narrow_range=signed and attrs["qmin"] == -attrs["qmax"], granularity=grain,
        )  # fmt: skip
        return (fake_quant(x, QParams(scale, np.rint(zero).astype(np.int32)), spec),)


class Net:
    """A graph written node by node. Values lie on a grid of 1/16, so sums are exact in any order."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, NDArray[Any]] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.sites: list[str] = []

    def input(self, name: str, *shape: int | str, dtype: int = onnx.TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def weight(self, name: str, *shape: int, dtype: Any = np.float32) -> str:
        return self.constant(name, (self.rng.integers(-32, 33, shape) / 16).astype(dtype))

    def constant(self, name: str, value: NDArray[Any]) -> str:
        self.initializers[name] = value
        return name

    def op(self, op_type: str, *inputs: str, out: str = "", **attrs: Any) -> str:
        made = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [made], name=f"n_{made}", **attrs))
        return made

    def mark(
        self,
        x: str,
        site: str,
        spec: QuantSpec = ACT,
        scale: Any = 0.25,
        zero: Any = None,
        *,
        role: str = "activation",
        out: str = "",
    ) -> str:
        """x through a marker. scale: of the spec's shape; zero: the same, by default the spec's middle."""
        scales = np.asarray(scale, np.float32)
        if zero is None:
            zero = 0 if spec.signed else (spec.qmax + 1) // 2
        zeros = np.broadcast_to(np.asarray(zero, np.float32), scales.shape)
        key = f"{site}#{len(self.nodes)}"
        grain = spec.granularity
        attrs: dict[str, Any] = {}
        if not isinstance(grain, PerTensor):
            attrs["axis"] = grain.axis
        if isinstance(grain, PerBlock):
            attrs["block_size"] = grain.size
        self.sites.append(site)
        return self.op(
            "FakeQuantize", x, self.constant(f"{key}.scale", scales), self.constant(f"{key}.zero", zeros.copy()),
            out=out, domain=DOMAIN, site=site, role=role, qmin=spec.qmin, qmax=spec.qmax, bits=spec.bits,
            scheme="symmetric" if spec.symmetric else "asymmetric", **attrs,
        )  # fmt: skip

    def channels(self, count: int) -> NDArray[np.float32]:
        """Scales that are powers of two."""
        return np.exp2(self.rng.integers(-5, -2, count)).astype(np.float32)

    def model(
        self, *outputs: str, opset: int = 17, rank: int = 2, dtype: int = onnx.TensorProto.FLOAT
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "g", self.inputs,
            [helper.make_tensor_value_info(name, dtype, [None] * rank) for name in outputs],
            [numpy_helper.from_array(value, name) for name, value in self.initializers.items()],
        )  # fmt: skip
        domains = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=9)

    def feeds(self, **sizes: int) -> dict[str, NDArray[Any]]:
        """Inputs on the grid, beyond what most scales hold."""
        feeds = {}
        for value in self.inputs:
            shape = [dim.dim_value or sizes[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[value.name] = (self.rng.integers(-700, 701, shape) / 16).astype(kind)
        return feeds


def computed(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of a marked model."""
    return list(ReferenceEvaluator(model, new_ops=[FakeQuantize]).run(None, feeds))


def residual_net(weights: QuantSpec = WEIGHT, activations: QuantSpec = ACT) -> Net:
    """Conv, Relu, a residual Add, a Concat, pooling and a Gemm, everything quantized; output `y`."""
    net = Net()

    def weight(name: str, *shape: int) -> str:
        w = net.weight(name, *shape)
        count = shape[0] if not isinstance(weights.granularity, PerTensor) else None
        scale = net.channels(count) if count else np.float32(1 / 16)
        if isinstance(weights.granularity, PerBlock):
            size = weights.granularity.size
            scale = net.channels(shape[0] * -(-shape[1] // size) * int(np.prod(shape[2:])))
            scale = scale.reshape(shape[0], -(-shape[1] // size), *shape[2:])
        return net.mark(w, name, weights, scale, role="weight")

    x = net.mark(net.input("x", "n", 3, 8, 8), "input:x", activations)
    a = net.op("Conv", x, weight("c1.weight", 4, 3, 3, 3), pads=[1, 1, 1, 1])
    a = net.mark(net.op("Relu", a), "relu.out", activations, 4.0)
    b = net.op("Conv", a, weight("c2.weight", 4, 4, 1, 1), net.weight("c2.bias", 4))
    b = net.mark(b, "c2.out", activations, 8.0)
    s = net.mark(net.op("Add", a, b), "add.out", activations, 8.0)
    c = net.mark(net.op("Concat", s, a, axis=1), "cat.out", activations, 8.0)
    p = net.op("GlobalAveragePool", c)
    f = net.mark(net.op("Flatten", p), "flatten.out", activations, 4.0)
    net.op("Gemm", f, weight("fc.weight", 5, 8), net.weight("fc.bias", 5), transB=1, out="y")
    return net


def redundant_net() -> Net:
    """With what optimizers take away: an Identity, two Transposes in a row, shape arithmetic, equal constants."""
    net = Net()
    x = net.mark(net.input("x", "n", 4, 6), "input:x")
    t = net.op("Transpose", net.op("Transpose", x, perm=[0, 2, 1]), perm=[0, 2, 1])
    size = net.op("Shape", t)
    batch = net.op("Gather", size, net.constant("zero", np.array([0])), axis=0)
    rest = net.constant("rest", np.array([24]))
    flat = net.op("Reshape", net.op("Identity", t), net.op("Concat", batch, rest, axis=0))
    w = net.mark(
        net.weight("fc.weight", 24, 8),
        "fc.weight",
        QuantSpec(bits=4, granularity=PerChannel(1)),
        net.channels(8),
        role="weight",
    )
    h = net.mark(net.op("Relu", net.op("MatMul", flat, w)), "relu.out", replace(ACT, bits=4), 64.0, 0)
    a = net.op("Mul", h, net.constant("two", np.float32([2])))
    b = net.op("Mul", h, net.constant("also two", np.float32([2])))
    net.op("Add", net.mark(a, "mul.out", ACT, 128.0, 0), net.op("Neg", b), out="y")
    return net


def reordered(model: onnx.ModelProto) -> onnx.ModelProto:
    """As late as their inputs allow it, and the initializers backwards."""
    out = onnx.ModelProto.FromString(model.SerializeToString())
    waiting = dict.fromkeys((v.name for v in out.graph.input), 0) | {t.name: 0 for t in out.graph.initializer}
    left = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(out.graph.node)]
    done: list[onnx.NodeProto] = []
    while left:
        node = next(n for n in left if all(name in waiting or not name for name in n.input))
        left.remove(node)
        waiting.update(dict.fromkeys(node.output, 0))
        done.append(node)
    tensors = [onnx.TensorProto.FromString(t.SerializeToString()) for t in reversed(out.graph.initializer)]
    del out.graph.node[:], out.graph.initializer[:]
    out.graph.node.extend(done)
    out.graph.initializer.extend(tensors)
    return out


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """All inner names others, as another export has them."""
    out = onnx.ModelProto.FromString(model.SerializeToString())
    fixed = {value.name for value in (*out.graph.input, *out.graph.output)}
    for k, node in enumerate(out.graph.node):
        node.name = f"node_{97 - k}"
        for names in (node.input, node.output):
            names[:] = [name if not name or name in fixed else f"z_{name[::-1]}" for name in names]
    for tensor in out.graph.initializer:
        tensor.name = f"z_{tensor.name[::-1]}"
    return out


def run(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]], *, optimize: bool = False) -> list[NDArray[Any]]:
    return list(Session(model, optimize=optimize).run(feeds).values())
