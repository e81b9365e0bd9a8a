"""Carry out a calibrated plan: the only writer of QuantizeLinear and DequantizeLinear. Decides nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.errors import OnnxqError, PlanError
from onnxq.graph import Editor, GraphIndex, ModelLike, index_of, opset_of
from onnxq.numerics import clip_bounds, quantize, quantize_weight, saturating_sums, scale_as
from onnxq.plan import Plan, SitePlan, to_json
from onnxq.plan.limits import check_numbers, check_specs
from onnxq.plan.names import part
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import GRAIN_NAMES, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

PLAN_KEY = "onnxq.plan"
BITS_KEY = "onnxq.bits"
_STORAGE = {
    "int4": onnx.TensorProto.INT4,
    "uint4": onnx.TensorProto.UINT4,
    "int8": onnx.TensorProto.INT8,
    "uint8": onnx.TensorProto.UINT8,
    "int16": onnx.TensorProto.INT16,
    "uint16": onnx.TensorProto.UINT16,
    "int32": onnx.TensorProto.INT32,
    "float8e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
}


def put_biases(proto: ModelLike, plan: Plan) -> ModelLike:
    """The prepared model with the plan's float biases in the place of its own; other readers of those see no change.

    Raises PlanError for an input that is not there.
    """
    if not plan.biases:
        return proto
    index, editor = index_of(proto), Editor(proto)
    for bias in plan.biases:
        node = index.node(bias.edge.node)
        if bias.edge.index > len(node.inputs):
            raise PlanError(str(bias.edge), "this node has no place for a bias", "plan this model again", code="Q404")
        name = editor.fresh(f"{part(bias.edge, 'float')}/corrected")
        editor.add_initializer(node.scope, name, bias.values)
        editor.replace_input(bias.edge, name)
    editor.remove_unused()
    return editor.export()


def emit(proto: ModelLike, plan: Plan) -> ModelLike:
    """The prepared model with every pair of the plan in it.

    Weights and biases become integer initializers behind a DequantizeLinear; activations get a
    QuantizeLinear/DequantizeLinear pair, with a float Clip in front when the bit width is narrower
    than its container. Every node is named after its site and carries `onnxq.*` metadata; the plan
    without its numbers goes into the model's metadata.

    Raises PlanError for a site without numbers, one that is not in this model, or one that the target cannot run.
    """
    if opset_of(proto) < plan.opset:
        raise PlanError(plan.model, f"the plan needs opset {plan.opset}, the model has {opset_of(proto)}", code="Q404")
    index = index_of(proto)
    check_specs(plan, index)
    check_numbers(plan)
    apart = frozenset(site.site for site in plan.sites if isinstance(site.site, Edge))
    writer = _Writer(Editor(proto), index, _in_integers(plan, index), apart)
    for site in plan.existing:
        writer.share(site)
    for site in plan.sites:
        if site.qparams is None:
            raise PlanError(str(site.site), "has no scale", "calibrate the plan first (`onnxq quantize`)", code="Q405")
        if site.role in (Role.WEIGHT, Role.BIAS):
            writer.constant(site, site.qparams)
        else:
            writer.activation(site, site.qparams)
    writer.editor.remove_unused()
    records = {**_noted(proto, index), **writer.records}
    writer.editor.model_metadata({PLAN_KEY: _slim(plan), BITS_KEY: json.dumps(records)})
    return writer.editor.export()


def _in_integers(plan: Plan, index: GraphIndex) -> frozenset[str]:
    """Nodes that read a quantized activation."""
    found = set()
    for site in plan.all_sites:
        if site.role is Role.ACTIVATION:
            edges = site.consumers
            if edges is None and isinstance(site.site, TensorId):
                edges = index.consumers(site.site)
            found |= {edge.node for edge in edges or ()}
    return frozenset(found)


def _slim(plan: Plan) -> str:
    """The plan without its numbers: those are in the model's own scales."""
    sites, existing = (
        tuple(replace(site, qparams=None, values=None) for site in some) for some in (plan.sites, plan.existing)
    )
    bare = replace(plan, sites=sites, existing=existing, biases=())
    return json.dumps(json.loads(to_json(bare)), ensure_ascii=False, separators=(",", ":"))


def _noted(proto: ModelLike, index: GraphIndex) -> dict[str, object]:
    """What the model's metadata says of the bits of nodes that it still has."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == BITS_KEY), "{}")
    names = {node.name for node in index.nodes}
    try:
        held = json.loads(text)
        return {name: record for name, record in held.items() if name in names}
    except (json.JSONDecodeError, AttributeError):
        return {}


class _Writer:
    """Writes one site after another into an editor. apart: inputs of nodes that have a site of their own."""

    def __init__(
        self, editor: Editor[ModelLike], index: GraphIndex, in_integers: frozenset[str], apart: frozenset[Edge]
    ) -> None:
        self.editor, self.index, self.in_integers, self.apart = editor, index, in_integers, apart
        # Outputs whose name the dequantized tensor has taken: what their float values are called since.
        self.renamed: dict[TensorId, str] = {}
        self.records: dict[str, dict[str, str | int]] = {}

    def share(self, site: SitePlan) -> None:
        """Let what the plan says read a pair that the model came with; those that do already stay as they are."""
        pair = self.index.node(site.dequantize)
        edges = [edge for edge in site.consumers or () if not self._reads_dequantized(edge)]
        made = pair.outputs[0]
        if edges and pair.op_type == "QuantizeLinear":
            names = self._names(site, ("dq_node", "dequantized"))
            made = names["dequantized"]
            self.editor.insert_node(
                pair.scope, "DequantizeLinear", [pair.outputs[0], *pair.inputs[1:]], [made], name=names["dq_node"],
                metadata=self._record(site, names["dq_node"]), after=pair.name,
            )  # fmt: skip
        for edge in edges:
            self.editor.replace_input(edge, made)

    def _reads_dequantized(self, edge: Edge) -> bool:
        node = self.index.node(edge.node)
        held = self.index.resolve(node.inputs[edge.index], node.scope)
        maker = None if held is None else self.index.producer(held)
        return maker is not None and maker.op_type == "DequantizeLinear"

    def activation(self, site: SitePlan, numbers: QParams) -> None:
        """Tensor -> [Clip ->] QuantizeLinear -> [Clip ->] DequantizeLinear -> its readers."""
        tensor, scope = self._tensor(site), self._scope(site)
        names = self._names(site, ("q_node", "dq_node", "quantized", "dequantized"))
        source = self.renamed.get(tensor, tensor.name)
        whole = site.consumers is None
        if whole and self.index.is_output(tensor):
            source = self.editor.fresh(part(site.site, "float"))
            self.editor.rename_tensor(tensor, source)
            self.renamed[tensor] = source
            names["dequantized"] = tensor.name
        producer = self.index.producer(tensor)
        reader = self.index.node(site.consumers[0].node) if site.consumers else None
        after = producer.name if producer is not None and producer.scope == scope else None
        before = reader.name if after is None and reader is not None else None
        made = TensorId(source, tensor.scope)
        # A branch that captures the tensor may quantize it for itself, from the float values.
        whole_edges = (edge for edge in self.editor.consumers(made) if edge not in self.apart)
        edges = tuple(whole_edges) if whole else site.consumers or ()
        scale, zero = self._numbers(site, numbers, scope)
        quantizer_input = source
        narrow = not site.spec.fills_storage or site.spec.narrow_range
        alike = isinstance(site.spec.granularity, PerTensor)
        if narrow and alike:
            quantizer_input, clip = self._clip(site, numbers, source, before, after)
            before, after = None, clip
        axis = _axis(site.spec)
        self.editor.insert_node(
            scope, "QuantizeLinear", [quantizer_input, scale, zero], [names["quantized"]],
            name=names["q_node"], attrs=axis, metadata=self._record(site, names["q_node"]), before=before, after=after,
        )  # fmt: skip
        levels, last = names["quantized"], names["q_node"]
        if narrow and not alike:
            levels, last = self._clip_levels(site, levels, last)
        self.editor.insert_node(
            scope, "DequantizeLinear", [levels, scale, zero], [names["dequantized"]],
            name=names["dq_node"], attrs=axis, metadata=self._record(site, names["dq_node"]), after=last,
        )  # fmt: skip
        self.editor.rewire(made, names["dequantized"], consumers=edges, outputs=whole)

    def _clip(
        self, site: SitePlan, numbers: QParams, source: str, before: str | None, after: str | None
    ) -> tuple[str, str]:
        """Keep the values of a narrow type inside its own range, in float, so that 8-bit kernels still fuse."""
        scope = self._scope(site)
        dtype = self._float_type(site)
        low, high = clip_bounds(numbers, site.spec, dtype)
        names = self._names(site, ("clip_node", "clipped", "clip_min", "clip_max"))
        for name, value in (("clip_min", low), ("clip_max", high)):
            self.editor.add_initializer(scope, names[name], np.asarray(value, dtype))
        self.editor.insert_node(
            scope, "Clip", [source, names["clip_min"], names["clip_max"]], [names["clipped"]],
            name=names["clip_node"], metadata=self._record(site, names["clip_node"]), before=before, after=after,
        )  # fmt: skip
        return names["clipped"], names["clip_node"]

    def _clip_levels(self, site: SitePlan, source: str, after: str) -> tuple[str, str]:
        """The same on the integers, where many scales would need many float bounds."""
        scope, dtype = self._scope(site), _numpy_type(site.spec)
        names = self._names(site, ("clip_node", "clipped", "clip_min", "clip_max"))
        for name, level in (("clip_min", site.spec.qmin), ("clip_max", site.spec.qmax)):
            self.editor.add_initializer(scope, names[name], np.asarray(level, dtype))
        self.editor.insert_node(
            scope, "Clip", [source, names["clip_min"], names["clip_max"]], [names["clipped"]],
            name=names["clip_node"], metadata=self._record(site, names["clip_node"]), after=after,
        )  # fmt: skip
        return names["clipped"], names["clip_node"]

    def constant(self, site: SitePlan, numbers: QParams) -> None:
        """Integer initializer -> DequantizeLinear -> its readers."""
        tensor, scope = self._tensor(site), self._scope(site)
        value = self.index.constant(tensor)
        if value is None:
            raise PlanError(str(site.site), "is not a constant in this model", "plan this model again", code="Q404")
        names = self._names(site, ("dq_node", "quantized", "dequantized"))
        data = _round_constant(site, numbers, value) if site.values is None else _given(site, value)
        storage = site.spec.storage
        first = min(site.consumers or (), key=lambda edge: self.index.node(edge.node).order)
        if site.spec.storage_bits < 8 and first.node in self.in_integers:
            storage = self._unpack(site, data, names["quantized"], first.node)
        else:
            self.editor.add_initializer(scope, names["quantized"], data, dtype=_STORAGE[storage])
        scale, zero = self._numbers(site, numbers, scope, storage)
        inputs = [names["quantized"], scale] + ([] if site.role is Role.BIAS else [zero])
        self.editor.insert_node(
            scope, "DequantizeLinear", inputs, [names["dequantized"]], name=names["dq_node"],
            attrs=_axis(site.spec), metadata=self._record(site, names["dq_node"]), before=first.node,
        )  # fmt: skip
        for edge in site.consumers or ():
            self.editor.replace_input(edge, names["dequantized"])

    def _unpack(self, site: SitePlan, data: NDArray[np.generic], name: str, reader: str) -> str:
        """4 bits in the file and a byte in the graph, for kernels that multiply bytes; the type they are unpacked to.

        Engines compute the Cast of a constant once, when they load the file.
        """
        scope, wide = self._scope(site), site.spec.storage.replace("int4", "int8")
        names = self._names(site, ("packed", "cast_node"))
        self.editor.add_initializer(scope, names["packed"], data, dtype=_STORAGE[site.spec.storage])
        self.editor.insert_node(
            scope, "Cast", [names["packed"]], [name], name=names["cast_node"], attrs={"to": int(_STORAGE[wide])},
            metadata=self._record(site, names["cast_node"]), before=reader,
        )  # fmt: skip
        return wide

    def _numbers(self, site: SitePlan, numbers: QParams, scope: str, storage: str = "") -> tuple[str, str]:
        names = self._names(site, ("scale", "zero_point"))
        self.editor.add_initializer(scope, names["scale"], scale_as(numbers, self._float_type(site)))
        if site.role is not Role.BIAS:
            zero = np.asarray(numbers.zero_point, _numpy_type(site.spec))
            kind = _STORAGE[storage or site.spec.storage]
            self.editor.add_initializer(scope, names["zero_point"], zero, dtype=kind)
        return names["scale"], names["zero_point"]

    def _float_type(self, site: SitePlan) -> type[np.floating]:
        """The scale's type is the tensor's: a DequantizeLinear gives back what its scale is."""
        return np.float16 if self.index.dtype(self._tensor(site)) == onnx.TensorProto.FLOAT16 else np.float32

    def _names(self, site: SitePlan, parts: Iterable[str]) -> dict[str, str]:
        return {name: self.editor.fresh(part(site.site, name)) for name in parts}

    def _tensor(self, site: SitePlan) -> TensorId:
        if isinstance(site.site, TensorId):
            return site.site
        node = self.index.node(site.site.node)
        name = node.inputs[site.site.index] if site.site.index < len(node.inputs) else ""
        tensor = self.index.resolve(name, node.scope) if name else None
        if tensor is None:
            raise PlanError(
                str(site.site), "this input is not connected in this model", "plan this model again", code="Q404"
            )
        return tensor

    def _scope(self, site: SitePlan) -> str:
        return site.site.scope

    def _record(self, site: SitePlan, node: str) -> dict[str, str]:
        """What a person reads in a viewer, and what annotate reads back, keyed by node name."""
        spec = site.spec
        record: dict[str, str | int] = {
            "site": str(site.site),
            "bits": spec.bits,
            "scheme": "symmetric" if spec.symmetric else "asymmetric",
            "granularity": GRAIN_NAMES[type(spec.granularity)],
            "role": str(site.role),
            "rule": site.rule,
        }
        self.records[node] = record
        return {f"onnxq.{key}": str(value) for key, value in record.items()}


def _round_constant(site: SitePlan, numbers: QParams, value: NDArray[np.generic]) -> NDArray[np.generic]:
    """The constant's own integers; those of a bias as a vector, since a Gemm's may be [1, N] and kernels read [N]."""
    try:
        if site.role is Role.BIAS:
            return quantize(value.reshape(-1), numbers, site.spec)
        return quantize_weight(value, numbers, site.spec, site.sum_orders)
    except OnnxqError as error:  # numerics sees arrays, and cannot say whose they are
        raise PlanError(f"{site.site}: {error.subject}", error.cause, error.fix, code=error.code) from error


def _given(site: SitePlan, value: NDArray[np.generic]) -> NDArray[np.generic]:
    """The integers that the plan carries."""
    data = np.asarray(site.values)
    fits = data.shape == value.shape and data.dtype == np.dtype(_numpy_type(site.spec))
    if not fits or (data.size and (data.min() < site.spec.qmin or data.max() > site.spec.qmax)):
        cause = f"its values do not fit a {site.spec.storage} tensor of shape {list(value.shape)}"
        raise PlanError(str(site.site), cause, "take `values` out, or plan this model again", code="Q408")
    if any(saturating_sums(data, order).any() for order in site.sum_orders):
        cause = "its values overflow 16-bit sums on CPUs without VNNI, and the plan says that they do not"
        raise PlanError(str(site.site), cause, "take `values` out, or write `saturation: allow`", code="Q408")
    return data


def _axis(spec: QuantSpec) -> dict[str, int]:
    grain = spec.granularity
    if isinstance(grain, PerChannel):
        return {"axis": grain.axis}
    if isinstance(grain, PerBlock):
        return {"axis": grain.axis, "block_size": grain.size}
    return {}


def _numpy_type(spec: QuantSpec) -> type[np.generic]:
    if spec.is_float:
        return np.float32  # only 0 is ever written; the writer casts it
    name = spec.storage if spec.storage_bits >= 8 else spec.storage.replace("int4", "int8")
    return np.dtype(name).type


__all__ = ["BITS_KEY", "PLAN_KEY", "Edge", "emit", "put_biases"]
