"""Heads that sort and select, and updates of tensors in place."""

import numpy as np

from tests.motifs.net import BOOL, FLOAT, INT64, MAP, TOKENS, Motif, Net, Value, floats, ints


def boxes(net: Net, x: Value) -> tuple[str, str]:
    """Boxes (N, T, 4) with corners in order, and scores (N, T, 2)."""
    raw = net.op("Sigmoid", net.linear(x, 4))
    corner = net.op("Slice", raw, ints(0), ints(2), ints(2))
    size = net.op("Slice", raw, ints(2), ints(4), ints(2))
    both = net.op("Concat", corner, net.op("Add", corner, size), axis=2)
    return both, net.op("Sigmoid", net.linear(x, 2))


def top_k_head(net: Net, x: Value) -> Value:
    """The three best tokens by their score, their boxes and classes as outputs."""
    both, scores = boxes(net, x)
    best = net.reduce("ReduceMax", scores, 2, keepdims=0)
    values, indices = net.ops("TopK", 2, best, ints(min(3, x.shape[0])), axis=1)
    spread = net.op(
        "Expand", net.op("Unsqueeze", indices, ints(2)), net.op("Concat", net.op("Shape", indices), ints(4), axis=0)
    )
    net.give(net.op("GatherElements", both, spread, axis=1))
    net.give(values)
    net.give(indices, INT64)
    return x


def non_max_suppression(net: Net, x: Value) -> Value:
    both, scores = boxes(net, x)
    turned = net.op("Transpose", scores, perm=[0, 2, 1])
    limits = ints(2), floats(0.5), floats(0.3)
    net.give(net.op("NonMaxSuppression", both, turned, *limits), INT64)
    return x


def roi_align(net: Net, x: Value) -> Value:
    """Rows of a map cut out by boxes that are an input; the first item's, as an output of its own."""
    rois = net.feed(FLOAT, [3, 4], lambda rng: np.sort(rng.random((3, 2, 2)), axis=1).reshape(3, 4).astype("f4") * 6)
    crops = net.op("RoiAlign", x, rois, ints(0, 0, 0), output_height=3, output_width=3, sampling_ratio=2)
    head = net.conv(Value(crops, (x.shape[0], 3, 3)), 4, 3)
    net.give(net.op("Gemm", net.op("Flatten", head.name), net.weight(2, 36), transB=1))
    return x


def classes(net: Net, x: Value) -> Value:
    """Logits, and the index of the greatest."""
    logits = net.linear(x, 5)
    net.give(net.op("Softmax", logits, axis=-1))
    net.give(net.op("ArgMax", logits, axis=-1, keepdims=0), INT64)
    return x


def chosen_row(net: Net, x: Value) -> Value:
    """ArgMax feeds a Gather: the token with the greatest first feature, added to all."""
    first = net.op("Slice", x, ints(0), ints(1), ints(2))
    best = net.op("ArgMax", first, axis=1, keepdims=1)
    spread = net.op("Expand", best, ints(1, 1, x.shape[1]))
    return Value(net.op("Add", x, net.op("GatherElements", x, spread, axis=1)), x.shape)


def thresholded(net: Net, x: Value) -> Value:
    """A mask of booleans as an output, and what lies below the threshold set to zero."""
    gate = net.op("Sigmoid", net.conv(x, x.shape[0]))
    above = net.op("Greater", gate, floats(0.5))
    net.give(above, BOOL)
    return Value(net.op("Where", above, x, floats(0)), x.shape)


def where_between(net: Net, x: Value) -> Value:
    choice = net.feed(BOOL, ["N", 1, 1, 1], lambda rng: rng.random((1, 1, 1, 1)) < 0.5)
    return Value(net.op("Where", choice, net.conv(x, 8), net.conv(x, 8, 3)), (8, *x.shape[1:]))


def scatter_rows(net: Net, x: Value) -> Value:
    """ScatterND of rows that are computed, by indices that are stored."""
    row = net.op("Slice", net.linear(x, x.shape[1]), ints(0), ints(1), ints(1))
    turned = net.op("Transpose", x, perm=[1, 0, 2])
    update = net.op("Transpose", row, perm=[1, 0, 2])
    done = net.op("ScatterND", turned, ints(x.shape[0] - 1).reshape(1, 1), update)
    return Value(net.op("Transpose", done, perm=[1, 0, 2]), x.shape)


def scatter_elements(net: Net, x: Value) -> Value:
    indices = net.feed(
        INT64,
        ["N", 2, x.shape[1]],
        lambda rng: rng.integers(0, x.shape[0], (1, 2, x.shape[1])) * 0 + ints(0, 1)[:, None],
    )
    updates = net.op("Slice", net.linear(x, x.shape[1]), ints(0), ints(2), ints(1))
    return Value(net.op("ScatterElements", x, indices, updates, axis=1), x.shape)


def scatter_sum(net: Net, x: Value) -> Value:
    """A graph network's messages: rows gathered by one list, added up by another."""
    length, width = x.shape
    sources, targets = ints(*range(length)), ints(*(k // 2 for k in range(length)))
    messages = net.op("Gather", net.linear(x, width), sources, axis=1)
    index = net.op("Expand", targets.reshape(1, -1, 1), net.op("Shape", messages))
    return Value(net.op("ScatterElements", x, index, messages, axis=1, reduction="add"), x.shape)


def scatter_greatest(net: Net, x: Value) -> Value:
    """The greatest of what falls into one row."""
    index = net.op("Expand", ints(*(k // 2 for k in range(x.shape[0]))).reshape(1, -1, 1), net.op("Shape", x))
    updates = net.linear(x, x.shape[1])
    return Value(net.op("ScatterElements", x, index, updates, axis=1, reduction="max"), x.shape)


def scatter_nd_sum(net: Net, x: Value) -> Value:
    """Rows added where indices that are an input say, of which two may be the same."""
    turned = net.op("Transpose", x, perm=[1, 0, 2])
    rows = net.op("Transpose", net.linear(x, x.shape[1]), perm=[1, 0, 2])
    indices = net.feed(INT64, [x.shape[0], 1], lambda rng: rng.integers(0, x.shape[0], (x.shape[0], 1)))
    done = net.op("ScatterND", turned, indices, rows, reduction="add")
    return Value(net.op("Transpose", done, perm=[1, 0, 2]), x.shape)


def gather_nd(net: Net, x: Value) -> Value:
    indices = net.feed(INT64, ["N", 3, 1], lambda rng: rng.integers(0, x.shape[0], (1, 3, 1)))
    return Value(net.op("GatherND", x, indices, batch_dims=1), (3, x.shape[1]))


def rolled(net: Net, x: Value) -> Value:
    """Swin's shifted windows: the first columns go to the end."""
    cut = x.shape[2] // 2
    right = net.op("Slice", x, ints(cut), ints(2**63 - 1), ints(3))
    left = net.op("Slice", x, ints(0), ints(cut), ints(3))
    return Value(net.op("Concat", right, left, axis=3), x.shape)


def flipped(net: Net, x: Value) -> Value:
    backward = net.op("Slice", x, ints(-1), ints(-(2**31)), ints(3), ints(-1))
    both = net.op("Concat", x, backward, axis=1)
    return Value(both, (2 * x.shape[0], *x.shape[1:]))


def cumulated(net: Net, x: Value) -> Value:
    total = net.op("CumSum", x, np.array(1))
    counts = np.arange(1, x.shape[0] + 1, dtype=np.float32)[:, None]
    return Value(net.op("Div", total, counts), x.shape)


def multiplied_up(net: Net, x: Value) -> Value:
    """Transmittance along a ray: products of all before."""
    share = net.op("Sigmoid", net.linear(x, 4))
    return Value(net.op("CumProd", share, np.array(1), exclusive=1), (x.shape[0], 4))


def reversed_lengths(net: Net, x: Value) -> Value:
    """Sequences of their own lengths turned around."""
    lengths = net.feed(INT64, ["N"], lambda rng: rng.integers(1, x.shape[0] + 1, 1))
    return Value(net.op("ReverseSequence", x, lengths, batch_axis=0, time_axis=1), x.shape)


def mask_by_bits(net: Net, x: Value) -> Value:
    """Two masks of integers, as bits."""
    masks = [
        net.feed(INT64, ["N", 1, x.shape[1]], lambda rng: rng.integers(0, 4, (1, 1, x.shape[1]))) for _ in range(2)
    ]
    shown = net.op("Cast", net.op("BitwiseAnd", *masks), to=BOOL)
    return Value(net.op("Where", shown, net.linear(x, x.shape[1]), x.name), x.shape)


def tiled(net: Net, x: Value) -> Value:
    """A pooled token repeated for all and put beside them."""
    mean = net.reduce("ReduceMean", x, 1)
    many = net.op("Tile", mean, ints(1, x.shape[0], 1))
    return Value(net.op("Concat", x, many, axis=-1), (x.shape[0], 2 * x.shape[1]))


def one_hot(net: Net, x: Value) -> Value:
    best = net.op("ArgMax", net.linear(x, 4), axis=-1, keepdims=0)
    hot = net.op("OneHot", best, np.array(4), floats(0, 1), axis=-1)
    return Value(net.op("Concat", x, hot, axis=-1), (x.shape[0], x.shape[1] + 4))


def clipped_by_input(net: Net, x: Value) -> Value:
    high = net.feed(FLOAT, [], lambda rng: np.array(1.5, np.float32))
    return Value(net.op("Clip", x, floats(-1).reshape(()), high), x.shape)


def counted(net: Net, x: Value) -> Value:
    """Outputs that are integers: a shape, a size, how many are positive."""
    net.give(net.op("Shape", x), INT64)
    net.give(net.op("Size", x), INT64, [])
    positive = net.op("Cast", net.op("Greater", x, floats(0)), to=INT64)
    net.give(net.reduce("ReduceSum", positive, 1, 2, 3, keepdims=0), INT64)
    return x


def non_zero(net: Net, x: Value) -> Value:
    """Outputs whose shape depends on values."""
    gate = net.op("Sigmoid", net.conv(x, 1))
    where = net.op("Transpose", net.op("NonZero", net.op("Greater", gate, floats(0.6))), perm=[1, 0])
    net.give(where, INT64)
    net.give(net.op("GatherND", gate, where))
    return x


MOTIFS = (
    *(Motif(build, TOKENS, 11) for build in (
        top_k_head, non_max_suppression, chosen_row, scatter_rows, cumulated, one_hot,
    )),
    *(Motif(build, MAP) for build in (rolled, counted)), *(Motif(build, TOKENS) for build in (classes, tiled)),
    Motif(thresholded, MAP, 9), Motif(where_between, MAP, 9), Motif(scatter_elements, TOKENS, 9),
    Motif(flipped, MAP, 10), Motif(roi_align, MAP, 10, 21), Motif(clipped_by_input, MAP, 11), Motif(non_zero, MAP, 11),
    Motif(gather_nd, TOKENS, 12), Motif(scatter_sum, TOKENS, 16),
    Motif(reversed_lengths, TOKENS, 10), Motif(scatter_nd_sum, TOKENS, 16), Motif(scatter_greatest, TOKENS, 18),
    Motif(mask_by_bits, TOKENS, 18), Motif(multiplied_up, TOKENS, 26),
)  # fmt: skip
