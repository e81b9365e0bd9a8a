"""Operators that ONNX Runtime's optimizer makes of several, written out as ONNX's own.

No other engine has them, and none has an integer kernel for their weights. ONNX Runtime fuses what is left in float
again when it loads the file. The first node keeps its name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxq.backends import find_target
from onnxq.graph import MICROSOFT, NodeRef, find_opset, get_index, infer_shapes
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.patterns import Edit, Step
from onnxq.passes.state import FloatState, FloatStep

# Names of the parameters of an activation; those of Clip are inputs.
_PARAMETERS: Mapping[str, Sequence[str]] = {
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}
_LAYERNORM_OPSET = 17
_SINGLE = frozenset({"Gelu", "QuickGelu"})
# Attributes of Attention that MultiHeadAttention does not have.
_OTHER_ATTENTION = frozenset({"do_rotary", "past_present_share_buffer", "rotary_embedding_dim"})
_SIZES = "qkv_hidden_sizes"


def write_out_fused(ctx: RunContext, state: FloatState) -> FloatStep:
    """Write convolutions and products with an activation, and normalizations of sums, as the operators they are of."""
    model = state.model
    changed = []
    # Those that another rewrite makes for this target.
    single = frozenset() if "activations" in find_target(ctx.config.target).skips else _SINGLE
    # Ranks say along which axes operands are transposed, and are known behind what the first round writes.
    for _ in range(2):
        own = (node for node in get_index(model).nodes if node.domain == MICROSOFT)
        fused = [node for node in own if node.op_type in _WRITERS.keys() - single]
        if fused:
            edit = Edit(infer_shapes(model))
            written = [node for node in fused if _WRITERS[node.op_type](edit, node)]
            changed += [f"{node.name}: {node.op_type} written out" for node in written]
            model = edit.export()
    return replace(state, model=model), PassReport("fused", tuple(changed))


def _write_conv(edit: Edit, node: NodeRef) -> bool:
    """Conv(x, w, b) + z, then the activation."""
    # In front of the activation, as the kernel adds it.
    sums: list[Step] = [("Add", (name,), {}) for name in node.inputs[3:4] if name]
    parameters = [float(value) for value in node.attrs.get("activation_params", ())]
    steps = [*sums, *_make_activation(edit, node, parameters)]
    _replace_product(edit, node, "Conv", node.inputs[:3], steps)
    return True


def _write_gemm(edit: Edit, node: NodeRef) -> bool:
    """Gemm, then the activation."""
    names = ("activation_alpha", "activation_beta")
    parameters = [float(node.attrs[name]) for name in names if name in node.attrs]
    _replace_product(edit, node, "Gemm", node.inputs, _make_activation(edit, node, parameters))
    return True


def _replace_product(
    edit: Edit, node: NodeRef, op_type: str, inputs: Sequence[str], steps: Sequence[Step]
) -> None:
    attrs = {name: value for name, value in node.attrs.items() if not name.startswith("activation")}
    edit.replace_node(node, op_type, inputs, attrs)
    edit.append(node, steps)


def _make_activation(edit: Edit, node: NodeRef, parameters: Sequence[float]) -> list[Step]:
    """The activation as a node; none where there is none."""
    op_type = str(node.attrs.get("activation", ""))
    if not op_type:
        return []
    if op_type == "Clip":
        # Its ends are inputs in every opset that quantizing leaves.
        ends = zip(("min", "max"), parameters, strict=False)
        return [(op_type, tuple(edit.add_float(node, *end) for end in ends), {})]
    return [(op_type, (), dict(zip(_PARAMETERS.get(op_type, ()), parameters, strict=False)))]


def _write_matmul(edit: Edit, node: NodeRef) -> bool:
    """The product of a and b, either with its last two axes exchanged, times alpha."""
    ranks = [edit.index.find_rank(edit.index.find_input(node, k)) for k in (0, 1)]
    turned = [bool(node.attrs.get(name, 0)) for name in ("transA", "transB")]
    unknown = any(
        turn and (rank is None or rank < 2) for turn, rank in zip(turned, ranks, strict=True)
    )
    if unknown or node.attrs.get("transBatchA", 0) or node.attrs.get("transBatchB", 0):
        return False
    inputs = list(node.inputs)
    # A constant is transposed when constants are computed, so that it is a weight like any other.
    for k, (turn, rank) in enumerate(zip(turned, ranks, strict=True)):
        if turn and rank is not None:
            order = [*range(rank - 2), rank - 1, rank - 2]
            name = f"{inputs[k]}/transposed"
            inputs[k] = edit.insert_before(
                node, "Transpose", [inputs[k]], name, attrs={"perm": order}
            )
    alpha = node.read_float("alpha", 1.0)
    edit.replace_node(node, "MatMul", inputs)
    if alpha != 1.0:
        edit.append(node, [("Mul", (edit.add_float(node, "alpha", alpha),), {})])
    return True


def _write_quick_gelu(edit: Edit, node: NodeRef) -> bool:
    """x times the Sigmoid of alpha x."""
    x = scaled = node.inputs[0]
    alpha = node.read_float("alpha", 1.702)
    if alpha != 1.0:
        scaled = edit.insert_before(
            node, "Mul", [x, edit.add_float(node, "alpha", alpha)], f"{x}/scaled"
        )
    gate = edit.insert_before(node, "Sigmoid", [scaled], f"{x}/gate")
    edit.replace_node(node, "Mul", [x, gate])
    return True


def _write_gelu(edit: Edit, node: NodeRef) -> bool:
    """x (1 + erf(x / sqrt 2)) / 2 of x, to which a bias is added first."""
    return _gate(
        edit, node, {"root": 2**0.5}, ("Div", "scaled", "x", "root"), ("Erf", "erf", "scaled")
    )


def _write_fast_gelu(edit: Edit, node: NodeRef) -> bool:
    """x (1 + tanh(a (x + b x^3))) / 2 of x, to which a bias is added first."""
    return _gate(
        edit,
        node,
        {"cubic": 0.044715, "slope": (2 / np.pi) ** 0.5},
        ("Mul", "square", "x", "x"),
        ("Mul", "cube", "square", "x"),
        ("Mul", "part", "cube", "cubic"),
        ("Add", "polynomial", "x", "part"),
        ("Mul", "scaled", "polynomial", "slope"),
        ("Tanh", "tanh", "scaled"),
    )


def _gate(edit: Edit, node: NodeRef, floats: Mapping[str, float], *steps: Sequence[str]) -> bool:
    """The node becomes x (1 + gate) / 2 of the sum of its inputs. floats: constants, by name.

    steps: operators that compute the gate, each with a name for its result and those of its inputs.
    """
    x = _add_up(edit, node, node.inputs)
    floats = {**floats, "one": 1.0, "half": 0.5}
    results = {name: edit.add_float(node, name, value) for name, value in floats.items()}
    results["x"] = x
    ends = ("Add", "raised", steps[-1][1], "one"), ("Mul", "gated", "x", "raised")
    for op_type, name, *inputs in (*steps, *ends):
        sources = [results[source] for source in inputs]
        results[name] = edit.insert_before(node, op_type, sources, f"{x}/{name}")
    edit.replace_node(node, "Mul", [results["gated"], results["half"]])
    return True


def _write_layernorm(edit: Edit, node: NodeRef) -> bool:
    """LayerNormalization of x + skip + bias, a sum that may be the fourth output."""
    if any(node.outputs[1:3]) or find_opset(edit.index.proto) < _LAYERNORM_OPSET:
        return False
    x, skip, gamma, *more = node.inputs
    # The last Add is the one that may write the fourth output.
    total = _add_up(edit, node, [x, *more[1:2]])
    last = skip
    if any(node.outputs[3:]):
        edit.take_over(node, 3, "Add", [total, last], {})
        total = node.outputs[3]
    else:
        total = _add_up(edit, node, [total, last])
    inputs = [name for name in (total, gamma, *more[:1]) if name]
    edit.take_over(
        node,
        0,
        "LayerNormalization",
        inputs,
        # The default of SkipLayerNormalization in ONNX Runtime.
        {"epsilon": node.attrs.get("epsilon", 1e-12), "axis": -1},
    )
    edit.remove_node(node)
    return True


def _write_attention(edit: Edit, node: NodeRef) -> bool:
    """MultiHeadAttention, which has no weights, of slices of x w + b. Masks and what is added to scores stay."""
    x, weight, bias, mask, past, added, *others = [*node.inputs, *[""] * (6 - len(node.inputs))]
    index = edit.index
    # The weight may be joined of three, which is computed later.
    shape = index.input_shape(node, 1) or (None,)
    masked = index.find_input(node, 3)
    maker = index.find_producer(masked)
    # A vector may be of beginnings, too, which MultiHeadAttention takes for others; this node makes one of ends.
    ends_alone = maker is not None and maker.op_type == "EmbedLayerNormalization"
    other_mask = masked is not None and index.find_rank(masked) != 2 and not ends_alone
    unlike = node.attrs.keys() & _OTHER_ATTENTION
    if (
        other_mask
        or unlike
        or any((past, *others, *node.outputs[1:]))
        or not isinstance(shape[-1], int)
    ):
        return False
    product = edit.insert_before(node, "MatMul", [x, weight], f"{node.name}/projected")
    whole = _add_up(edit, node, [product, bias])
    axis = edit.add_integers(node.scope, f"{node.name}/axis", [-1])
    # Columns of query, key and value, side by side.
    sizes = node.attrs.get(_SIZES) or [shape[-1] // 3] * 3
    bounds = np.cumsum([0, *sizes], dtype=np.int64)
    ends = [edit.add_part(node, "end", bound.reshape(1)) for bound in bounds]
    parts = [
        edit.insert_before(node, "Slice", [whole, *ends[k : k + 2], axis], f"{node.name}/{part}")
        for k, part in enumerate("qkv")
    ]
    attrs = {name: value for name, value in node.attrs.items() if name != _SIZES}
    inputs = [*parts, "", mask, added]
    while not inputs[-1]:
        inputs.pop()
    edit.replace_node(node, "MultiHeadAttention", inputs, attrs, MICROSOFT)
    return True


def _add_up(edit: Edit, node: NodeRef, names: Sequence[str]) -> str:
    """The sum of these tensors, in front of a node."""
    total, *others = filter(None, names)
    for other in others:
        total = edit.insert_before(node, "Add", [total, other], f"{node.name}/sum")
    return total


_WRITERS = {
    "Attention": _write_attention,
    "BiasGelu": _write_gelu,
    "FastGelu": _write_fast_gelu,
    "FusedConv": _write_conv,
    "FusedGemm": _write_gemm,
    "FusedMatMul": _write_matmul,
    "Gelu": _write_gelu,
    "QuickGelu": _write_quick_gelu,
    "SkipLayerNormalization": _write_layernorm,
}
