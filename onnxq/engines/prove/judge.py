"""Kernels against the model: every heavy node's type, and whether every pair's integers reach a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxq.annotate import Inspection, PairInfo, WeightSums, find_saturating
from onnxq.annotate.notes import Notes, read_notes
from onnxq.engines.prove.kernels import HEAVY, PRODUCTS, computed_type, is_low, types, workers
from onnxq.engines.prove.proof import FLOAT8, FUSED, INT8, LOOSE, PARTLY, UNSEEN, Kernel, NodeProof, SiteProof
from onnxq.engines.prove.reasons import Why
from onnxq.graph import GraphIndex, NodeRef
from onnxq.plan.names import DEQUANTIZE
from onnxq.sites import Role, TensorId


def judge(
    index: GraphIndex, inspection: Inspection, kernels: Sequence[Kernel], why: Why
) -> tuple[tuple[NodeProof, ...], tuple[SiteProof, ...]]:
    """One proof for every heavy node and every pair of the model, in its order."""
    by_node = _by_node(kernels)
    nodes = tuple(_node(node, by_node.get(node.name, ()), why) for node in heavy_nodes(index))
    notes = read_notes(inspection.model)
    proven = {one.node: one for one in nodes}
    sites = []
    for pair in inspection.pairs:
        sites.append(_Pair(index, pair, _rule(notes, pair)).proof(proven, by_node, why))
    return nodes, tuple(sites)


def judge_sums(index: GraphIndex, kernels: Sequence[Kernel]) -> tuple[WeightSums, ...]:
    """What of the weights can overflow 16-bit sums: by the kernels ONNX Runtime took, where these are known."""
    by_node = _by_node(kernels)
    found = []
    for weight in find_saturating(index):
        if index.node(weight.node).op_type in PRODUCTS:
            working = workers(weight.op, by_node.get(weight.node, ()))
            kind = computed_type(weight.op, working)
            if kind != UNSEEN:
                weight = replace(weight, exact=_exact(kind, working[0] if working else None))
        found.append(weight)
    return tuple(found)


def unasked_sums(
    index: GraphIndex, kernels: Sequence[Kernel], optimized: GraphIndex, known: Sequence[WeightSums]
) -> tuple[WeightSums, ...]:
    """What can overflow in weights that the file holds as float and ONNX Runtime rounds to int8 by itself.

    optimized: the graph that the kernels are nodes of. known: the weights found in the file.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    seen = {one.node for one in known}
    found = []
    for weight in find_saturating(optimized):
        kernel = by_name.get(weight.node)
        names = [name for name in (kernel.nodes if kernel is not None else ()) if index.node(name).op_type in PRODUCTS]
        if weight.saturates and len(names) == 1 and names[0] not in seen:
            found.append(replace(weight, node=names[0], op=index.node(names[0]).op_type))
    return tuple(found)


def _exact(kind: str, kernel: Kernel | None) -> str:
    if kind != INT8:
        return f"computed in {kind}"
    data = kernel.inputs[0].dtype if kernel is not None and kernel.inputs else ""
    return "computed as int8 by int8" if data == "int8" else ""


def _by_node(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """The kernels that have a part in each node."""
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        for name in kernel.nodes:
            found.setdefault(name, []).append(kernel)
    return found


def heavy_nodes(index: GraphIndex) -> tuple[NodeRef, ...]:
    """Products and pools of every scope; not those of constants alone, which no engine runs."""
    return tuple(node for node in index.nodes if node.op_type in HEAVY and not _constant(index, node))


def _constant(index: GraphIndex, node: NodeRef) -> bool:
    found = [index.resolve(name, node.scope) for name in node.inputs if name]
    return bool(found) and all(tensor is not None and index.is_constant(tensor) for tensor in found)


def _rule(notes: Notes, pair: PairInfo) -> str:
    """The rule that placed a pair, as noted when it was written; "" for other tools' pairs."""
    for held in (notes.by_node, notes.own):
        for name in pair.nodes:
            if rule := held.get(name, {}).get("rule"):
                return str(rule)
    return ""


def _node(node: NodeRef, kernels: Sequence[Kernel], why: Why) -> NodeProof:
    found = workers(node.op_type, kernels)
    kind = computed_type(node.op_type, found)
    first = found[0] if found else None
    told = types(node.op_type, first) if first else ""
    return NodeProof(
        node=node.name,
        op=node.op_type,
        type=kind,
        kernel=first.name if first else "",
        kind=first.kind if first else "",
        types=told,
        kernels=tuple(kernel.name for kernel in kernels),
        reason="" if kind in (INT8, FLOAT8) else why.node(node, kind, told),
    )


@dataclass(frozen=True)
class _Pair:
    """One pair, asked which of its readers take its integers in."""

    index: GraphIndex
    pair: PairInfo
    rule: str

    def proof(self, proven: Mapping[str, NodeProof], by_node: Mapping[str, Sequence[Kernel]], why: Why) -> SiteProof:
        """Judge the pair."""
        pair, readers = self.pair, self._readers()
        own = list(by_node.get(pair.dequantize, ()))
        good: dict[str, None] = {}
        loose: dict[str, None] = {}
        unseen: dict[str, None] = {}
        for reader in readers:
            verdict = self._taken(reader, proven.get(reader.name), by_node, own)
            (unseen if verdict is None else good if verdict else loose)[reader.name] = None
        if not readers:  # the pair stands before a model output: integers must come that far
            reached = any(_reads_low(kernel, pair) for kernel in own)
            (unseen if not own else good if reached else loose)["the model's output"] = None
        state = _state(good, loose)
        kernels = dict.fromkeys(kernel.name for kernel in own if _reads_low(kernel, pair))
        return SiteProof(
            site=str(pair.site),
            role=str(pair.role),
            state=state,
            rule=self.rule,
            readers=tuple(reader.name for reader in readers),
            loose=tuple(loose),
            kernels=tuple(kernels),
            reason="" if state == FUSED else why.site(pair, self.rule, tuple(loose), proven),
        )

    def _readers(self) -> tuple[NodeRef, ...]:
        name = self.pair.dequantize
        if not name:
            return ()
        made = TensorId(self.index.node(name).outputs[0], self.index.node(name).scope)
        return tuple({e.node: self.index.node(e.node) for e in self.index.consumers(made)}.values())

    def _taken(
        self,
        reader: NodeRef,
        proof: NodeProof | None,
        by_node: Mapping[str, Sequence[Kernel]],
        own: Sequence[Kernel],
    ) -> bool | None:
        """True when the reader takes the integers in, False when it reads floats, None when neither can be seen."""
        if proof is not None and proof.op in PRODUCTS:
            if proof.type == UNSEEN:
                return None
            stored = self.pair.role is Role.WEIGHT and proof.type.startswith(f"{self.pair.storage} weights")
            return proof.type in (INT8, FLOAT8) or stored
        mine = [kernel for kernel in own if not _alone(kernel, self.pair)] or list(own)
        near = [kernel for kernel in by_node.get(reader.name, ()) if kernel in mine]
        seen = near or mine or list(by_node.get(reader.name, ()))
        if not seen:
            # An equal pair follows: dequantizing here and quantizing there cancel out, and the bytes go on.
            written = [tensor for kernel in by_node.get(self.pair.quantize, ()) for tensor in kernel.outputs]
            return True if any(is_low(tensor.dtype) for tensor in written) else None
        taken = [_takes(kernel, self.pair) for kernel in seen]
        return any(taken) if near or len(taken) == 1 else all(taken)


def _state(good: Iterable[str], loose: Iterable[str]) -> str:
    if good:
        return PARTLY if loose else FUSED
    return LOOSE if loose else UNSEEN


def _reads_low(kernel: Kernel, pair: PairInfo) -> bool:
    """The kernel reads integers; constants count for pairs of constants only."""
    read = kernel.inputs if pair.quantize else (*kernel.inputs, *kernel.weights)
    return any(is_low(tensor.dtype) for tensor in read)


def _alone(kernel: Kernel, pair: PairInfo) -> bool:
    """A kernel that does nothing but dequantize."""
    return set(kernel.nodes) <= {pair.dequantize} or kernel.kind == DEQUANTIZE


def _takes(kernel: Kernel, pair: PairInfo) -> bool:
    """The kernel reads integers and the pair's quantization did not just happen in it."""
    return _reads_low(kernel, pair) and not _alone(kernel, pair) and pair.quantize not in kernel.nodes
