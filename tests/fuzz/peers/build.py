"""Models as other tools' test suites have them: a graph in ONNX's text form, shapes of weights, kinds of samples."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper, parser

Feeds = dict[str, np.ndarray]
# Samples beside the number that the suite itself uses.
MORE = 8
_DEFAULT_SIZE = 2


@dataclass(frozen=True)
class Peer:
    """A model of a suite.

    text: inputs, outputs and nodes. weights: shapes of random values, or values. sizes: of symbolic dimensions.
    counts: of samples. trits: weights and samples of -1, 0 and 1. feeds: inputs that are not just random numbers.
    alter: what the text form cannot say.
    """

    text: str
    weights: Mapping[str, tuple[int, ...] | np.ndarray] = field(default_factory=dict)
    opset: int = 13
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: tuple[int, ...] = (1, MORE)
    trits: bool = False
    kind: type = np.float32
    imports: Mapping[str, int] = field(default_factory=dict)
    feeds: Mapping[str, Callable[[np.random.Generator], np.ndarray]] = field(default_factory=dict)
    alter: Callable[[onnx.ModelProto], None] | None = None

    def make(self, name: str) -> tuple[onnx.ModelProto, list[Feeds]]:
        """The model, and as many samples as the largest count says; the same for a name at each call."""
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        domains = {"": self.opset, **self.imports}
        imports = ", ".join(f'"{domain}" : {version}' for domain, version in domains.items())
        ir = helper.find_min_ir_version_for([helper.make_opsetid("", self.opset)])
        model = parser.parse_model(f"<ir_version: {ir}, opset_import: [{imports}]> g {self.text}")
        for key, value in self.weights.items():
            array = value if isinstance(value, np.ndarray) else self._draw(rng, value, 0.3).astype(self.kind)
            model.graph.initializer.append(numpy_helper.from_array(array, key))
        stored = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in stored]
        samples = [{value.name: self._feed(rng, value) for value in inputs} for _ in range(max(self.counts))]
        if self.alter is not None:
            self.alter(model)
        return model, samples

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...], spread: float) -> np.ndarray:
        return rng.integers(-1, 2, shape) if self.trits else rng.normal(0, spread, shape)

    def _feed(self, rng: np.random.Generator, value: onnx.ValueInfoProto) -> np.ndarray:
        if value.name in self.feeds:
            return self.feeds[value.name](rng)
        dims = value.type.tensor_type.shape.dim
        shape = tuple(dim.dim_value or self.sizes.get(dim.dim_param, _DEFAULT_SIZE) for dim in dims)
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if kind.kind == "f":
            return np.asarray(self._draw(rng, shape, 1.0)).astype(kind)
        return rng.integers(0, 2, shape).astype(kind)


def forget_imports(model: onnx.ModelProto) -> None:
    """Leave only the default domain's opset: ONNX Runtime knows its own operators without being told."""
    kept = [entry for entry in model.opset_import if not entry.domain]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def name_like_keras(model: onnx.ModelProto) -> None:
    """Give tensors and nodes names with slashes and colons, as exports of TensorFlow have them."""
    names = {value.name for value in model.graph.input}
    for k, node in enumerate(model.graph.node):
        node.name = f"net/{node.op_type.lower()}_{k}/{node.op_type}"
        for row in (node.input, node.output):
            row[:] = [name if name in names or not name else f"net/{name}:0" for name in row]
    for value in (*model.graph.output, *model.graph.initializer):
        value.name = f"net/{value.name}:0"


def reverse_nodes(model: onnx.ModelProto) -> None:
    """Put the last node first."""
    nodes = [*model.graph.node][::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def declare_weights(model: onnx.ModelProto) -> None:
    """Declare weights as inputs too, as old exporters do."""
    for tensor in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def negate_dims(model: onnx.ModelProto) -> None:
    """Write -1 for dimensions that have a name."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = -1


def forget_shapes(model: onnx.ModelProto) -> None:
    """Say nothing of the outputs' shapes."""
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def fill(shape: tuple[int, ...], value: float) -> np.ndarray:
    """float32 of one value."""
    return np.full(shape, value, np.float32)


def count(*shape: int) -> np.ndarray:
    """float32 that counts up from 0 by tenths."""
    return (np.arange(np.prod(shape)) / 10).reshape(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    """int64, as shapes and axes are."""
    return np.array(values, np.int64)


def scalar(value: float, kind: type = np.float32) -> np.ndarray:
    """An array without axes."""
    return np.array(value, kind)


def steps(*shape: int, kind: type = np.int8) -> np.ndarray:
    """Quantized values that differ."""
    return (np.arange(np.prod(shape)).reshape(shape) * 37 % 255 - (127 if kind is np.int8 else 0)).astype(kind)
