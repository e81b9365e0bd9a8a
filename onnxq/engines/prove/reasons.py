"""Why a node stayed float and a pair did not fuse, as far as the model shows it. Evidence: tests/engines/prove."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from onnxq.annotate import PairInfo
from onnxq.backends.engine import ComputeCapability, DevicePlacement, Engine
from onnxq.engines.prove.kernels import PRODUCTS
from onnxq.engines.prove.proof import UNSEEN, NodeProof
from onnxq.graph import DEQUANTIZE, LAYOUT_OPS, GraphIndex, NodeRef
from onnxq.sites import Indices, Refusal, TensorId, Unquantized, drop_repeats
from onnxq.spec import PerChannel, PerTensor, find_numpy_storage

# Operators that only move data: engines carry a quantization over them.
_MOVES = LAYOUT_OPS | {"Slice", "Expand", "MaxPool"}
# Axis of a weight along which a product's channels lie; a Gemm's depends on transB.
_CHANNELS = {"Conv": 0, "MatMul": -1}


@dataclass(frozen=True)
class Reasons:
    """Explains one model's nodes and pairs."""

    engine: Engine
    index: GraphIndex
    pairs: Sequence[PairInfo]
    # The nodes that the model's plan left float.
    left: Sequence[Unquantized] = ()
    # Of the GPU that was built for, () unknown.
    capability: ComputeCapability = ()
    placement: DevicePlacement | None = None

    @cached_property
    def _by_dequantize(self) -> dict[str, PairInfo]:
        return {pair.dequantize: pair for pair in self.pairs if pair.dequantize}

    def explain_node(self, node: NodeRef, kind: str, types: str, *, stored: str = "") -> str:
        """Why a heavy node does not run in int8; "" where its weight alone is quantized, and read so.

        stored: type of a weight that its kernel reads in fewer bits than it computes in, "" for none.
        """
        # From the surest to the least sure: the plan's own word, a missing kernel, then faults of the pairs.
        left = self._find_left(node)
        if left is not None:
            return f"the plan left it float: {left.reason}"
        moved = self.find_moved(node.name)
        if moved is not None:
            return f"left to the CPU: {moved.reason}"
        engine = self.engine
        if self._has_weight_alone(node):
            dequantized = "" if stored else engine.explain_weight(self.index, node)
            if stored or dequantized:
                return dequantized
        if node.op_type in engine.no_kernel:
            text = f"{engine.family} has no int8 kernel for {node.op_type}"
            return f"{text}; its list names no kernel for it" if kind == UNSEEN else text
        if kind == UNSEEN:
            return "the engine's list of kernels does not name it: it was merged with an equal one or computed away"
        if old := engine.explain_capability(self.capability):
            return old
        if fault := self._find_operand_fault(node) or engine.explain_result(self.index, node):
            return fault
        pair = self._find_pair(node, 0)
        if pair is not None and (unfit := engine.explain_data(self._read_type(pair))):
            return unfit
        return f"its pairs are in place, but the engine took another kernel: {types}"

    def is_quantized(self, node: NodeRef) -> bool:
        """True for a product whose weight has a pair, or both of whose operands have; not where the plan left it."""
        if (
            node.op_type not in PRODUCTS
            or self._find_pair(node, 1) is None
            or self._find_left(node) is not None
        ):
            return False
        return self._is_constant(node, 1) or self._find_pair(node, 0) is not None

    def has_weight(self, node: NodeRef) -> bool:
        """True for a node with a constant operand, quantized or not."""
        return any(self._is_constant(node, k) for k in range(1, len(node.inputs)))

    def find_moved(self, *names: str) -> Refusal | None:
        """The first of these nodes that the engine left to the CPU, with its reason; None without one."""
        left = self.placement.left if self.placement is not None else ()
        return next((one for one in left if one.subject in names), None)

    def explain_site(
        self,
        pair: PairInfo,
        rule: str,
        unfused: Sequence[str],
        proven: Mapping[str, NodeProof],
        readers: Sequence[str] = (),
    ) -> str:
        """Why a pair's integers do not reach its readers. rule: the one that placed it, "" when unknown."""
        moved = self.find_moved(*readers)
        if moved is not None:
            return f"{moved.subject} is left to the CPU: {moved.reason}"
        if rule in self.engine.purposes:
            return self.engine.purposes[rule]
        # A pair fails with its reader, whose reason says more than anything about the pair.
        causes = [
            f"{name} runs in {proven[name].type}: {proven[name].reason}"
            for name in unfused
            if name in proven
        ]
        if causes:
            return "; ".join(drop_repeats(causes))
        if unfused:
            ops = ", ".join(drop_repeats(pair.ops)) or "its reader"
            return f"{ops} reads floats: the value is rounded and taken back, and no kernel reads it as integers"
        if not pair.dequantize:
            return "nothing dequantizes it"
        return "no kernel in the engine's list names it: it was merged with an equal pair or computed away"

    def _find_left(self, node: NodeRef) -> Unquantized | None:
        """The plan's word that it left a node float."""
        return next((one for one in self.left if one.subject == node.name), None)

    def _has_weight_alone(self, node: NodeRef) -> bool:
        """True for a product of float data and a quantized weight."""
        weight = self._find_pair(node, 1) if node.op_type in PRODUCTS else None
        return weight is not None and weight.role.is_weight and self._find_pair(node, 0) is None

    def _find_operand_fault(self, node: NodeRef) -> str:
        """The first fault of the pairs in front of a product or pool, "" for none."""
        for k in (0, 1) if node.op_type in PRODUCTS else (0,):
            what = "input" if k == 0 else "weight" if self._is_constant(node, k) else f"input {k}"
            pair = self._find_pair(node, k)
            if pair is None:
                return f"its {what} has no pair"
            if fault := self._find_fault(node, k, pair, what):
                return fault
        return ""

    def _find_fault(self, node: NodeRef, k: int, pair: PairInfo, what: str) -> str:
        grain = pair.granularity
        if not pair.role.is_weight:
            scale = self.index.input_shape(self.index.find_node(pair.dequantize), 1)
            if fault := self.engine.explain_operand(node, scale, what):
                return fault
            if not isinstance(grain, PerTensor):
                return f"its {what} is quantized per channel: activations need one scale"
        elif isinstance(grain, PerChannel):
            want = self._find_channel_axes(node, k)
            if want is not None and grain.axis not in want:
                return f"the scales of its weight lie along axis {grain.axis}, its channels along axis {max(want)}"
        read = self._read_type(pair)
        wide = self.engine.words.integers and read in ("int16", "uint16")
        packed = self.engine.packs_weights and pair.role.is_weight
        if read in ("int16", "uint16", "int4", "uint4") and not (wide or packed):
            return f"its {what} is {read}, for which there is no kernel"
        return ""

    def _read_type(self, pair: PairInfo) -> str:
        """The type that the pair is stored in; a byte where a Cast unpacks it in front of the DequantizeLinear."""
        unpacked = self.index.maker(self.index.named.get(pair.dequantize), 0, "Cast")
        return pair.storage if unpacked is None else find_numpy_storage(pair.storage)

    def _find_pair(self, node: NodeRef, k: int) -> PairInfo | None:
        """The pair in front of an input, seen through operators that only move data."""
        moved = self.index.find_input(node, k)
        maker = self.index.find_producer(self.index.find_origin(moved, _MOVES))
        return None if maker is None else self._by_dequantize.get(maker.name)

    def _is_constant(self, node: NodeRef, k: int) -> bool:
        pair = self._find_pair(node, k)
        if pair is not None:
            return pair.role.is_weight
        return self.index.has_constant(node, k)

    def _find_channel_axes(self, node: NodeRef, k: int) -> Indices | None:
        """Axes that mean a weight's channels; None when the weight is moved on the way, or unknown."""
        maker = self.index.maker(node, k, DEQUANTIZE)
        if maker is None:
            return None
        if node.op_type == "Gemm":
            return (0, -2) if node.is_transposed else (1, -1)
        shape = self.index.find_shape(TensorId(maker.inputs[0], maker.scope))
        axis = _CHANNELS.get(node.op_type)
        if axis is None or shape is None:
            return None
        rank = len(shape)
        return axis % rank, axis % rank - rank
