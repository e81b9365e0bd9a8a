"""Attention with masks of every kind, positions, caches."""

import numpy as np

from tests.motifs.net import BOOL, FLOAT, INT64, TOKENS, Motif, Net, Value, floats, ints, named

HEADS, WIDTH = 2, 4


def split_heads(net: Net, x: Value) -> str:
    """(N, heads, T, width)."""
    wide = net.linear(x, HEADS * WIDTH)
    return net.op("Transpose", net.op("Reshape", wide, ints(0, 0, HEADS, WIDTH)), perm=[0, 2, 1, 3])


def joined(net: Net, scores: str, value: str, length: int) -> Value:
    """Softmax, the weighted sum, the heads beside each other, the projection."""
    mixed = net.op("MatMul", net.op("Softmax", scores, axis=3), value)
    flat = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), ints(0, 0, HEADS * WIDTH))
    return net.linear(Value(flat, (length, HEADS * WIDTH)), 8)


def scored(net: Net, query: str, key: str) -> str:
    """Scaled products of queries and keys."""
    turned = net.op("Transpose", key, perm=[0, 1, 3, 2])
    return net.op("Div", net.op("MatMul", query, turned), floats(WIDTH**0.5))


def self_attention(net: Net, x: Value) -> Value:
    query, key, value = (split_heads(net, x) for _ in range(3))
    return joined(net, scored(net, query, key), value, x.shape[0])


def additive_mask(net: Net, x: Value, low: float) -> Value:
    """The mask is an input of floats that is added to the scores; the first key is never masked."""
    length = x.shape[0]

    def mask(rng: np.random.Generator) -> np.ndarray:
        hidden = rng.random((1, 1, 1, length)) < 0.3
        hidden[..., 0] = False
        return np.where(hidden, np.float32(low), np.float32(0))

    query, key, value = (split_heads(net, x) for _ in range(3))
    name = net.feed(FLOAT, ["N", 1, 1, length], mask)
    return joined(net, net.op("Add", scored(net, query, key), name), value, length)


mask_of_infinities = named("mask_of_infinities", additive_mask, -np.inf)
mask_of_float_min = named("mask_of_float_min", additive_mask, float(np.finfo(np.float32).min))
mask_of_ten_thousand = named("mask_of_ten_thousand", additive_mask, -1e4)


def padding(net: Net, x: Value) -> str:
    """BERT's mask: int64, 1 where there is a token."""
    length = x.shape[0]
    return net.feed(INT64, ["N", length], lambda rng: np.arange(length)[None] < rng.integers(1, length + 1, (1, 1)))


def mask_of_integers(net: Net, x: Value) -> Value:
    """As BERT is exported: (1 - mask) times the lowest float."""
    for sample in net.samples:
        assert sample
    mask = padding(net, x)
    for sample in net.samples:
        sample[mask] = sample[mask].astype(np.int64)
    wide = net.op("Cast", net.op("Unsqueeze", mask, ints(1, 2)), to=FLOAT)
    low = floats(np.finfo(np.float32).min).reshape(())
    hidden = net.op("Mul", net.op("Sub", floats(1).reshape(()), wide), low)
    query, key, value = (split_heads(net, x) for _ in range(3))
    return joined(net, net.op("Add", scored(net, query, key), hidden), value, x.shape[0])


def mask_of_booleans(net: Net, x: Value) -> Value:
    """Where(mask, scores, -inf)."""
    length = x.shape[0]
    mask = net.feed(
        BOOL, ["N", 1, 1, length], lambda rng: (np.arange(length) % 3 != rng.integers(1, 3))[None, None, None]
    )
    query, key, value = (split_heads(net, x) for _ in range(3))
    scores = net.op("Where", mask, scored(net, query, key), floats(-np.inf).reshape(()))
    return joined(net, scores, value, length)


def causal_mask(net: Net, x: Value) -> Value:
    """Of Range and Less, by Shape."""
    length = net.op("Squeeze", net.dims(x, 1, 2), ints(0))
    steps = net.op("Range", np.array(0), length, np.array(1))
    later = net.op("Less", net.op("Unsqueeze", steps, ints(1)), net.op("Unsqueeze", steps, ints(0)))
    query, key, value = (split_heads(net, x) for _ in range(3))
    low = floats(np.finfo(np.float32).min).reshape(())
    scores = net.op("Where", later, low, scored(net, query, key))
    return joined(net, scores, value, x.shape[0])


def causal_mask_stored(net: Net, x: Value) -> Value:
    """A stored triangle larger than the scores is cut to them and added; -inf above the diagonal."""
    triangle = np.triu(np.full((80, 80), -np.inf, np.float32), 1)
    length = net.dims(x, 1, 2)
    rows = net.op("Slice", triangle, ints(0), length, ints(0))
    mask = net.op("Slice", rows, ints(0), length, ints(1))
    query, key, value = (split_heads(net, x) for _ in range(3))
    return joined(net, net.op("Add", scored(net, query, key), mask), value, x.shape[0])


def causal_mask_of_trilu(net: Net, x: Value) -> Value:
    shape = net.op("Concat", net.dims(x, 1, 2), net.dims(x, 1, 2), axis=0)
    full = net.op("Expand", floats(-np.inf).reshape(()), shape)
    query, key, value = (split_heads(net, x) for _ in range(3))
    mask = net.op("Trilu", full, np.array(1), upper=1)
    return joined(net, net.op("Add", scored(net, query, key), mask), value, x.shape[0])


def position_bias(net: Net, x: Value) -> Value:
    """T5: a table of distances, looked up for each pair of positions."""
    length = x.shape[0]
    steps = np.arange(length)
    distance = np.clip(steps[None] - steps[:, None], -3, 3) + 3
    table = net.weight(7, HEADS)
    bias = net.op("Unsqueeze", net.op("Transpose", net.op("Gather", table, distance), perm=[2, 0, 1]), ints(0))
    query, key, value = (split_heads(net, x) for _ in range(3))
    return joined(net, net.op("Add", scored(net, query, key), bias), value, length)


def turned_positions(net: Net, x: Value, of: str) -> str:
    """Rotary: the halves of each head turned by angles that a table holds."""
    angles = np.arange(128)[:, None] * np.array([1.0, 0.1])
    steps = net.op("Range", np.array(0), net.op("Squeeze", net.dims(x, 1, 2), ints(0)), np.array(1))
    both = np.concatenate([angles, angles], 1)
    cosine, sine = (net.op("Gather", f(both).astype(np.float32), steps) for f in (np.cos, np.sin))
    left = net.op("Slice", of, ints(0), ints(2), ints(3))
    right = net.op("Slice", of, ints(2), ints(2**31 - 1), ints(3))
    crossed = net.op("Concat", net.op("Neg", right), left, axis=3)
    return net.op("Add", net.op("Mul", of, cosine), net.op("Mul", crossed, sine))


def rotary_attention(net: Net, x: Value) -> Value:
    query, key = (turned_positions(net, x, split_heads(net, x)) for _ in range(2))
    return joined(net, scored(net, query, key), split_heads(net, x), x.shape[0])


def cached_attention(net: Net, x: Value) -> Value:
    """Keys and values of the past are inputs, those of now are outputs with them."""
    caches = []
    for _ in range(2):
        shape = (1, HEADS, 3, WIDTH)
        past = net.feed(FLOAT, ["N", HEADS, "P", WIDTH], lambda rng, s=shape: rng.standard_normal(s).astype("f4"))
        caches.append(net.op("Concat", past, split_heads(net, x), axis=2))
        net.give(caches[-1], FLOAT, ["N", HEADS, None, WIDTH])
    key, value = caches
    return joined(net, scored(net, split_heads(net, x), key), value, x.shape[0])


def cross_attention(net: Net, x: Value) -> Value:
    """Keys and values of another input."""
    name = net.feed(FLOAT, ["N", 5, 4], lambda rng: rng.standard_normal((1, 5, 4)).astype("f4"))
    other = Value(name, (5, 4))
    return joined(net, scored(net, split_heads(net, x), split_heads(net, other)), split_heads(net, other), x.shape[0])


def shared_keys(net: Net, x: Value) -> Value:
    """Multi-query: one head of keys and values, expanded to all."""
    query = split_heads(net, x)
    shape = net.op("Shape", query)
    key, value = (net.op("Expand", net.op("Unsqueeze", net.linear(x, WIDTH), ints(1)), shape) for _ in range(2))
    return joined(net, scored(net, query, key), value, x.shape[0])


def linear_attention(net: Net, x: Value) -> Value:
    """Without softmax: keys and values are multiplied first."""
    query, key, value = (split_heads(net, x) for _ in range(3))
    key = net.op("Softmax", key, axis=2)
    context = net.op("MatMul", net.op("Transpose", key, perm=[0, 1, 3, 2]), value)
    mixed = net.op("MatMul", net.op("Sigmoid", query), context)
    flat = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), ints(0, 0, HEADS * WIDTH))
    return Value(flat, (x.shape[0], HEADS * WIDTH))


def learned_queries(net: Net, x: Value) -> Value:
    """DETR: stored queries, expanded to the batch."""
    shape = net.op("Concat", net.dims(x, 0, 1), ints(4, 8), axis=0)
    queries = Value(net.op("Expand", net.weight(1, 4, 8), shape), (4, 8))
    return joined(net, scored(net, split_heads(net, queries), split_heads(net, x)), split_heads(net, x), 4)


def attention_operator(net: Net, x: Value) -> Value:
    """The operator of opset 23 on three-axis inputs."""
    parts = [net.linear(x, HEADS * WIDTH) for _ in range(3)]
    name = net.op("Attention", *parts, q_num_heads=HEADS, kv_num_heads=HEADS, is_causal=1)
    return net.linear(Value(name, (x.shape[0], HEADS * WIDTH)), 8)


def attention_of_booleans(net: Net, x: Value) -> Value:
    """The operator with a mask of booleans as input, shared keys and a cap."""
    length = x.shape[0]
    mask = net.feed(
        BOOL, [length, length], lambda rng: (rng.random((length, length)) < 0.7) | np.eye(length, dtype=bool)
    )
    parts = [net.linear(x, width) for width in (HEADS * WIDTH, WIDTH, WIDTH)]
    name = net.op("Attention", *parts, mask, q_num_heads=HEADS, kv_num_heads=1, softcap=10.0)
    return net.linear(Value(name, (length, HEADS * WIDTH)), 8)


def attention_of_infinities(net: Net, x: Value) -> Value:
    """The operator on heads, a mask of -inf, keys and values of the past, those of now as outputs."""
    length = x.shape[0]
    shape = (1, HEADS, 3, WIDTH)
    caches = [net.feed(FLOAT, ["N", *shape[1:]], lambda rng: rng.standard_normal(shape).astype("f4")) for _ in range(2)]

    def mask(rng: np.random.Generator) -> np.ndarray:
        hidden = rng.random((1, 1, length, length + 3)) < 0.3
        hidden[..., 0] = False
        return np.where(hidden, np.float32(-np.inf), np.float32(0))

    name = net.feed(FLOAT, ["N", 1, length, length + 3], mask)
    parts = [split_heads(net, x) for _ in range(3)]
    mixed, key, value = net.ops("Attention", 3, *parts, name, *caches)
    net.give(key)
    net.give(value)
    flat = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), ints(0, 0, HEADS * WIDTH))
    return net.linear(Value(flat, (length, HEADS * WIDTH)), 8)


def rotary_operator(net: Net, x: Value) -> Value:
    """The operator of opset 23, by positions that are an input."""
    length = x.shape[0]
    angles = np.arange(128)[:, None] * np.array([1.0, 0.1])
    tables = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    positions = net.feed(INT64, ["N", length], lambda rng: np.arange(length)[None] + rng.integers(0, 9, (1, 1)))
    query, key = (net.op("RotaryEmbedding", split_heads(net, x), *tables, positions) for _ in range(2))
    return joined(net, scored(net, query, key), split_heads(net, x), length)


def scattered_cache(net: Net, x: Value) -> Value:
    """Keys and values are written into caches that are inputs, at positions that are an input."""
    length = x.shape[0]
    shape = (1, HEADS, length + 2, WIDTH)
    place = net.feed(INT64, ["N"], lambda rng: rng.integers(0, 3, 1))
    caches = []
    for _ in range(2):
        past = net.feed(FLOAT, ["N", *shape[1:]], lambda rng: rng.standard_normal(shape).astype("f4"))
        caches.append(net.op("TensorScatter", past, split_heads(net, x), place, axis=2))
        net.give(caches[-1])
    return joined(net, scored(net, split_heads(net, x), caches[0]), caches[1], length)


def linear_attention_operator(net: Net, x: Value) -> Value:
    """The operator of opset 27: a state that is updated token by token."""
    parts = [net.linear(x, HEADS * WIDTH) for _ in range(3)]
    past = net.feed(
        FLOAT, ["N", HEADS, WIDTH, WIDTH], lambda rng: rng.standard_normal((1, HEADS, WIDTH, WIDTH)).astype("f4")
    )
    mixed, state = net.ops(
        "LinearAttention", 2, *parts, past, q_num_heads=HEADS, kv_num_heads=HEADS, update_rule="linear"
    )
    net.give(state)
    return net.linear(Value(mixed, (x.shape[0], HEADS * WIDTH)), 8)


def embedding(net: Net, x: Value) -> Value:
    """Ids as input; their rows are added, with rows of positions."""
    length, width = x.shape
    ids = net.feed(INT64, ["N", length], lambda rng: rng.integers(0, 20, (1, length)))
    words = net.op("Gather", net.weight(20, width, fan=1), ids)
    return Value(net.op("Add", x, net.op("Add", words, net.weight(1, length, width, fan=4))), x.shape)


MOTIFS = (
    *(Motif(build, TOKENS) for build in (
        self_attention, mask_of_infinities, mask_of_float_min, mask_of_ten_thousand, mask_of_integers, position_bias,
        cached_attention, cross_attention, linear_attention, embedding,
    )),
    Motif(shared_keys, TOKENS, 8), Motif(learned_queries, TOKENS, 8), Motif(mask_of_booleans, TOKENS, 9),
    Motif(causal_mask_stored, TOKENS, 10), Motif(causal_mask, TOKENS, 11), Motif(rotary_attention, TOKENS, 11),
    Motif(causal_mask_of_trilu, TOKENS, 14), Motif(attention_operator, TOKENS, 23),
    Motif(attention_of_booleans, TOKENS, 23), Motif(attention_of_infinities, TOKENS, 23),
    Motif(rotary_operator, TOKENS, 23), Motif(scattered_cache, TOKENS, 24),
    Motif(linear_attention_operator, TOKENS, 27),
)  # fmt: skip
