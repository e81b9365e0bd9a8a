"""One site after another written into a graph as nodes, scales and zero points.

activation:  tensor -> [Clip ->] QuantizeLinear -> [Clip ->] DequantizeLinear -> readers, with one of the Clips at most
footroom:    in front of a Relu or Clip -> QuantizeLinear -> Max -> DequantizeLinear -> readers behind it
dynamic:     tensor -> [Clip ->] DynamicQuantizeLinear -> DequantizeLinear -> readers
converted:   tensor -> its pair -> QuantizeLinear -> DequantizeLinear -> one reader, in another width
constant:    integers -> [Cast ->] DequantizeLinear -> readers
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike

from onnxq.arrays import Array, as_float32, as_int64, hash_parts, view_content
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
# The node that a new one is to stand in front of, or behind: `before` or `after` of `Editor.insert_node`.
Place = Mapping[str, str]

# What is noted of a site, by key.
Record = dict[str, str | int]

# Activations that only cut their values off.
_CLAMPS = ("Relu", "Clip")


@dataclass(eq=False)
class PairWriter:
    """Writes sites into an editor; `records` describes the nodes written so far, by name.

    in_integers: names of the nodes that read a quantized activation. apart: inputs that have a site of their own.
    tables: by group, the tables that share integers with a weight that is their transpose and is written before them.
    captured: weights of which several bodies of If, Loop or Scan read the same integers, stored where the weight was.
    whole: the target takes whole graphs, in which constants may be operands, and a second pair converts.
    bounds_integers: activations narrower than their bytes are cut off behind QuantizeLinear, not in front.
    fold_constants: constants that are not looked up are written as the floats that their integers stand for.
    """

    editor: Editor[ModelLike]
    index: GraphIndex
    in_integers: NameSet
    apart: frozenset[Edge]
    tables: Mapping[str, SitePlan]
    captured: frozenset[TensorId] = frozenset()
    whole: bool = False
    bounds_integers: bool = False
    fold_constants: bool = False
    # A model output keeps its name on the dequantized tensor; its float values get this one.
    renamed: dict[TensorId, str] = field(default_factory=dict)
    # Tensors that kernels write in integers, and the dequantized ones behind.
    dequantized: dict[TensorId, str] = field(default_factory=dict)
    # The dequantized tensor behind the pair of each tensor, whoever reads it.
    paired: dict[TensorId, str] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    # By group: the names of integers, scale and zero point that a table shares with its transpose.
    shared: dict[str, PairNames] = field(default_factory=dict)
    # The same of captured weights, by their numbers.
    outside: dict[Hashable, PairNames] = field(default_factory=dict)

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
            inputs = [result, *pair.inputs[1:]]
            result = self._insert_dequantize(site, inputs, scope=pair.scope, after=pair.name)
        for edge in edges:
            self.editor.replace_input(edge, result)

    def write_activation(self, site: SitePlan, qparams: QParams | None) -> None:
        """Tensor -> a pair -> its readers. qparams: None for a site whose scale is computed at each run."""
        where = site.site
        tensor = find_tensor(self.index, where)
        scope = where.scope
        floats = self.renamed.get(tensor, tensor.name)
        whole = site.consumers is None
        source = floats
        result = ""
        if qparams is None:
            # A kernel writes integers only where nothing but a QuantizeLinear reads its floats.
            source = self.dequantized.get(tensor, floats)
        elif self.whole and isinstance(where, Edge) and scope == tensor.scope:
            # Another width than that of the tensor's own pair, whose integers are converted.
            source = self.paired.get(tensor, floats)
        if whole and self.index.is_output(tensor):
            source = floats = self.editor.fresh(name_part(where, "float"))
            self.editor.rename_tensor(tensor, source)
            self.renamed[tensor] = source
            result = tensor.name
        producer = self.index.find_producer(tensor) if source == floats else None
        place = {"before": site.consumers[0].node} if site.consumers else {}
        if producer is not None and producer.scope == scope:
            place = {"after": producer.name}
        read = TensorId(floats, tensor.scope)
        edges = site.consumers
        if edges is None or (self.whole and isinstance(where, TensorId)):
            # An input with a site of its own, e.g. in a branch that captures the tensor, reads the float values.
            readers = self.editor.list_consumers(read) if edges is None else edges
            edges = tuple(edge for edge in readers if edge not in self.apart)
        if qparams is None:
            quantized, scale, zero, last = self._insert_dynamic(site, source, place)
        else:
            scale, zero = self._add_qparams(site, qparams)
            clamps = site.spec.footroom and producer is not None and producer.op_type in _CLAMPS
            inputs = [producer.inputs[0] if producer and clamps else source, scale, zero]
            quantized, last = self._insert_quantize(site, qparams, inputs, place)
            if clamps:
                # A Max of the integers and their zero point.
                read_by = [quantized, zero]
                node, quantized = self._make_names(site, "floor_node", "clipped")
                self._insert_node(site, "Max", read_by, [quantized], node, after=last)
                last = node
        result = self._insert_dequantize(site, [quantized, scale, zero], result, after=last)
        self.editor.rewire(read, result, consumers=edges, outputs=whole)
        if whole:
            self.dequantized[tensor] = result
        if isinstance(where, TensorId):
            self.paired[tensor] = result

    def _insert_dynamic(self, site: SitePlan, source: str, place: Place) -> list[str]:
        """[Clip ->] DynamicQuantizeLinear; returns the names of its three results and of the last node."""
        if site.clip != (None, None):
            low, high = site.clip
            ends = (
                np.float32(-np.inf if low is None else low),
                np.float32(np.inf if high is None else high),
            )
            source, clip = self.insert_clip(site, source, ends, **place)
            place = {"after": clip}
        parts = ("quantized", "scale", "zero_point", "dynamic_node")
        *results, name = names = self._make_names(site, *parts)
        self._insert_node(site, DYNAMIC, [source], results, name, **place)
        return names

    def _insert_quantize(
        self, site: SitePlan, qparams: QParams, inputs: list[str], place: Place
    ) -> tuple[str, str]:
        """[Clip ->] QuantizeLinear [-> Clip]; returns the names of the quantized tensor and of the last node.

        inputs: the float tensor, the scale and the zero point.
        """
        spec = site.spec
        name, result = self._make_names(site, "q_node", "quantized")
        kind = np.dtype(spec.code_type)
        # A Clip has one pair of bounds, and only the quantized values of all channels share one.
        behind = (self.bounds_integers and kind.itemsize == 1) or not spec.has_one_scale
        if spec.is_narrow and not behind:
            bounds = clip_bounds(qparams, spec, self._find_float_type(site))
            inputs[0], clip = self.insert_clip(site, inputs[0], bounds, **place)
            place = {"after": clip}
        self._insert_node(
            site, QUANTIZE, inputs, [result], name, attrs=spec.granularity.attributes, **place
        )
        if not (spec.is_narrow and behind):
            return result, name
        ends = (kind.type(spec.qmin), kind.type(spec.qmax))
        return self.insert_clip(site, result, ends, after=name)

    def insert_clip(
        self, site: SitePlan, source: str, bounds: Bounds, **place: str
    ) -> tuple[str, str]:
        """A Clip on `source`, to bounds of its type; returns the names of its result and its node.

        place: as of `Editor.insert_node`.
        """
        node, result = self._make_names(site, "clip_node", "clipped")
        ends = map(partial(self._add_part, site), ("clip_min", "clip_max"), bounds)
        self._insert_node(site, "Clip", [source, *ends], [result], node, **place)
        return result, node

    def is_constant(self, site: SitePlan) -> bool:
        """True for a constant that an operator reads as it reads activations: one of the operands of an Add."""
        return self.index.is_constant(find_tensor(self.index, site.site))

    def write_constant(self, site: SitePlan, qparams: QParams) -> None:
        """Integer initializer -> DequantizeLinear -> its readers."""
        value = self.index.find_constant(find_tensor(self.index, site.site))
        if value is None:
            cause = "is not a constant in this model"
            raise PlanError(site.name, cause, "plan this model again", code="Q404")
        lookups = site.find_lookups(self.index)
        # A table of float16 has float32 scales: those of small rows are no normal numbers in float16.
        value = as_float32(value) if lookups else value
        whole = [edge for edge in site.named_consumers if edge not in lookups]
        if self.fold_constants and not lookups:
            result = self._add_part(site, "dequantized", dequantize_constant(site, value))
        else:
            shared = self.shared.get(site.group) if lookups and site.group else None
            stored, scale, zero = shared or self._store_constant(site, qparams, value, whole)
            for edge in lookups:
                self._write_lookup(site, edge, stored, scale)
            if not whole:
                return
            inputs = [stored, scale, zero] if zero else [stored, scale]
            result = self._insert_dequantize(site, inputs, before=self._find_first(whole))
        for edge in whole:
            self.editor.replace_input(edge, result)

    def _find_first(self, edges: Iterable[Edge]) -> str:
        """The node that runs first of these."""
        return min(
            (self.index.find_node(edge.node) for edge in edges), key=lambda node: node.order
        ).name

    def _store_constant(
        self, site: SitePlan, qparams: QParams, value: Array, whole: Sequence[Edge]
    ) -> PairNames:
        """Names of a constant's integers, in its own layout, scale and zero point. whole: all readers but lookups."""
        storage = site.spec.storage
        table = self.tables.get(site.group)
        codes = quantize_constant(site, qparams, value)
        tensor = find_tensor(self.index, site.site)
        first = self._find_first(whole) if whole else ""
        # MatMulNBits, which weights alone become, does not form over integers of another graph: ORT refuses the file.
        if tensor in self.captured and site.spec.storage_bits == 8 and first in self.in_integers:
            return self._store_outside(site, qparams, codes, tensor)
        # Kernels that multiply integers take bytes; in weight-only graphs the 4-bit DequantizeLinear is the kernel.
        if site.spec.storage_bits < 8 and first in self.in_integers:
            # Engines compute the Cast of a constant once, when they load the file.
            packed = self._add_part(site, "packed", codes, storage)
            storage = site.spec.numpy_storage
            node, name = self._make_names(site, "cast_node", "quantized")
            kind = {"to": TENSOR_TYPES[storage]}
            self._insert_node(site, "Cast", [packed], [name], node, attrs=kind, before=first)
            stored = name
        elif table is not None and table is not site:
            # One copy in the file, as rows; engines compute the Transpose of a constant once, when they load the file.
            stored = self._add_part(table, "quantized", np.ascontiguousarray(codes.T), storage)
            node, name = self._make_names(site, "transpose_node", "quantized")
            turn = {"perm": [1, 0]}
            self._insert_node(site, "Transpose", [stored], [name], node, attrs=turn, before=first)
        else:
            stored = name = self._add_part(site, "quantized", codes, storage)
        scale, zero = self._add_qparams(site, qparams, storage)
        if site.group:
            self.shared[site.group] = stored, scale, zero
        return name, scale, zero

    def _store_outside(
        self, site: SitePlan, qparams: QParams, codes: Array, tensor: TensorId
    ) -> PairNames:
        """Names of the integers, scale and zero point of a captured weight, stored once for equal numbers."""
        arrays = (qparams.scale, qparams.zero_point, codes)
        key = (tensor, site.spec, hash_parts(*map(view_content, arrays)))
        if key not in self.outside:
            own = replace(site, site=tensor)
            name = self._add_part(own, "quantized", codes, site.spec.storage)
            self.outside[key] = (name, *self._add_qparams(own, qparams))
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

        def add(part: str, op_type: str, inputs: list[str], output: str, **attrs: int) -> str:
            """A node behind the Gather; returns its output."""
            self._insert_node(site, op_type, inputs, [output], name(part), scope=scope, attrs=attrs)
            return output

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
            editor.replace_output(node.name, 0, codes)
            axis = editor.add_initializer(scope, name("last_axis"), as_int64([-1]))
            # No DequantizeLinear: blocks with computed scales need opset 21, and are several times slower.
            scales = add("row_scale_node", "Gather", [scale, node.inputs[1]], name("row_scale"))
            column = add("column_node", "Unsqueeze", [scales, axis], name("column"))
            floats = add("cast_node", "Cast", [codes], name("row"), to=onnx.TensorProto.FLOAT)
            add("row_node", "Mul", [floats, column], row)
        if narrow:
            add("float_node", "Cast", [row], result, to=dtype)

    def _add_qparams(self, site: SitePlan, qparams: QParams, storage: str = "") -> tuple[str, str]:
        """Names of the scale and the zero point, written beside the site.

        "" for a zero point that nothing reads: of a bias, and of blocks around 0, where it would be a value a block.
        """
        spec = site.spec
        numbers = cast_scale(qparams, self._find_float_type(site), signed=spec.has_blocks)
        scale = self._add_part(site, "scale", numbers)
        zero = np.asarray(qparams.zero_point, spec.code_type)
        if site.role.is_bias or (spec.has_blocks and spec.symmetric and not zero.any()):
            return scale, ""
        return scale, self._add_part(site, "zero_point", zero, storage or spec.storage)

    def _find_float_type(self, site: SitePlan) -> type[np.floating]:
        """The type of the site's scale: float16 for a float16 tensor."""
        # DequantizeLinear returns the type of its scale, which so must be the tensor's.
        half = self.index.find_dtype(find_tensor(self.index, site.site)) == onnx.TensorProto.FLOAT16
        return np.float16 if half and not site.find_lookups(self.index) else np.float32

    def _make_names(self, site: SitePlan, *parts: str) -> list[str]:
        return [self.editor.fresh(name_part(site.site, part)) for part in parts]

    def _add_part(self, site: SitePlan, part: str, value: ArrayLike, storage: str = "") -> str:
        """A new initializer beside the site; returns its name. storage: of integers, that of the spec or wider."""
        base = name_part(site.site, part)
        dtype = TENSOR_TYPES[storage] if storage else None
        return self.editor.add_constant(site.site.scope, base, value, dtype=dtype)

    def _insert_dequantize(
        self, site: SitePlan, inputs: Sequence[str], result: str = "", **more: Any
    ) -> str:
        """The second node of a pair; returns its result, which may be given. more: as of `_insert_node`."""
        node, fresh = self._make_names(site, "dq_node", "dequantized")
        result = result or fresh
        self._insert_node(
            site, DEQUANTIZE, inputs, [result], node, attrs=site.spec.granularity.attributes, **more
        )
        return result

    def _insert_node(
        self,
        site: SitePlan,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
        *,
        scope: str | None = None,
        **more: Any,
    ) -> None:
        """A node of a site's pair, with the record of the site. scope: another one than the site's.

        more: as of `Editor.insert_node`.
        """
        scope = site.site.scope if scope is None else scope
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
