"""Parts of a model with one output, and the arrays to feed them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from onnx import ValueInfoProto, helper

from onnxq.engines.diff.levels import Array
from onnxq.graph import GraphIndex, ModelLike
from onnxq.graph.subgraph import Cutter, declare_input
from onnxq.sites import TensorId


class Parts(Cutter[ModelLike]):
    """Cuts parts out of one model. `values` gives the arrays that cross a cut, by tensor name."""

    def __init__(self, index: GraphIndex, values: Callable[[Iterable[str]], dict[str, Array]]) -> None:
        super().__init__(index.model)
        self._index, self._values = index, values

    def cut_fed(self, names: Collection[str], output: str) -> tuple[ModelLike, dict[str, Array]]:
        """The nodes as a model with one output, and the arrays to feed it."""
        crossing = self.list_inputs(names)
        arrays = self._values([*crossing, output])
        inputs = [self._declare(name, arrays[name]) for name in crossing]
        model = self.cut(names, inputs, [self._declare(output, arrays[output])])
        return model, {name: arrays[name] for name in crossing}

    def _declare(self, name: str, array: Array) -> ValueInfoProto:
        """Declared as in the model where it says so, as fusions look at shapes; vectors, perhaps of sizes, as fed."""
        dtype, shape = self._index.dtype(TensorId(name)), self._index.shape(TensorId(name))
        if not dtype or shape is None or len(shape) != array.ndim or len(shape) == 1:
            return declare_input(name, [array], dtype)
        return helper.make_tensor_value_info(name, dtype, list(shape))
