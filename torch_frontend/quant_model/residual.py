"""Which operand of a sum is the skip branch of a residual block: onnxq.targets.surroundings on a torch graph."""

from __future__ import annotations

from collections import deque

from torch import fx

from torch_frontend.tracing import named

_HANDS_ON = frozenset(
    ("identity", "cast", "reshape", "transpose", "slice", "pad", "relu", "relu6", "clamp", "leaky_relu", "prelu", "elu",
     "hardswish", "hardsigmoid", "gelu", "mish", "sigmoid", "silu", "tanh", "batch_norm", "max_pool")
)  # fmt: skip
_GATES = ("sigmoid", "hardsigmoid", "tanh")
_CONVOLUTIONS = ("conv", "conv_transpose")
_REACH = 24


def op_of(node: fx.Node) -> str:
    """The operator's name; "" for what has none."""
    name = named(node)
    return "" if name is None or name.entry is None else name.entry.op.name


def skip_operand(node: fx.Node, operands: list[fx.Node]) -> int | None:
    """Which of two operands is the skip branch; None when the sum does not end a residual block.

    The other one is the end of the convolution branch. Of two branches that both end in convolutions, the one farther
    from where they part is the convolution branch.
    """
    if len(operands) != 2 or operands[0] is operands[1]:
        return None
    ends = [backbone(value) for value in operands]
    if ends[0] is ends[1]:
        return None
    first, second = (_distances(value) for value in operands)
    order = {value: k for k, value in enumerate(node.graph.nodes)}
    common = [value for value in first if value in second]
    parting = min(common, key=lambda v: (first[v] + second[v], order[v]), default=None)
    if ends[0] is not None and ends[1] is not None:
        return 0 if parting is None or first[parting] <= second[parting] else 1
    k = 0 if ends[0] is not None else 1
    return None if parting is not None and parting is ends[k] else 1 - k


def backbone(value: fx.Node) -> fx.Node | None:
    """The convolution this value is the activated, moved result of; None when something else made it."""
    for _ in range(_REACH):
        op = op_of(value)
        if op in _CONVOLUTIONS:
            return value
        sources = [source for source in value.all_input_nodes if source.op != "get_attr"]
        if op == "mul" and len(sources) == 2:
            gate = next((k for k in (0, 1) if op_of(sources[k]) in _GATES
                         and sources[k].all_input_nodes == [sources[1 - k]]), None)  # fmt: skip
            if gate is None:
                return None
            value = sources[1 - gate]
        elif len(sources) == 1 and (op in _HANDS_ON or op in ("add", "sub", "mul", "div")):
            value = sources[0]
        else:
            return None
    return None


def _distances(value: fx.Node) -> dict[fx.Node, int]:
    found = {value: 0}
    pending = deque([value])
    while pending:
        at = pending.popleft()
        for source in at.all_input_nodes:
            if source not in found and source.op != "get_attr":
                found[source] = found[at] + 1
                pending.append(source)
    return found
