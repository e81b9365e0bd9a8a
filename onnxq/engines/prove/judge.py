"""Kernels against the model: the type of every heavy node, and whether the integers of every pair reach a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnxq.annotate import Inspection, PairInfo, WeightSums, find_saturating
from onnxq.annotate.bits import Notes, read_notes
from onnxq.backends import find_sums
from onnxq.backends.base import IntegerSums
from onnxq.backends.engine import Engine, Kernel, KernelWords
from onnxq.engines.prove.kernels import (
    HEAVY,
    PRODUCTS,
    describe_types,
    find_arithmetic,
    find_computed_type,
    find_workers,
    is_low,
    list_arithmetic,
)
from onnxq.engines.prove.proof import HOST, INT8, LOW, UNSEEN, NodeProof, SiteProof, SiteState
from onnxq.engines.prove.reasons import Reasons
from onnxq.graph import DEQUANTIZE, GraphIndex, NodeRef, NodeRefs, name_nodes
from onnxq.sites import Names


def judge_model(
    index: GraphIndex, inspection: Inspection, kernels: Sequence[Kernel], reasons: Reasons
) -> tuple[tuple[NodeProof, ...], tuple[SiteProof, ...]]:
    """One proof for every heavy node and every pair of the model, in its order."""
    by_node = _group_by_node(kernels)
    nodes = tuple(
        _judge_node(node, by_node.get(node.name, ()), reasons) for node in find_heavy_nodes(index)
    )
    notes = read_notes(inspection.model)
    proven = {one.node: one for one in nodes}
    return nodes, tuple(
        _judge_pair(
            pair, _find_rule(notes, pair), _find_readers(index, pair), proven, by_node, reasons
        )
        for pair in inspection.pairs
    )


def count_types(
    index: GraphIndex, kernels: Sequence[Kernel], words: KernelWords
) -> tuple[tuple[str, int], ...]:
    """How many products kernels compute in which type, the most frequent type first."""
    by_node = _group_by_node(kernels)
    types = Counter[str]()
    for node in find_heavy_nodes(index):
        if node.op_type in PRODUCTS:
            workers = find_workers(node.op_type, by_node.get(node.name, ()), words)
            types[find_computed_type(node.op_type, workers, words)] += 1
    return tuple(types.most_common())


def judge_sums(
    index: GraphIndex,
    kernels: Sequence[Kernel],
    words: KernelWords,
    sums: IntegerSums | None = None,
) -> tuple[WeightSums, ...]:
    """The weights that can overflow 16-bit sums, by the kernels that the engine took where these are known."""
    by_node = _group_by_node(kernels)
    found = []
    for weight in find_saturating(index, sums):
        if index.find_node(weight.node).op_type in PRODUCTS:
            working = find_workers(weight.op, by_node.get(weight.node, ()), words)
            kind = find_computed_type(weight.op, working, words)
            # A kernel that computes in float, or takes signed data, has no sum that could overflow.
            if kind != UNSEEN:
                weight = replace(
                    weight, exact=_describe_exact(kind, working[0] if working else None, words)
                )
        found.append(weight)
    return tuple(found)


def judge_optimizer_sums(
    index: GraphIndex, kernels: Sequence[Kernel], optimized: GraphIndex, known: Sequence[WeightSums]
) -> tuple[WeightSums, ...]:
    """The weights that the file holds as float, the engine rounds to int8 by itself, and that can overflow.

    optimized: the graph that the kernels are nodes of. known: the weights found in the file.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    seen = {one.node for one in known}
    found = []
    for weight in find_saturating(optimized):
        kernel = by_name.get(weight.node)
        names = [
            name
            for name in (kernel.nodes if kernel is not None else ())
            if index.find_node(name).op_type in PRODUCTS
        ]
        # A fused kernel with several products: nobody knows whose weight it is.
        if weight.saturates and len(names) == 1 and names[0] not in seen:
            found.append(replace(weight, node=names[0], op=index.find_node(names[0]).op_type))
    return tuple(found)


def judge_weights(
    engine: Engine, index: GraphIndex, kernels: Sequence[Kernel], folder: Path
) -> tuple[WeightSums, ...]:
    """The weights that can overflow 16-bit sums; those of the file alone where it was not built."""
    if not engine.saturates:
        return ()
    weights = judge_sums(index, kernels, engine.words, find_sums(engine.name))
    optimized = engine.read_optimized(folder) if kernels else None
    if optimized is None:
        return weights
    return (
        *weights,
        *judge_optimizer_sums(index, kernels, GraphIndex(name_nodes(optimized)), weights),
    )


def _describe_exact(kind: str, kernel: Kernel | None, words: KernelWords) -> str:
    if kind != INT8:
        return f"computed in {kind}"
    data = kernel.inputs[0].dtype if kernel is not None and kernel.inputs else ""
    return "computed as int8 by int8" if data == "int8" and not words.shifts else ""


def _group_by_node(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """The kernels that have a part in each node."""
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        for name in kernel.nodes:
            found.setdefault(name, []).append(kernel)
    return found


def find_heavy_nodes(index: GraphIndex) -> NodeRefs:
    """Products and pools of every scope; not those of constants alone, which no engine runs."""
    return tuple(
        node for node in index.nodes if node.op_type in HEAVY and not _is_constant(index, node)
    )


def _is_constant(index: GraphIndex, node: NodeRef) -> bool:
    found = [index.find_input(node, k) for k, name in enumerate(node.inputs) if name]
    return bool(found) and all(index.is_constant(tensor) for tensor in found)


def _find_rule(notes: Notes, pair: PairInfo) -> str:
    """The rule that placed a pair, as noted when it was written; "" for other tools' pairs."""
    for known in (notes.by_node, notes.own):
        for name in pair.nodes:
            if rule := known.get(name, {}).get("rule"):
                return str(rule)
    return ""


def _judge_node(node: NodeRef, kernels: Sequence[Kernel], reasons: Reasons) -> NodeProof:
    op = node.op_type
    words = reasons.engine.words
    workers = find_workers(op, kernels, words)
    kind = find_computed_type(op, workers, words) if reasons.find_moved(node.name) is None else HOST
    names = tuple(kernel.name for kernel in kernels)
    types = ""
    stored = ""
    if workers:
        types = describe_types(op, workers[0], words)
        stored = find_arithmetic(op, workers[0], words).stored
    computed = tuple(dict.fromkeys(part.dtype for part in list_arithmetic(op, workers, words)))
    whole = bool(computed) and set(computed) <= set(LOW)
    reason = "" if whole else reasons.explain_node(node, kind, types, stored=stored)
    proof = NodeProof(node=node.name, op=op, type=kind, types=types, kernels=names, reason=reason)
    if not workers:
        return proof
    return replace(
        proof, kernel=workers[0].name, kind=workers[0].kind, computed=computed, stored=stored
    )


def _judge_pair(
    pair: PairInfo,
    rule: str,
    readers: Sequence[str],
    proven: Mapping[str, NodeProof],
    by_node: Mapping[str, Sequence[Kernel]],
    reasons: Reasons,
) -> SiteProof:
    """The proof of one pair: which of its readers take its integers in."""
    own = by_node.get(pair.lookup or pair.dequantize, ())
    verdicts = {
        reader: _takes_integers(pair, reader, proven.get(reader), by_node) for reader in readers
    }
    if not readers:  # the pair stands before a model output: integers must come that far
        verdicts["the model's output"] = (
            any(_reads_low(kernel, pair) for kernel in own) if own else _pass_on(pair, by_node)
        )
    unfused = tuple(reader for reader, verdict in verdicts.items() if verdict is False)
    state = _find_state(any(verdicts.values()), bool(unfused))
    kernels = dict.fromkeys(kernel.name for kernel in own if _reads_low(kernel, pair))
    reason = (
        ""
        if state is SiteState.FUSED
        else reasons.explain_site(pair, rule, unfused, proven, readers)
    )
    return SiteProof(
        site=pair.name,
        role=str(pair.role),
        state=state,
        rule=rule,
        readers=tuple(readers),
        unfused=unfused,
        kernels=tuple(kernels),
        reason=reason,
    )


def _find_readers(index: GraphIndex, pair: PairInfo) -> Names:
    if pair.lookup:
        return (pair.lookup,)
    readers = (
        index.list_consumers(index.find_node(pair.dequantize).result) if pair.dequantize else ()
    )
    return tuple(dict.fromkeys(edge.node for edge in readers))


def _takes_integers(
    pair: PairInfo, reader: str, proof: NodeProof | None, by_node: Mapping[str, Sequence[Kernel]]
) -> bool | None:
    """True when the reader takes the integers in, False when it reads floats, None when neither can be seen."""
    if pair.lookup:
        seen = by_node.get(reader, ())
        return any(_reads_low(kernel, pair) for kernel in seen) if seen else None
    if proof is not None and proof.op in PRODUCTS:
        if proof.type in (UNSEEN, HOST):
            return None
        # With or without a sign: ONNX Runtime moves zero points and reads the same integers.
        stored = pair.role.is_weight and proof.stored.removeprefix(
            "u"
        ) == pair.storage.removeprefix("u")
        return set(proof.computed) <= set(LOW) or stored
    # A kernel that does nothing but dequantize says nothing about the reader, unless there is no other.
    own = by_node.get(pair.dequantize, ())
    mine = [kernel for kernel in own if not _only_dequantizes(kernel, pair)] or list(own)
    near = [kernel for kernel in by_node.get(reader, ()) if kernel in mine]
    seen = near or mine or list(by_node.get(reader, ()))
    if not seen:
        # An equal pair follows: dequantizing here and quantizing there cancel out, and the bytes go on.
        return _pass_on(pair, by_node)
    taken = [_takes(kernel, pair) for kernel in seen]
    # One of the kernels that dequantize in the reader is enough; of those elsewhere nobody knows which serves it.
    return any(taken) if near or len(taken) == 1 else all(taken)


def _pass_on(pair: PairInfo, by_node: Mapping[str, Sequence[Kernel]]) -> bool | None:
    """True where integers are written and no kernel dequantizes them; None where neither can be seen."""
    written = [tensor for kernel in by_node.get(pair.quantize, ()) for tensor in kernel.outputs]
    return True if any(is_low(tensor.dtype) for tensor in written) else None


def _find_state(fused: bool, unfused: bool) -> SiteState:
    if fused:
        return SiteState.PARTLY if unfused else SiteState.FUSED
    return SiteState.UNFUSED if unfused else SiteState.UNSEEN


def _reads_low(kernel: Kernel, pair: PairInfo) -> bool:
    """The kernel reads integers; constants count for pairs of constants only."""
    read = kernel.inputs if pair.quantize else (*kernel.inputs, *kernel.weights)
    return any(is_low(tensor.dtype) for tensor in read)


def _only_dequantizes(kernel: Kernel, pair: PairInfo) -> bool:
    """A kernel that does nothing but dequantize; one that writes integers too has laid them out anew."""
    lays_out = bool(kernel.outputs) and all(is_low(tensor.dtype) for tensor in kernel.outputs)
    return (set(kernel.nodes) <= {pair.dequantize} and not lays_out) or kernel.kind == DEQUANTIZE


def _takes(kernel: Kernel, pair: PairInfo) -> bool:
    """The kernel reads integers and the pair's quantization did not just happen in it."""
    return (
        _reads_low(kernel, pair)
        and not _only_dequantizes(kernel, pair)
        and pair.quantize not in kernel.nodes
    )
