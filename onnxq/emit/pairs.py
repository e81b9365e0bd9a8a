"""One site after another written into a graph as nodes, scales and zero points.

activation:  tensor -> [Clip ->] QuantizeLinear -> [Clip ->] DequantizeLinear -> readers, with one of the Clips at most
footroom:    in front of a Relu or Clip -> QuantizeLinear -> Max -> DequantizeLinear -> readers behind it
dynamic:     tensor -> [Clip ->] DynamicQuantizeLinear -> DequantizeLinear -> readers
converted:   tensor -> its pair -> QuantizeLinear -> DequantizeLinear -> one reader, in another width
constant:    integers -> [Cast ->] DequantizeLinear -> readers
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx

from onnxq.arrays import Array, as_int64
from onnxq.calibrate.constants import dequantize_constant, find_tensor, quantize_constant
from onnxq.errors import PlanError
from onnxq.graph import TENSOR_TYPES, Editor, GraphIndex, ModelLike
from onnxq.graph.base import DEQUANTIZE, DYNAMIC, QUANTIZE
from onnxq.numerics import cast_scale, clip_bounds
from onnxq.plan import SitePlan, name_part
from onnxq.sites import Edge, NameSet, TensorId
from onnxq.spec import PerBlock, QParams

# Lowest and highest value, as numpy scalars of the type that is bounded.
Bounds = tuple[np.generic | float, np.generic | float]
# Names of a constant's integers, of its scale and of its zero point.
PairNames = tuple[str, str, str]

# Activations that only cut their values off.
_CLAMPS = ("Relu", "Clip")


class PairWriter:
    """Writes sites into an editor; `records` describes the nodes written so far, by name.

    in_integers: names of the nodes that read a quantized activation. apart: inputs that have a site of their own.
    tables: by group, the tables that share integers with a weight that is their transpose and is written before them.
    captured: weights of which several bodies of If, Loop or Scan read the same integers, stored where the weight was.
    whole: the target takes whole graphs, in which constants may be operands, and a second pair converts.
    bounds_integers: activations narrower than their bytes are cut off behind QuantizeLinear, not in front.
    fold_constants: constants that are not looked up are written as the floats that their integers stand for.
    """

    def __init__(
        self,
        editor: Editor[ModelLike],
        index: GraphIndex,
        in_integers: NameSet,
        apart: frozenset[Edge],
        tables: Mapping[str, SitePlan],
        captured: frozenset[TensorId] = frozenset(),
        *,
        whole: bool = False,
        bounds_integers: bool = False,
        fold_constants: bool = False,
    ) -> None:
        self.whole = whole
        self.bounds_integers = bounds_integers
        self.fold_constants = fold_constants
        self.editor = editor
        self.index = index
        self.in_integers = in_integers
        self.apart = apart
        self.tables = tables
        self.captured = captured
        # A model output keeps its name on the dequantized tensor; its float values get this one.
        self.renamed: dict[TensorId, str] = {}
        # Tensors that kernels write in integers, and the dequantized ones behind.
        self.dequantized: dict[TensorId, str] = {}
        # The dequantized tensor behind the pair of each tensor, whoever reads it.
        self.paired: dict[TensorId, str] = {}
        self.records: dict[str, Record] = {}
        # By group: the names of integers, scale and zero point that a table shares with its transpose.
        self.shared: dict[str, PairNames] = {}
        # The same of captured weights, by their numbers.
        self.outside: dict[Hashable, PairNames] = {}

    def connect_existing(self, site: SitePlan) -> None:
        """Let the site's consumers read a pair that the model came with. Those that read one already stay."""
        pair = self.index.find_node(site.dequantize)
        edges = [
            edge
            for edge in site.named_consumers
            if self.index.maker(self.index.find_node(edge.node), edge.index, DEQUANTIZE) is None
        ]
        result = pair.outputs[0]
        # Half a pair, in front of an operator on integers: float readers need the other half.
        if edges and pair.op_type == QUANTIZE:
            names = self._make_names(site, "dq_node", "dequantized")
            inputs = [result, *pair.inputs[1:]]
            result = names["dequantized"]
            self._insert_dequantize(site, pair.scope, inputs, names, after=pair.name)
        for edge in edges:
            self.editor.replace_input(edge, result)

    def write_activation(self, site: SitePlan, qparams: QParams | None) -> None:
        """Tensor -> a pair -> its readers. qparams: None for a site whose scale is computed at each run."""
        tensor = find_tensor(self.index, site.site)
        scope = site.site.scope
        names = self._make_names(site, "dq_node", "quantized", "dequantized")
        floats = self.renamed.get(tensor, tensor.name)
        whole = site.consumers is None
        source = floats
        if qparams is None:
            # A kernel writes integers only where nothing but a QuantizeLinear reads its floats.
            source = self.dequantized.get(tensor, floats)
        elif self.whole and isinstance(site.site, Edge) and scope == tensor.scope:
            # Another width than that of the tensor's own pair, whose integers are converted.
            source = self.paired.get(tensor, floats)
        if whole and self.index.is_output(tensor):
            source = floats = self.editor.fresh(name_part(site.site, "float"))
            self.editor.rename_tensor(tensor, source)
            self.renamed[tensor] = source
            names["dequantized"] = tensor.name
        producer = self.index.find_producer(tensor) if source == floats else None
        after = producer.name if producer is not None and producer.scope == scope else None
        before = site.consumers[0].node if after is None and site.consumers else None
        read = TensorId(floats, tensor.scope)
        edges = site.consumers
        if edges is None or (self.whole and isinstance(site.site, TensorId)):
            # An input with a site of its own, e.g. in a branch that captures the tensor, reads the float values.
            readers = self.editor.list_consumers(read) if edges is None else edges
            edges = tuple(edge for edge in readers if edge not in self.apart)
        if qparams is None:
            quantized, scale, zero, last = self._insert_dynamic(
                site, source, names["quantized"], before, after
            )
        else:
            scale, zero = self._add_qparams(site, qparams, scope)
            clamps = site.spec.footroom and producer is not None and producer.op_type in _CLAMPS
            inputs = [producer.inputs[0] if producer and clamps else source, scale, zero]
            quantized, last = self._insert_quantize(
                site, qparams, inputs, names["quantized"], before, after
            )
            if clamps:
                # A Max of the integers and their zero point.
                read_by = [quantized, zero]
                node, quantized = self._make_names(site, "floor_node", "clipped").values()
                self._insert_node(site, scope, "Max", read_by, [quantized], node, after=last)
                last = node
        self._insert_dequantize(site, scope, [quantized, scale, zero], names, after=last)
        self.editor.rewire(read, names["dequantized"], consumers=edges, outputs=whole)
        if whole:
            self.dequantized[tensor] = names["dequantized"]
        if isinstance(site.site, TensorId):
            self.paired[tensor] = names["dequantized"]

    def _insert_dynamic(
        self, site: SitePlan, source: str, result: str, before: str | None, after: str | None
    ) -> tuple[str, str, str, str]:
        """[Clip ->] DynamicQuantizeLinear; returns the names of its three results and of the last node."""
        low, high = site.clip
        if low is not None or high is not None:
            ends = (
                np.float32(-np.inf if low is None else low),
                np.float32(np.inf if high is None else high),
            )
            source, after = self.insert_clip(site, source, ends, before=before, after=after)
            before = None
        names = self._make_names(site, "dynamic_node", "scale", "zero_point")
        name = names["dynamic_node"]
        results = (result, names["scale"], names["zero_point"])
        self._insert_node(
            site, site.site.scope, DYNAMIC, [source], results, name, before=before, after=after
        )
        return (*results, name)

    def _insert_quantize(
        self,
        site: SitePlan,
        qparams: QParams,
        inputs: list[str],
        result: str,
        before: str | None,
        after: str | None,
    ) -> tuple[str, str]:
        """[Clip ->] QuantizeLinear [-> Clip]; returns the names of the quantized tensor and of the last node.

        inputs: the float tensor, the scale and the zero point. result: of the QuantizeLinear.
        """
        spec = site.spec
        name = self._make_names(site, "q_node")["q_node"]
        kind = np.dtype(spec.code_type)
        # A Clip has one pair of bounds, and only the quantized values of all channels share one.
        behind = (self.bounds_integers and kind.itemsize == 1) or not spec.has_one_scale
        if spec.is_narrow and not behind:
            bounds = clip_bounds(qparams, spec, self._find_float_type(site))
            inputs[0], after = self.insert_clip(site, inputs[0], bounds, before=before, after=after)
            before = None
        scope = site.site.scope
        attrs = spec.granularity.attributes
        self._insert_node(
            site, scope, QUANTIZE, inputs, [result], name, attrs=attrs, before=before, after=after
        )
        if not (spec.is_narrow and behind):
            return result, name
        return self.insert_clip(
            site, result, (kind.type(spec.qmin), kind.type(spec.qmax)), after=name
        )

    def insert_clip(
        self,
        site: SitePlan,
        source: str,
        bounds: Bounds,
        *,
        before: str | None = None,
        after: str | None = None,
    ) -> tuple[str, str]:
        """A Clip on `source`, to bounds of its type; returns the names of its result and its node."""
        scope = site.site.scope
        names = self._make_names(site, "clip_node", "clipped", "clip_min", "clip_max")
        node, result, *ends = names.values()
        for name, bound in zip(ends, bounds, strict=True):
            self.editor.add_initializer(scope, name, np.asarray(bound))
        self._insert_node(
            site, scope, "Clip", [source, *ends], [result], node, before=before, after=after
        )
        return result, node

    def is_constant(self, site: SitePlan) -> bool:
        """True for a constant that an operator reads as it reads activations: one of the operands of an Add."""
        return self.index.is_constant(find_tensor(self.index, site.site))

    def write_constant(self, site: SitePlan, qparams: QParams) -> None:
        """Integer initializer -> DequantizeLinear -> its readers."""
        value = self.index.find_constant(find_tensor(self.index, site.site))
        if value is None:
            raise PlanError(
                site.name,
                "is not a constant in this model",
                "plan this model again",
                code="Q404",
            )
        lookups = site.find_lookups(self.index)
        # A table of float16 has float32 scales: those of small rows are no normal numbers in float16.
        value = value.astype(np.float32) if lookups else value
        whole = [edge for edge in site.named_consumers if edge not in lookups]
        if self.fold_constants and not lookups:
            (name,) = self._make_names(site, "dequantized").values()
            self.editor.add_initializer(site.site.scope, name, dequantize_constant(site, value))
            for edge in whole:
                self.editor.replace_input(edge, name)
            return
        shared = self.shared.get(site.group) if lookups and site.group else None
        stored, scale, zero = shared or self._store_constant(site, qparams, value, whole)
        for edge in lookups:
            self._write_lookup(site, edge, stored, scale)
        if not whole:
            return
        names = self._make_names(site, "dq_node", "dequantized")
        inputs = [stored, scale, zero] if zero else [stored, scale]
        before = self._find_first(whole)
        self._insert_dequantize(site, site.site.scope, inputs, names, before=before)
        for edge in whole:
            self.editor.replace_input(edge, names["dequantized"])

    def _find_first(self, edges: Iterable[Edge]) -> str:
        """The node that runs first of these."""
        return min(
            (self.index.find_node(edge.node) for edge in edges), key=lambda node: node.order
        ).name

    def _store_constant(
        self, site: SitePlan, qparams: QParams, value: Array, whole: Sequence[Edge]
    ) -> PairNames:
        """Names of a constant's integers, in its own layout, scale and zero point. whole: all readers but lookups."""
        scope = site.site.scope
        storage = site.spec.storage
        table = self.tables.get(site.group)
        codes = quantize_constant(site, qparams, value)
        tensor = find_tensor(self.index, site.site)
        first = self._find_first(whole) if whole else ""
        # MatMulNBits, which weights alone become, does not form over integers of another graph: ORT refuses the file.
        if tensor in self.captured and site.spec.storage_bits == 8 and first in self.in_integers:
            return self._store_outside(site, qparams, codes, tensor)
        name = self._make_names(site, "quantized")["quantized"]
        # Kernels that multiply integers take bytes; in weight-only graphs the 4-bit DequantizeLinear is the kernel.
        if site.spec.storage_bits < 8 and first in self.in_integers:
            storage = self._insert_cast(site, codes, name, first)
        elif table is not None and table is not site:
            # One copy in the file, as rows; engines compute the Transpose of a constant once, when they load the file.
            rows = self._make_names(table, "quantized")["quantized"]
            node = self._make_names(site, "transpose_node")["transpose_node"]
            self.editor.add_initializer(
                scope, rows, np.ascontiguousarray(codes.T), dtype=TENSOR_TYPES[storage]
            )
            self._insert_node(
                site, scope, "Transpose", [rows], [name], node, attrs={"perm": [1, 0]}, before=first
            )
            scale, zero = self._add_qparams(site, qparams, scope, storage)
            self.shared[site.group] = rows, scale, zero
            return name, scale, zero
        else:
            self.editor.add_initializer(scope, name, codes, dtype=TENSOR_TYPES[storage])
        names = (name, *self._add_qparams(site, qparams, scope, storage))
        if site.group:
            self.shared[site.group] = names
        return names

    def _store_outside(
        self, site: SitePlan, qparams: QParams, codes: Array, tensor: TensorId
    ) -> PairNames:
        """Names of the integers, scale and zero point of a captured weight, stored once for equal numbers."""
        arrays = (np.asarray(qparams.scale), np.asarray(qparams.zero_point), codes)
        key = (tensor, site.spec, *(hashlib.sha256(array.tobytes()).digest() for array in arrays))
        if key not in self.outside:
            own = replace(site, site=tensor)
            name = self._make_names(own, "quantized")["quantized"]
            self.editor.add_initializer(
                tensor.scope, name, codes, dtype=TENSOR_TYPES[site.spec.storage]
            )
            self.outside[key] = (name, *self._add_qparams(own, qparams, tensor.scope))
        return self.outside[key]

    def _write_lookup(self, site: SitePlan, edge: Edge, quantized: str, scale: str) -> None:
        """Let a Gather read the stored integers, and dequantize the rows that it gathers, in float32."""
        editor = self.editor
        node = self.index.find_node(edge.node)
        scope = edge.scope
        grain = site.spec.granularity
        editor.replace_input(edge, quantized)
        name = partial(name_part, edge)
        dtype = self.index.find_dtype(find_tensor(self.index, site.site))
        narrow = dtype != onnx.TensorProto.FLOAT
        result = node.outputs[0]
        row = name("float") if narrow else result
        chain: list[tuple[str, list[str], str, str, dict[str, int]]] = []
        if isinstance(grain, PerBlock):
            editor.set_op(node.name, "GatherBlockQuantized", "com.microsoft")
            editor.replace_input(node.make_edge(2), scale)
            blocks = {"axis": None, "gather_axis": 0, "quantize_axis": 1, "block_size": grain.size}
            for key, value in blocks.items():
                editor.set_attr(node.name, key, value)
            self._add_record(site, node.name)
            if narrow:
                editor.replace_output(node.name, 0, row)
        else:
            codes = name("quantized")
            column = name("column")
            axis = name("last_axis")
            editor.replace_output(node.name, 0, codes)
            editor.add_initializer(scope, axis, as_int64([-1]))
            # No DequantizeLinear: blocks with computed scales need opset 21, and are several times slower.
            chain = [
                ("Gather", [scale, node.inputs[1]], name("row_scale"), "row_scale_node", {}),
                ("Unsqueeze", [name("row_scale"), axis], column, "column_node", {}),
                ("Cast", [codes], name("row"), "cast_node", {"to": onnx.TensorProto.FLOAT}),
                ("Mul", [name("row"), column], row, "row_node", {}),
            ]
        if narrow:
            chain.append(("Cast", [row], result, "float_node", {"to": dtype}))
        for op_type, inputs, output, part, attrs in chain:
            self._insert_node(site, scope, op_type, inputs, [output], name(part), attrs=attrs)

    def _insert_cast(self, site: SitePlan, codes: Array, name: str, reader: str) -> str:
        """A Cast from 4 bits in the file to a byte in the graph; returns the storage it casts to."""
        # Engines compute the Cast of a constant once, when they load the file.
        scope = site.site.scope
        wide = site.spec.numpy_storage
        packed, node = self._make_names(site, "packed", "cast_node").values()
        self.editor.add_initializer(scope, packed, codes, dtype=TENSOR_TYPES[site.spec.storage])
        self._insert_node(
            site,
            scope,
            "Cast",
            [packed],
            [name],
            node,
            attrs={"to": TENSOR_TYPES[wide]},
            before=reader,
        )
        return wide

    def _add_qparams(
        self, site: SitePlan, qparams: QParams, scope: str, storage: str = ""
    ) -> tuple[str, str]:
        """Names of the scale and the zero point, written beside the site.

        "" for a zero point that nothing reads: of a bias, and of blocks around 0, where it would be a value a block.
        """
        names = self._make_names(site, "scale", "zero_point")
        spec = site.spec
        scale = cast_scale(qparams, self._find_float_type(site), signed=spec.has_blocks)
        self.editor.add_initializer(scope, names["scale"], scale)
        zero = np.asarray(qparams.zero_point, spec.code_type)
        if site.role.is_bias or (spec.has_blocks and spec.symmetric and not zero.any()):
            return names["scale"], ""
        self.editor.add_initializer(
            scope, names["zero_point"], zero, dtype=TENSOR_TYPES[storage or spec.storage]
        )
        return names["scale"], names["zero_point"]

    def _find_float_type(self, site: SitePlan) -> type[np.floating]:
        """The type of the site's scale: float16 for a float16 tensor."""
        # DequantizeLinear returns the type of its scale, which so must be the tensor's.
        half = self.index.find_dtype(find_tensor(self.index, site.site)) == onnx.TensorProto.FLOAT16
        return np.float16 if half and not site.find_lookups(self.index) else np.float32

    def _make_names(self, site: SitePlan, *parts: str) -> dict[str, str]:
        return {part: self.editor.fresh(name_part(site.site, part)) for part in parts}

    def _insert_dequantize(
        self,
        site: SitePlan,
        scope: str,
        inputs: Sequence[str],
        names: Mapping[str, str],
        **more: Any,
    ) -> None:
        """The second node of a pair. names: of the node and its result. more: as of `_insert_node`."""
        results = [names["dequantized"]]
        attrs = site.spec.granularity.attributes
        self._insert_node(
            site, scope, DEQUANTIZE, inputs, results, names["dq_node"], attrs=attrs, **more
        )

    def _insert_node(
        self,
        site: SitePlan,
        scope: str,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
        **more: Any,
    ) -> None:
        """A node of a site's pair, with the record of the site. more: as of `Editor.insert_node`."""
        metadata = self._add_record(site, name)
        self.editor.insert_node(
            scope, op_type, inputs, outputs, name=name, metadata=metadata, **more
        )

    def _add_record(self, site: SitePlan, node: str) -> dict[str, str]:
        """Note the site for a node; returns the metadata that the node carries."""
        # As a viewer shows it beside the node, and as `annotate` reads it back.
        record: Record = {
            "site": site.name,
            "bits": site.spec.bits,
            "scheme": site.spec.scheme,
            "granularity": site.spec.granularity.word,
            "role": str(site.role),
            "rule": site.rule,
        }
        self.records[node] = record
        return {f"onnxq.{key}": str(value) for key, value in record.items()}


Record = dict[str, str | int]
