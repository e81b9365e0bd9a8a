"""One trained decoder in the layouts in which exporters write such networks; all of them compute the same.

GENAI: onnxruntime-genai's model builder, with GroupQueryAttention that turns queries and keys itself. FUSED: what ONNX
Runtime's transformer optimizer makes, with RotaryEmbedding and MultiHeadAttention. STANDARD: opset 23's Attention,
RotaryEmbedding and RMSNormalization. PLAIN: operators of opset 17 alone, as TorchScript's exporter writes them. MERGED:
two of PLAIN in an If on `use_cache_branch`, with one set of weights, as Optimum merges them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tests.decoders.sizes import SIZES, load_weights

Array = NDArray[Any]
MICROSOFT = "com.microsoft"
# Positions that the tables of angles hold.
LONGEST = 1024
_INTS = int(TensorProto.INT64)


class Layout(Enum):
    GENAI = "genai"
    FUSED = "fused"
    STANDARD = "standard"
    PLAIN = "plain"
    MERGED = "merged"


@dataclass(eq=False)
class Writer:
    """The nodes of one graph. stored: the initializers, which bodies of If share with the graph around them."""

    dtype: Any
    stored: dict[str, Array] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    prefix: str = ""

    def keep(self, name: str, value: Array, *, as_is: bool = False) -> str:
        self.stored[name] = value if as_is or value.dtype != np.float32 else value.astype(self.dtype)
        return name

    def ints(self, *values: int) -> str:
        return self.keep(f"ints{list(values)}", np.array(values, np.int64))

    def number(self, value: float) -> str:
        return self.keep(f"number{value}", np.array(value, np.float32))

    def op(
        self, kind: str, name: str, *inputs: str, out: str | Sequence[str] = "", domain: str = "", **attrs: Any
    ) -> str:
        """Add a node; the name of its first output."""
        made = [out] if isinstance(out, str) else list(out)
        made[0] = made[0] or f"{self.prefix}{name}/output_0"
        self.nodes.append(helper.make_node(kind, inputs, made, f"{self.prefix}{name}", domain=domain, **attrs))
        return made[0]


def make_decoder(
    layout: Layout, dtype: Any = np.float32, *, tied: str = "", packed: bool = False, opset: int = 0
) -> onnx.ModelProto:
    """The decoder.

    tied: how one table serves the Gather and the last MatMul: "head" looks rows up behind a Transpose of the head's
    weight, "table" multiplies by a Transpose of the table, "": stored twice. packed: one product for query, key and
    value, of layout GENAI.
    """
    writer = Writer(np.dtype(dtype))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs, outputs = _declare(kind, positions=layout not in (Layout.GENAI, Layout.PLAIN, Layout.MERGED))
    if layout is Layout.MERGED:
        inputs.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
        branches = []
        for name, cached in (("then", True), ("else", False)):
            inner = Writer(writer.dtype, writer.stored, prefix=f"{name}/")
            made = _write_body(inner, Layout.PLAIN, cached=cached, tied=tied)
            values = [helper.make_tensor_value_info(each, kind, None) for each in made]
            branches.append(helper.make_graph(inner.nodes, f"{name}_branch", [], values))
        names = [value.name for value in outputs]
        given = dict(zip(("then_branch", "else_branch"), branches, strict=True))
        writer.nodes.append(helper.make_node("If", ["use_cache_branch"], names, "optimum::if", **given))
    else:
        made = _write_body(writer, layout, cached=True, tied=tied, packed=packed)
        assert made == [value.name for value in outputs]
    stored = [numpy_helper.from_array(value, name) for name, value in writer.stored.items()]
    graph = helper.make_graph(writer.nodes, "main_graph", inputs, outputs, stored)
    default = 23 if layout is Layout.STANDARD else 17
    opsets = [helper.make_opsetid("", opset or default)]
    if layout in (Layout.GENAI, Layout.FUSED):
        opsets.append(helper.make_opsetid(MICROSOFT, 1))
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def _declare(kind: int, *, positions: bool) -> tuple[list[Any], list[Any]]:
    value = helper.make_tensor_value_info
    inputs = [
        value("input_ids", _INTS, ["batch_size", "sequence_length"]),
        value("attention_mask", _INTS, ["batch_size", "total_sequence_length"]),
    ]
    if positions:
        inputs.append(value("position_ids", _INTS, ["batch_size", "sequence_length"]))
    outputs = [value("logits", kind, ["batch_size", "sequence_length", SIZES.vocabulary])]
    for layer in range(SIZES.layers):
        for part in ("key", "value"):
            around = ["batch_size", SIZES.key_heads]
            past = [*around, "past_sequence_length", SIZES.head]
            inputs.append(value(f"past_key_values.{layer}.{part}", kind, past))
            outputs.append(value(f"present.{layer}.{part}", kind, [*around, "total_sequence_length", SIZES.head]))
    return inputs, outputs


def _write_body(w: Writer, layout: Layout, *, cached: bool, tied: str, packed: bool = False) -> list[str]:
    """The network; the names of its outputs, which in bodies of If have the prefix."""
    weights = load_weights()
    block = {Layout.GENAI: _Genai, Layout.FUSED: _Fused, Layout.STANDARD: _Standard, Layout.PLAIN: _Plain}[layout]
    parts = block(w, weights, cached, packed)
    table = weights["embed.weight"]
    if tied == "head":
        w.keep("lm_head.MatMul.weight", table.T.copy())
        rows = w.op("Transpose", "/model/embed_tokens/Transpose", "lm_head.MatMul.weight", perm=[1, 0])
    else:
        rows = w.keep("model.embed_tokens.weight", table)
    x = w.op("Gather", "/model/embed_tokens/Gather", rows, "input_ids")
    parts.prepare()
    branch, presents = "", []
    for layer in range(SIZES.layers):
        normed, x = parts.norm(f"layers.{layer}.input_norm", x, branch)
        mixed, made = parts.attend(layer, normed)
        presents += made
        branch = parts.project(f"layers.{layer}.o_proj", mixed)
        normed, x = parts.norm(f"layers.{layer}.post_norm", x, branch)
        branch = parts.feed(layer, normed)
    normed, _ = parts.norm("norm", x, branch)
    if tied == "table":
        head = w.op("Transpose", "/lm_head/Transpose", rows, perm=[1, 0])
    else:
        head = w.keep("lm_head.MatMul.weight", table.T.copy())
    return [w.op("MatMul", "/lm_head/MatMul", normed, head, out=f"{w.prefix}logits"), *presents]


@dataclass(eq=False)
class _Parts:
    """The pieces that all layouts share."""

    w: Writer
    weights: dict[str, Array]
    cached: bool
    packed: bool

    def prepare(self) -> None:
        """Write what all layers read."""

    def project(self, name: str, x: str) -> str:
        held = self.w.keep(f"model.{name}.MatMul.weight", self.weights[f"{name}.weight"].T.copy())
        return self.w.op("MatMul", f"/model/{name}/MatMul", x, held)

    def gain(self, name: str) -> str:
        return self.w.keep(f"model.{name}.weight", self.weights[f"{name}.weight"])

    def feed(self, layer: int, x: str) -> str:
        at = f"/model/layers.{layer}/mlp"
        gate, up = (self.project(f"layers.{layer}.{name}", x) for name in ("gate_proj", "up_proj"))
        gated = self.w.op("Mul", f"{at}/act_fn/Mul", gate, self.w.op("Sigmoid", f"{at}/act_fn/Sigmoid", gate))
        return self.project(f"layers.{layer}.down_proj", self.w.op("Mul", f"{at}/Mul", gated, up))

    def norm(self, name: str, x: str, branch: str) -> tuple[str, str]:
        """The normed sum of x and the branch, and the sum. branch: "" at the start."""
        if branch:
            x = self.w.op("Add", f"/model/{name}/Add", x, branch)
        return self.norm_alone(name, x), x

    def norm_alone(self, name: str, x: str) -> str:
        raise NotImplementedError

    def attend(self, layer: int, x: str) -> tuple[str, list[str]]:
        raise NotImplementedError

    def tell_caches(self, layer: int) -> tuple[list[str], list[str]]:
        kinds = ("key", "value")
        past = [f"past_key_values.{layer}.{kind}" for kind in kinds]
        return past, [f"{self.w.prefix}present.{layer}.{kind}" for kind in kinds]

    def keep_angles(self) -> tuple[str, str]:
        steps = np.arange(0, SIZES.head, 2) / SIZES.head
        angles = np.outer(np.arange(LONGEST), 1.0 / SIZES.theta**steps).astype(np.float32)
        return self.w.keep("cos_cache", np.cos(angles)), self.w.keep("sin_cache", np.sin(angles))


class _Skipping(_Parts):
    """Norms that add the residual as well, of com.microsoft."""

    def norm(self, name: str, x: str, branch: str) -> tuple[str, str]:
        at = f"/model/{name}"
        if not branch:
            # Of ONNX Runtime's own operators the only one in ONNX's domain.
            normed = self.w.op(
                "SimplifiedLayerNormalization",
                f"{at}/LayerNorm",
                x,
                self.gain(name),
                axis=-1,
                epsilon=1e-5,
                stash_type=1,
            )
            return normed, x
        last = name == "norm"
        out = [f"{at}/output_0"] if last else [f"{at}/output_0", "", "", f"{at}/output_3"]
        self.w.op(
            "SkipSimplifiedLayerNormalization", f"{at}/SkipLayerNorm", x, branch, self.gain(name),
            out=out, domain=MICROSOFT, epsilon=1e-5,
        )  # fmt: skip
        return out[0], out[-1]


class _Genai(_Skipping):
    def prepare(self) -> None:
        w, at = self.w, "/model/attn_mask_reformat/attn_mask_subgraph"
        seen = w.op("ReduceSum", f"{at}/ReduceSum", "attention_mask", w.ints(1), keepdims=0)
        last = w.op("Sub", f"{at}/Sub", seen, w.ints(1))
        self.seqlens = w.op("Cast", f"{at}/Sub/Cast", last, to=TensorProto.INT32)
        one = w.keep("int1", np.array(1, np.int64))
        length = w.op("Gather", f"{at}/Gather", w.op("Shape", f"{at}/Shape", "attention_mask"), one, axis=0)
        self.total = w.op("Cast", f"{at}/Gather/Cast", length, to=TensorProto.INT32)
        self.angles = self.keep_angles()

    def attend(self, layer: int, x: str) -> tuple[str, list[str]]:
        at, names = f"layers.{layer}", ("q_proj", "k_proj", "v_proj")
        if self.packed:
            self.weights[f"{at}.qkv_proj.weight"] = np.concatenate([self.weights[f"{at}.{n}.weight"] for n in names])
            given = [self.project(f"{at}.qkv_proj", x), "", ""]
        else:
            given = [self.project(f"{at}.{name}", x) for name in names]
        past, presents = self.tell_caches(layer)
        mixed = f"/model/{at}/attn/GroupQueryAttention/output_0"
        self.w.op(
            "GroupQueryAttention", f"/model/{at}/attn/GroupQueryAttention", *given, *past, self.seqlens, self.total,
            *self.angles, out=[mixed, *presents], domain=MICROSOFT, num_heads=SIZES.heads, kv_num_heads=SIZES.key_heads,
            scale=SIZES.head**-0.5, do_rotary=1, rotary_interleaved=0, local_window_size=-1, softcap=0.0,
        )  # fmt: skip
        return mixed, presents


def _write_mask(w: Writer) -> str:
    """0 where a query sees a key, else the lowest number: [batch, 1, queries, keys]."""
    keys = w.op("Gather", "/mask/keys", w.op("Shape", "/mask/Shape", "attention_mask"), w.ints(1))
    queries = w.op("Gather", "/mask/queries", w.op("Shape", "/mask/Shape_1", "input_ids"), w.ints(1))
    zero, one = w.keep("int0", np.array(0, np.int64)), w.keep("int1", np.array(1, np.int64))
    end, count = w.op("Squeeze", "/mask/end", keys), w.op("Squeeze", "/mask/count", queries)
    start = w.op("Sub", "/mask/start", end, count)
    at = w.op("Unsqueeze", "/mask/at", w.op("Range", "/mask/at/Range", start, end, one), w.ints(1))
    ahead = w.op("Greater", "/mask/ahead", w.op("Range", "/mask/Range", zero, end, one), at)
    unseen = w.op("Equal", "/mask/unseen", w.op("Unsqueeze", "/mask/mask", "attention_mask", w.ints(1, 2)), zero)
    lowest = w.keep("lowest", np.array(np.finfo(w.dtype).min, w.dtype), as_is=True)
    nothing = w.keep("nothing", np.zeros((), w.dtype), as_is=True)
    return w.op("Where", "/mask/Where", w.op("Or", "/mask/Or", ahead, unseen), lowest, nothing)


class _Fused(_Skipping):
    """MultiHeadAttention has as many heads of keys as of queries: those of the weights are repeated when asked for.

    Its caches have them as well; so this layout's caches are cut to the first of each group, and repeated when read.
    """

    def prepare(self) -> None:
        self.mask, self.angles = _write_mask(self.w), self.keep_angles()

    def attend(self, layer: int, x: str) -> tuple[str, list[str]]:
        w, at, groups = self.w, f"layers.{layer}", SIZES.heads // SIZES.key_heads
        for name in ("k_proj", "v_proj"):
            heads = self.weights[f"{at}.{name}.weight"].reshape(SIZES.key_heads, SIZES.head, -1)
            self.weights[f"{at}.{name}.weight"] = heads.repeat(groups, axis=0).reshape(SIZES.width, -1)
        query, key, value = (self.project(f"{at}.{name}", x) for name in ("q_proj", "k_proj", "v_proj"))
        turned = [
            w.op("RotaryEmbedding", f"/model/{at}/attn/{name}/RotaryEmbedding", one, "position_ids", *self.angles,
                 domain=MICROSOFT, interleaved=0, num_heads=0, rotary_embedding_dim=0)
            for name, one in (("q_rotary", query), ("k_rotary", key))
        ]  # fmt: skip
        past, presents = self.tell_caches(layer)
        wide = w.keep("wide", np.repeat(np.arange(SIZES.key_heads), groups))
        read = [w.op("Gather", f"/model/{at}/attn/{k}/wide", one, wide, axis=1) for k, one in enumerate(past)]
        made = [f"/model/{at}/attn/present_{k}" for k in range(2)]
        mixed = f"/model/{at}/attn/MultiHeadAttention/output_0"
        w.op(
            "MultiHeadAttention", f"/model/{at}/attn/MultiHeadAttention", *turned, value, "", "", self.mask, *read,
            out=[mixed, *made], domain=MICROSOFT, num_heads=SIZES.heads, scale=SIZES.head**-0.5,
        )  # fmt: skip
        first = w.keep("first", np.arange(0, SIZES.heads, groups))
        for k, name in enumerate(presents):
            w.op("Gather", f"/model/{at}/attn/{k}/first", made[k], first, out=name, axis=1)
        return mixed, presents


class _Standard(_Parts):
    def prepare(self) -> None:
        self.mask, self.angles = _write_mask(self.w), self.keep_angles()

    def norm_alone(self, name: str, x: str) -> str:
        return self.w.op("RMSNormalization", f"/model/{name}/RMSNorm", x, self.gain(name), axis=-1, epsilon=1e-5)

    def attend(self, layer: int, x: str) -> tuple[str, list[str]]:
        w, at = self.w, f"layers.{layer}"
        query, key, value = (self.project(f"{at}.{name}", x) for name in ("q_proj", "k_proj", "v_proj"))
        turned = [
            w.op("RotaryEmbedding", f"/model/{at}/attn/{name}/RotaryEmbedding", one, *self.angles, "position_ids",
                 num_heads=heads)
            for name, one, heads in (("q_rotary", query, SIZES.heads), ("k_rotary", key, SIZES.key_heads))
        ]  # fmt: skip
        past, presents = self.tell_caches(layer)
        mixed = f"/model/{at}/attn/Attention/output_0"
        w.op(
            "Attention", f"/model/{at}/attn/Attention", *turned, value, self.mask, *past, out=[mixed, *presents],
            q_num_heads=SIZES.heads, kv_num_heads=SIZES.key_heads, scale=SIZES.head**-0.5,
        )  # fmt: skip
        return mixed, presents


class _Plain(_Parts):
    def prepare(self) -> None:
        w = self.w
        self.mask = _write_mask(w)
        cos, sin = self.keep_angles()
        keys = w.op("Gather", "/rotary/keys", w.op("Shape", "/rotary/Shape", "attention_mask"), w.ints(1))
        queries = w.op("Gather", "/rotary/queries", w.op("Shape", "/rotary/Shape_1", "input_ids"), w.ints(1))
        start = w.op("Sub", "/rotary/start", keys, queries)
        self.turn = []
        for name, table in (("cos", cos), ("sin", sin)):
            rows = w.op("Slice", f"/rotary/{name}/Slice", table, start, keys, w.ints(0))
            self.turn.append(w.op("Concat", f"/rotary/{name}/Concat", rows, rows, axis=-1))

    def norm_alone(self, name: str, x: str) -> str:
        w, at = self.w, f"/model/{name}"
        mean = w.op("ReduceMean", f"{at}/ReduceMean", w.op("Pow", f"{at}/Pow", x, w.number(2.0)), axes=[-1])
        root = w.op("Sqrt", f"{at}/Sqrt", w.op("Add", f"{at}/epsilon", mean, w.number(1e-5)))
        return w.op("Mul", f"{at}/Mul_1", self.gain(name), w.op("Mul", f"{at}/Mul", x, w.op(
            "Div", f"{at}/Div", w.number(1.0), root)))  # fmt: skip

    def split(self, at: str, x: str, heads: int) -> str:
        shaped = self.w.op("Reshape", f"{at}/Reshape", x, self.w.ints(0, 0, heads, SIZES.head))
        return self.w.op("Transpose", f"{at}/Transpose", shaped, perm=[0, 2, 1, 3])

    def rotate(self, at: str, x: str) -> str:
        w, half = self.w, SIZES.head // 2
        first, second = (
            w.op("Slice", f"{at}/Slice_{k}", x, w.ints(start), w.ints(end), w.ints(3))
            for k, (start, end) in enumerate(((0, half), (half, 2**62)))
        )
        turned = w.op("Concat", f"{at}/Concat", w.op("Neg", f"{at}/Neg", second), first, axis=-1)
        straight = w.op("Mul", f"{at}/Mul", x, self.turn[0])
        return w.op("Add", f"{at}/Add", straight, w.op("Mul", f"{at}/Mul_1", turned, self.turn[1]))

    def widen(self, at: str, x: str) -> str:
        w, groups = self.w, SIZES.heads // SIZES.key_heads
        apart = w.op("Unsqueeze", f"{at}/Unsqueeze", x, w.ints(2))
        wide = w.op("Expand", f"{at}/Expand", apart, w.ints(1, 1, groups, 1, 1))
        return w.op("Reshape", f"{at}/Reshape_wide", wide, w.ints(0, SIZES.heads, -1, SIZES.head))

    def attend(self, layer: int, x: str) -> tuple[str, list[str]]:
        w, at = self.w, f"/model/layers.{layer}/attn"
        heads = {"q_proj": SIZES.heads, "k_proj": SIZES.key_heads, "v_proj": SIZES.key_heads}
        query, key, value = (
            self.split(f"{at}/{name}", self.project(f"layers.{layer}.{name}", x), count)
            for name, count in heads.items()
        )
        query, key = self.rotate(f"{at}/q", query), self.rotate(f"{at}/k", key)
        past, presents = self.tell_caches(layer)
        for k, (held, made, one) in enumerate(zip(past, presents, (key, value), strict=True)):
            given = (held, one) if self.cached else (one,)
            w.op("Concat", f"{at}/Concat_{k}", *given, out=made, axis=2)
        key, value = (self.widen(f"{at}/{k}", one) for k, one in enumerate(presents))
        scores = w.op("MatMul", f"{at}/MatMul", query, w.op("Transpose", f"{at}/Transpose_k", key, perm=[0, 1, 3, 2]))
        scaled = w.op("Mul", f"{at}/Mul", scores, w.number(SIZES.head**-0.5))
        shares = w.op("Softmax", f"{at}/Softmax", w.op("Add", f"{at}/Add", scaled, self.mask), axis=-1)
        mixed = w.op("MatMul", f"{at}/MatMul_1", shares, value)
        back = w.op("Transpose", f"{at}/Transpose", mixed, perm=[0, 2, 1, 3])
        return w.op("Reshape", f"{at}/Reshape", back, w.ints(0, 0, SIZES.width)), presents
