"""Networks put together from motifs: small graphs that take one tensor and give one, so that any may follow any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.motifs.forms import write_form
from tests.networks import RECENT_ORT

SAMPLES = 6
CHANNELS, SIDE, LENGTH = 8, 8, 6
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
MAP, TOKENS = 3, 2
# The oldest opset that ONNX Runtime promises to run; the newest that onnx writes, or with pairs in ONNX Runtime 1.23.
OLDEST, NEWEST = 7, 28 if RECENT_ORT else 22
# From this intermediate representation on, weights are no inputs besides.
_IR_OF_WEIGHTS = 4


@dataclass(frozen=True)
class Value:
    """A float tensor. shape: without the batch axis, which is the first: (C, H, W) of a map, (T, D) of tokens."""

    name: str
    shape: tuple[int, ...]


Input = Value | str | np.ndarray


@dataclass(frozen=True)
class Motif:
    """build: appends the motif behind a tensor of `rank` axes besides the batch axis. since, until: opsets.

    runs: the newest opset at which ONNX Runtime runs it, 0 where it has no kernel for a type in it.
    """

    build: Callable[[Net, Value], Value]
    rank: int
    since: int = OLDEST
    until: int = NEWEST
    runs: int = NEWEST

    @property
    def name(self) -> str:
        """The builder's."""
        return self.build.__name__


def ints(*values: int) -> np.ndarray:
    """int64, as shapes, axes and indices are."""
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    """float32."""
    return np.array(values, np.float32)


def named(name: str, build: Callable[..., Value], *more: object, **attributes: object) -> Callable[[Net, Value], Value]:
    """One form of a motif, under a name of its own. more, attributes: what the builder is given besides."""

    def build_form(net: Net, x: Value) -> Value:
        return build(net, x, *more, **attributes)

    build_form.__name__ = name
    return build_form


class Net:
    """A graph in the making, and what its inputs are fed with. runnable: in types that ONNX Runtime has kernels for."""

    def __init__(self, seed: int, opset: int, *, runnable: bool = False) -> None:
        self.runnable = runnable
        self.rng = np.random.default_rng(seed)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.samples: list[dict[str, np.ndarray]] = [{} for _ in range(SAMPLES)]
        self.domains: set[str] = {""}
        self._count = 0

    def new(self, stem: str) -> str:
        """A name that no tensor has."""
        self._count += 1
        return f"{stem}_{self._count}"

    def op(self, kind: str, *inputs: Input, domain: str = "", **attributes: object) -> str:
        """Append a node with one output. Arrays become initializers, "" is an input left out."""
        return self.ops(kind, 1, *inputs, domain=domain, **attributes)[0]

    def ops(self, kind: str, count: int, *inputs: Input, domain: str = "", **attributes: object) -> list[str]:
        """Append a node with `count` outputs."""
        if not domain:
            kind, inputs, attributes = write_form(self.opset, kind, inputs, attributes)
        names = [self.name(value) for value in inputs]
        outputs = [self.new(kind.lower()) for _ in range(count)]
        self.domains.add(domain)
        self.nodes.append(helper.make_node(kind, names, outputs, self.new(kind), domain=domain, **attributes))
        return outputs

    def name(self, value: Input) -> str:
        """The name of an input; an array is stored first."""
        if isinstance(value, Value):
            return value.name
        if isinstance(value, str):
            return value
        name = self.new("const")
        self.initializers.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def weight(self, *shape: int, fan: int = 0) -> np.ndarray:
        """Values of about unit gain. fan: of how many a sum is made; 0: of all but the first axis, as in Conv."""
        size = fan or int(np.prod(shape[1:])) or 1
        return (self.rng.standard_normal(shape) * np.sqrt(1.5 / size)).astype(np.float32)

    def around(self, size: int, center: float = 0.0) -> np.ndarray:
        """Values for biases, around 0, and scales, around 1."""
        return (center + self.rng.standard_normal(size) * 0.2).astype(np.float32)

    def conv(self, x: Value, channels: int, side: int = 1, **attributes: object) -> Value:
        """A convolution that keeps height and width."""
        weight = self.weight(channels, x.shape[0], side, side)
        pads = [side // 2] * 4
        name = self.op("Conv", x, weight, self.around(channels), pads=pads, **attributes)
        return Value(name, (channels, *x.shape[1:]))

    def linear(self, x: Value, width: int) -> Value:
        """A MatMul with a stored weight."""
        name = self.op("MatMul", x, self.weight(x.shape[-1], width, fan=x.shape[-1]))
        return Value(name, (*x.shape[:-1], width))

    def reduce(self, kind: str, x: Input, *axes: int, keepdims: int = 1) -> str:
        """A reduction."""
        return self.op(kind, x, ints(*axes), keepdims=keepdims)

    def dims(self, x: Input, start: int, end: int) -> str:
        """Shape(x)[start:end]."""
        return self.op("Slice", self.op("Shape", x), ints(start), ints(end))

    def feed(self, kind: int, dims: Sequence[int | str], make: Callable[[np.random.Generator], np.ndarray]) -> str:
        """Declare an input. make: the array of one sample."""
        name = self.new("input")
        self.inputs.append(helper.make_tensor_value_info(name, kind, dims))
        for sample in self.samples:
            sample[name] = make(self.rng)
        return name

    def give(self, name: str, kind: int = FLOAT, dims: Sequence[int | str] | None = None) -> None:
        """Declare an output. dims: those that are inferred, if left out."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, dims))

    def body(
        self, build: Callable[[Net], Sequence[tuple[str, int]]], inputs: Sequence[tuple[str, int]] = ()
    ) -> onnx.GraphProto:
        """The body of If, Loop or Scan. build: appends its nodes, gives its outputs with their types."""
        outer, self.nodes = self.nodes, []
        outputs = build(self)
        nodes, self.nodes = self.nodes, outer
        # Counters and conditions have no axes, which ONNX Runtime wants to know; states may have any.
        infos = [
            [helper.make_tensor_value_info(name, kind, None if kind == FLOAT else []) for name, kind in row]
            for row in (inputs, outputs)
        ]
        return helper.make_graph(nodes, self.new("body"), *infos)

    def close(self) -> onnx.ModelProto:
        """The model."""
        opsets = [helper.make_opsetid(domain, 1 if domain else self.opset) for domain in sorted(self.domains)]
        version = helper.find_min_ir_version_for([opset for opset in opsets if not opset.domain])
        weights = self.initializers if version < _IR_OF_WEIGHTS else ()
        inputs = [*self.inputs, *(helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in weights)]
        graph = helper.make_graph(self.nodes, "net", inputs, self.outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version)
        # Inference names dims that it does not know, and the names of one pass stand for nothing in the next.
        for known, output in zip(
            onnx.shape_inference.infer_shapes(model).graph.output, model.graph.output, strict=True
        ):
            output.CopyFrom(known)
            for dim in output.type.tensor_type.shape.dim:
                if dim.dim_param.startswith("unk__"):
                    dim.Clear()
        return model


def as_rank(net: Net, x: Value, rank: int) -> Value:
    """Tokens of a map's pixels, or a map whose pixels are tokens."""
    if len(x.shape) == rank:
        return x
    if rank == TOKENS:
        channels, height, width = x.shape
        flat = net.op("Reshape", x, ints(0, channels, height * width))
        return Value(net.op("Transpose", flat, perm=[0, 2, 1]), (height * width, channels))
    length, channels = x.shape
    height = next(side for side in (8, 4, 2, 1) if length % side == 0)
    flat = net.op("Transpose", x, perm=[0, 2, 1])
    shape = (channels, height, length // height)
    return Value(net.op("Reshape", flat, ints(0, *shape)), shape)


def compose(
    motifs: Sequence[Motif], opset: int, seed: int = 0, *, runnable: bool = False
) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """A network of the motifs between products, and samples of its inputs.

    runnable: the same function as ONNX Runtime can run it, at an older opset or in other types.
    """
    if runnable:
        opset = min(opset, *(motif.runs or NEWEST for motif in motifs))
    net = Net(seed, opset, runnable=runnable)
    if motifs[0].rank == MAP:
        name = net.feed(FLOAT, ["N", 3, SIDE, SIDE], lambda rng: rng.standard_normal((1, 3, SIDE, SIDE)).astype("f4"))
        x = net.conv(Value(name, (3, SIDE, SIDE)), CHANNELS, 3)
    else:
        name = net.feed(FLOAT, ["N", LENGTH, 4], lambda rng: rng.standard_normal((1, LENGTH, 4)).astype("f4"))
        x = net.linear(Value(name, (LENGTH, 4)), CHANNELS)
    for motif in motifs:
        x = as_rank(net, motif.build(net, as_rank(net, x, motif.rank)), MAP)
        x = Value(net.op("Relu", net.conv(x, CHANNELS)), (CHANNELS, *x.shape[1:]))
    y = net.conv(x, 4)
    net.give(y.name, FLOAT, ["N", *y.shape])
    return net.close(), net.samples
