"""A decoder of one layer, with caches or without, whose answers depend on all tokens before; and texts."""

import numpy as np
import onnx
from onnx import ModelProto, parser

from tests.networks import add_arrays

_CACHED = """
<ir_version: 10, opset_import: ["": 20]>
decoder (
    int64[N,T] input_ids, int64[N,S] attention_mask, int64[N,T] position_ids,
    float[N,1,P,8] past_key, float[N,1,P,8] past_value
) => (float[N,T,V] logits, float[N,1,S,8] present_key, float[N,1,S,8] present_value)
"""
_PLAIN = """
<ir_version: 10, opset_import: ["": 20]>
decoder (int64[N,T] input_ids) => (float[N,T,V] logits)
"""
_BEFORE = """
    total = Shape <start: int = 1, end: int = 2> (input_ids)
    scalar = Squeeze (total)
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    positions = Range (zero, scalar, one)
    first = Constant <value_ints: ints = [0]> ()
    position_ids = Unsqueeze (positions, first)
"""
_BODY = """
    x = Gather (table, input_ids)
    k = MatMul (x, w_key)
    v = MatMul (x, w_value)
    heads = Constant <value_ints: ints = [1]> ()
    query = Unsqueeze (x, heads)
    key_now = Unsqueeze (k, heads)
    value_now = Unsqueeze (v, heads)
    KEYS
    turned = Transpose <perm: ints = [0, 1, 3, 2]> (KEY)
    scores = MatMul (query, turned)
    size = Shape <start: int = 2, end: int = 3> (KEY)
    length = Squeeze (size)
    zero_ = Constant <value_int: int = 0> ()
    one_ = Constant <value_int: int = 1> ()
    known = Range (zero_, length, one_)
    asked_axes = Constant <value_ints: ints = [1, 3]> ()
    asked = Unsqueeze (position_ids, asked_axes)
    seen = LessOrEqual (known, asked)
    none = Constant <value_float: float = 0.0> ()
    hidden = Constant <value_float: float = -10000.0> ()
    mask = Where (seen, none, hidden)
    masked = Add (scores, mask)
    weights = Softmax (masked)
    mixed = MatMul (weights, VALUE)
    flat = Squeeze (mixed, heads)
    sum = Add (x, flat)
    out = Transpose (table)
    logits = MatMul (sum, out)
"""
_JOIN = """present_key = Concat <axis: int = 2> (past_key, key_now)
    present_value = Concat <axis: int = 2> (past_value, value_now)"""
_KINDS = (("past", "past_key_values"), ("present", "present"))


# The mask among the tokens of a run, as genai's builder spreads it over those of the caches: for prompts, or one token.
_SQUARE = """
    asking = Unsqueeze (position_ids, heads)
    column = Transpose <perm: ints = [0, 2, 1]> (asking)
    among = LessOrEqual (asking, column)
    tokens = Shape <start: int = 1, end: int = 2> (input_ids)
    wide_shape = Concat <axis: int = 0> (heads, tokens, size)
    wide = Expand (among, wide_shape)
    wide_heads = Unsqueeze (wide, heads)
    seen = And (near, wide_heads)
"""


def make_decoder(*, caches: bool = True, tokens: int = 256, noise: float = 0.0, in_steps: bool = True) -> ModelProto:
    """A decoder. tokens: of its vocabulary. noise: added to its weights, as quantization does.

    in_steps: it takes several tokens behind caches, too.
    """
    names = ("present_key", "present_value") if caches else ("key_now", "value_now")
    body = _BODY.replace("KEYS", _JOIN if caches else "").replace("KEY", names[0]).replace("VALUE", names[1])
    if not in_steps:
        body = body.replace("seen = LessOrEqual (known, asked)", f"near = LessOrEqual (known, asked) {_SQUARE}")
    proto = parser.parse_model(f"{_CACHED if caches else _PLAIN} {{ {'' if caches else _BEFORE} {body} }}")
    # The text form has no names with dots.
    renamed = {f"{kind}_{part}": f"{full}.0.{part}" for kind, full in _KINDS for part in ("key", "value")}
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = renamed.get(value.name, value.name)
    for node in proto.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    for name, shape in (("table", (tokens, 8)), ("w_key", (8, 8)), ("w_value", (8, 8))):
        value = rng.standard_normal(shape) + noise * other.standard_normal(shape)
        add_arrays(proto.graph, **{name: value.astype(np.float32)})
    proto.graph.output[0].type.tensor_type.shape.dim[2].dim_value = tokens
    onnx.checker.check_model(proto)
    return proto


def make_text(lines: int = 40) -> bytes:
    """Lines of ASCII of about 30 bytes each, none like another."""
    return b"".join(b"line %d says %d and %d again\n" % (k, k * k, k * 7919) for k in range(lines))
