"""Kernels against the model: the type of every heavy node, and whether the integers of every pair reach a kernel."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxq.annotate import Inspection, PairInfo, WeightSums, find_saturating
from onnxq.annotate.bits import Notes, read_notes
from onnxq.annotate.operators import SaturatingWeights
from onnxq.backends import find_sums
from onnxq.backends.base import IntegerSums
from onnxq.backends.engine import Engine, Kernel, Kernels, KernelWords
from onnxq.engines.prove.kernels import HEAVY, PRODUCTS, NodeWork, is_low
from onnxq.engines.prove.proof import HOST, INT8, LOW, UNSEEN, NodeProof, SiteProof, SiteState
from onnxq.engines.prove.reasons import Reasons
from onnxq.graph import DEQUANTIZE, GraphIndex, NodeRef, NodeRefs, name_nodes
from onnxq.sites import Names, NumberedNames, drop_repeats


def judge_model(
    index: GraphIndex, inspection: Inspection, kernels: Kernels, reasons: Reasons
) -> tuple[tuple[NodeProof, ...], tuple[SiteProof, ...]]:
    """One proof for every heavy node and every pair of the model, in its order."""
    by_node = _group_by_node(kernels)
    nodes = tuple(
        _judge_node(node, by_node[node.name], reasons) for node in find_heavy_nodes(index)
    )
    notes = read_notes(inspection.model)
    judge = _PairJudge(index, notes, by_node, reasons, {one.node: one for one in nodes})
    return nodes, tuple(map(judge.judge_pair, inspection.pairs))


def count_types(index: GraphIndex, kernels: Kernels, words: KernelWords) -> NumberedNames:
    """How many products kernels compute in which type, the most frequent type first."""
    by_node = _group_by_node(kernels)
    types = Counter[str]()
    for node in find_heavy_nodes(index):
        if node.op_type in PRODUCTS:
            types[NodeWork(node.op_type, by_node[node.name], words).type] += 1
    return tuple(types.most_common())


def judge_sums(
    index: GraphIndex,
    kernels: Kernels,
    words: KernelWords,
    sums: IntegerSums | None = None,
) -> SaturatingWeights:
    """The weights that can overflow 16-bit sums, by the kernels that the engine took where these are known."""
    by_node = _group_by_node(kernels)
    found = []
    for weight in find_saturating(index, sums):
        if index.find_node(weight.node).op_type in PRODUCTS:
            work = NodeWork(weight.op, by_node[weight.node], words)
            # A kernel that computes in float, or takes signed data, has no sum that could overflow.
            if work.type != UNSEEN:
                weight = replace(weight, exact=_describe_exact(work))
        found.append(weight)
    return tuple(found)


def judge_optimizer_sums(
    index: GraphIndex, kernels: Kernels, optimized: GraphIndex, known: Sequence[WeightSums]
) -> SaturatingWeights:
    """The weights that the file holds as float, the engine rounds to int8 by itself, and that can overflow.

    optimized: the graph that the kernels are nodes of. known: the weights found in the file.
    """
    computed = {kernel.name: kernel.nodes for kernel in kernels}
    seen = {one.node for one in known}
    found = []
    for weight in find_saturating(optimized):
        names = [
            name
            for name in computed.get(weight.node, ())
            if index.find_node(name).op_type in PRODUCTS
        ]
        # A fused kernel with several products: nobody knows whose weight it is.
        if weight.saturates and len(names) == 1 and names[0] not in seen:
            found.append(replace(weight, node=names[0], op=index.find_node(names[0]).op_type))
    return tuple(found)


def judge_weights(
    engine: Engine, index: GraphIndex, kernels: Kernels, folder: Path
) -> SaturatingWeights:
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


def _describe_exact(work: NodeWork) -> str:
    if work.type != INT8:
        return f"computed in {work.type}"
    signed = [tensor.dtype for tensor in work.workers[0].inputs[:1]] == [INT8]
    return "computed as int8 by int8" if signed and not work.words.shifts else ""


def _group_by_node(kernels: Kernels) -> defaultdict[str, Kernels]:
    """The kernels that have a part in each node; () of a node in which none has."""
    by_node: defaultdict[str, Kernels] = defaultdict(tuple)
    for kernel in kernels:
        for name in kernel.nodes:
            by_node[name] += (kernel,)
    return by_node


def find_heavy_nodes(index: GraphIndex) -> NodeRefs:
    """Products and pools of every scope; not those of constants alone, which no engine runs."""
    heavy = (node for node in index.nodes if node.op_type in HEAVY)
    return tuple(node for node in heavy if index.list_computed(node) or not index.list_reads(node))


def _judge_node(node: NodeRef, kernels: Kernels, reasons: Reasons) -> NodeProof:
    work = NodeWork(node.op_type, kernels, reasons.engine.words)
    first = next(iter(work.workers), None)
    kind = work.type if reasons.find_moved(node.name) is None else HOST
    types = work.describe_types(first) if first is not None else ""
    stored = work.arithmetic[0].stored if work.arithmetic else ""
    computed = drop_repeats(part.dtype for part in work.arithmetic)
    whole = bool(computed) and set(computed) <= set(LOW)
    return NodeProof(
        node=node.name,
        op=node.op_type,
        type=kind,
        kernel=first.name if first is not None else "",
        kind=first.kind if first is not None else "",
        types=types,
        kernels=tuple(kernel.name for kernel in kernels),
        reason="" if whole else reasons.explain_node(node, kind, types, stored=stored),
        computed=computed,
        stored=stored,
    )


@dataclass(frozen=True, eq=False)
class _PairJudge:
    """Judges the pairs of a model. proven: its heavy nodes, by name."""

    index: GraphIndex
    notes: Notes
    by_node: defaultdict[str, Kernels]
    reasons: Reasons
    proven: Mapping[str, NodeProof]

    def judge_pair(self, pair: PairInfo) -> SiteProof:
        """The proof of one pair: which of its readers take its integers in."""
        readers = self._find_readers(pair)
        own = self.by_node[pair.lookup or pair.dequantize]
        verdicts = {reader: self._takes_integers(pair, reader) for reader in readers}
        if not readers:  # the pair stands before a model output: integers must come that far
            verdicts["the model's output"] = (
                any(_reads_low(kernel, pair) for kernel in own) if own else self._pass_on(pair)
            )
        unfused = tuple(reader for reader, verdict in verdicts.items() if verdict is False)
        state = _find_state(any(verdicts.values()), bool(unfused))
        rule = self._find_rule(pair)
        reason = ""
        if state is not SiteState.FUSED:
            reason = self.reasons.explain_site(pair, rule, unfused, self.proven, readers)
        return SiteProof(
            site=pair.name,
            role=str(pair.role),
            state=state,
            rule=rule,
            readers=readers,
            unfused=unfused,
            kernels=drop_repeats(one.name for one in own if _reads_low(one, pair)),
            reason=reason,
        )

    def _find_rule(self, pair: PairInfo) -> str:
        """The rule that placed a pair, as noted when it was written; "" for other tools' pairs."""
        for known in (self.notes.by_node, self.notes.own):
            for name in pair.nodes:
                if rule := known.get(name, {}).get("rule"):
                    return str(rule)
        return ""

    def _find_readers(self, pair: PairInfo) -> Names:
        if pair.lookup or not pair.dequantize:
            return tuple(filter(None, (pair.lookup,)))
        edges = self.index.list_consumers(self.index.find_node(pair.dequantize).result)
        return drop_repeats(edge.node for edge in edges)

    def _takes_integers(self, pair: PairInfo, reader: str) -> bool | None:
        """True when the reader takes the integers in, False when it reads floats, None when neither can be seen."""
        reading = self.by_node[reader]
        if pair.lookup:
            return any(_reads_low(kernel, pair) for kernel in reading) if reading else None
        proof = self.proven.get(reader)
        if proof is not None and proof.op in PRODUCTS:
            if proof.type in (UNSEEN, HOST):
                return None
            # With or without a sign: ONNX Runtime moves zero points and reads the same integers.
            types = {name.removeprefix("u") for name in (proof.stored, pair.storage)}
            return set(proof.computed) <= set(LOW) or (pair.role.is_weight and len(types) == 1)
        # A kernel that does nothing but dequantize says nothing about the reader, unless there is no other.
        own = self.by_node[pair.dequantize]
        mine = [kernel for kernel in own if not _only_dequantizes(kernel, pair)] or list(own)
        near = [kernel for kernel in reading if kernel in mine]
        seen = near or mine or reading
        if not seen:
            # An equal pair follows: dequantizing here and quantizing there cancel out, and the bytes go on.
            return self._pass_on(pair)
        taken = [
            _reads_low(kernel, pair)
            and not _only_dequantizes(kernel, pair)
            # The pair's quantization did not just happen in it.
            and pair.quantize not in kernel.nodes
            for kernel in seen
        ]
        # One of the kernels that dequantize in the reader is enough; of those elsewhere nobody knows which serves it.
        return any(taken) if near or len(taken) == 1 else all(taken)

    def _pass_on(self, pair: PairInfo) -> bool | None:
        """True where integers are written and no kernel dequantizes them; None where neither can be seen."""
        kernels = self.by_node[pair.quantize]
        written = (tensor for kernel in kernels for tensor in kernel.outputs)
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
