"""Small networks that choose by values they compute: detectors, a decoder of queries, labels, experts."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import ModelProto

from onnxq.graph import name_nodes
from onnxq.graph.scopes import collect_reads
from tests.networks import add_arrays, parse_text

TOKENS, WIDTH = 96, 16

# By name: the graph behind a backbone, `f` [1, 96, 16], and the operators that choose in it.
HEADS = {
    # An end-to-end head: boxes of the 12 best scores.
    "detector": """(float[1, 96, 16] x) => (float[1, 12, 5] out) {
        BODY
        boxes = MatMul(f, w_box) logits = MatMul(f, w_score) scores = Sigmoid(logits) flat = Squeeze(scores, last)
        best, at = TopK <axis = 1> (flat, twelve) column = Unsqueeze(at, last) places = Expand(column, box_shape)
        picked = GatherElements <axis = 1> (boxes, places) confidence = Unsqueeze(best, last)
        out = Concat <axis = 2> (picked, confidence) }""",
    "suppression": """(float[1, 96, 16] x) => (float[K, 4] out) {
        BODY boxes = MatMul(f, w_box) logits = MatMul(f, w_score) scores = Sigmoid(logits)
        by_class = Transpose <perm = [0, 2, 1]> (scores)
        kept = NonMaxSuppression(boxes, by_class, twelve, half, half) column = Slice(kept, two, three, one)
        flat = Squeeze(column, one) rows = Squeeze(boxes, zero) out = Gather(rows, flat) }""",
    # Those above a threshold, however many there are.
    "threshold": """(float[1, 96, 16] x) => (float[K, 4] out) {
        BODY
        boxes = MatMul(f, w_box) logits = MatMul(f, w_score) flat = Squeeze(logits, last) sure = Greater(flat, half)
        columns = NonZero(sure) places = Transpose(columns) out = GatherND(boxes, places) }""",
    # A label of each token, and what a table has for it.
    "labels": """(float[1, 96, 16] x) => (float[1, 96, 16] out, int64[1, 96] label, float[1, 96] number) {
        BODY
        logits = MatMul(f, w_class) label = ArgMax <axis = 2, keepdims = 0> (logits) number = Cast <to = 1> (label)
        row = Gather(w_class, label) out = MatMul(row, w_box_back) }""",
    # Queries that are chosen by a score, a decoder over them, and the best classes of all.
    "queries": """(float[1, 96, 16] x) => (float[1, 6, 4] out, int64[1, 6] label) {
        BODY
        logits = MatMul(f, w_score) flat = Squeeze(logits, last) best, at = TopK <axis = 1> (flat, twelve)
        column = Unsqueeze(at, last) places = Expand(column, query_shape)
        queries = GatherElements <axis = 1> (f, places) turned = Transpose <perm = [0, 2, 1]> (f)
        heat = MatMul(queries, turned) cool = Mul(heat, small) attention = Softmax <axis = -1> (cool)
        seen = MatMul(attention, f) sum = Add(queries, seen) mixed = MatMul(sum, w_class) decoded = Relu(mixed)
        boxes = MatMul(decoded, w_box) class_map = MatMul(decoded, w_class) classes = Reshape(class_map, long)
        top, place = TopK <axis = 1> (classes, six) sixteen = Constant <value_int = 16> ()
        query = Div(place, sixteen) label = Mod(place, sixteen) query_column = Unsqueeze(query, last)
        query_places = Expand(query_column, out_shape) out = GatherElements <axis = 1> (boxes, query_places) }""",
    # Two of sixteen experts for each token.
    "experts": """(float[1, 96, 16] x) => (float[1, 96, 16] out) {
        BODY
        router = MatMul(f, w_class) best, at = TopK <axis = 2> (router, two) share = Softmax <axis = -1> (best)
        none = Mul(router, zero_float) gates = ScatterElements <axis = 2> (none, at, share)
        spread = Unsqueeze(gates, three) rows = Unsqueeze(f, inner) worked = MatMul(rows, w_expert)
        flat = Squeeze(worked, three) weighed = Mul(flat, spread) out = ReduceSum <keepdims = 0> (weighed, last) }""",
    # The same as one operator of ONNX Runtime's.
    "fused_experts": """(float[1, 96, 16] x) => (float[1, 96, 16] out) {
        BODY
        router = MatMul(f, w_class) tokens = Reshape(router, pairs)
        mixed = com.microsoft.MoE <k = 2, activation_type = "relu", normalize_routing_weights = 1>
            (f, tokens, w_expert, , w_expert_back)
        out = MatMul(mixed, w_body) }""",
    # The choice lies in the branch that runs; the other one chooses, too.
    "branch": """(float[1, 96, 16] x) => (float[1, 12, 16] out) {
        BODY length = Shape(x) size = ReduceProd <keepdims = 0> (length) none = Cast <to = 9> (size)
        picked = If (none) <then_branch = full () => (float[1, 12, 16] rows) {
            logits = MatMul(f, w_score) flat = Squeeze(logits, last) best, at = TopK <axis = 1> (flat, twelve)
            column = Unsqueeze(at, last) places = Expand(column, query_shape)
            rows = GatherElements <axis = 1> (f, places)
        }, else_branch = empty () => (float[1, 12, 16] rows) {
            sums = ReduceSum <keepdims = 0> (f, last) best, at = TopK <axis = 1> (sums, twelve)
            column = Unsqueeze(at, last) places = Expand(column, query_shape)
            rows = GatherElements <axis = 1> (f, places) }> out = MatMul(picked, w_body) }""",
    # Twelve rows for each of two scores.
    "loop": """(float[1, 96, 16] x) => (float[2, 12, 16] out) {
        BODY all = Squeeze(f, zero)
        picked = Loop (count, yes) <body = pick (int64 i, bool go) => (bool again, float[12, 16] rows) {
            again = Identity(go) w = Gather(w_scores, i) logits = MatMul(all, w) flat = Squeeze(logits, one)
            best, at = TopK <axis = 0> (flat, twelve) rows = Gather(all, at) }>
        out = MatMul(picked, w_body) }""",
    # A class of each row, one row after the other.
    "scan": """(float[1, 96, 16] x) => (float[96, 16] out, int64[96] label) {
        BODY all = Squeeze(f, zero)
        label, picked = Scan <num_scan_inputs = 1, body = classify (float[16] row) => (int64 label, float[16] seen) {
            logits = MatMul(row, w_class) label = ArgMax <axis = 0, keepdims = 0> (logits)
            seen = Gather(w_class, label) }> (all) out = MatMul(picked, w_body) }""",
}
# Nothing in these is chosen by a value that is computed from weights.
PLAIN = {
    "ids": """(int64[1, 8] ids) => (float[1, 16] out) {
        rows = Gather(w_class, ids) y = MatMul(rows, w_body) end = ArgMax <axis = 1, keepdims = 0> (ids)
        column = Unsqueeze(end, one) out_row = GatherND <batch_dims = 1> (y, column) out = Relu(out_row) }""",
    "shapes": """(float[1, 96, 16] x) => (float[1, 96, 16] out) {
        y = MatMul(x, w_body) shape = Shape(y) numbers = Cast <to = 1> (shape) bent = Mul(numbers, one_float)
        sizes = Cast <to = 7> (bent) z = Reshape(y, sizes) out = Relu(z) }""",
    # Each value by itself: no row changes places.
    "elementwise": """(float[1, 96, 16] x) => (float[1, 96, 16] out) {
        y = MatMul(x, w_body) positive = Greater(y, zero_float) out = Where(positive, y, zero_float) }""",
    # The input itself is sorted, and computed with afterwards.
    "sorted": """(float[1, 96, 16] x) => (float[1, 12, 16] out) {
        best, at = TopK <axis = 1> (x, twelve) out = MatMul(best, w_body) }""",
    # The order of the values alone, which nothing else follows.
    "best": """(float[1, 96, 16] x) => (float[1, 12, 16] out) {
        y = MatMul(x, w_body) out, at = TopK <axis = 1> (y, twelve) }""",
}
_BODY = "h = MatMul(x, w_body) g = Relu(h) k = MatMul(g, w_body) r = Relu(k) f = MatMul(r, w_body)"
_NUMBERS = {
    "last": [2], "inner": [2, 3], "zero": [0], "one": [1], "two": [2], "three": [3], "six": [6], "twelve": [12],
    "box_shape": [1, 12, 4], "query_shape": [1, 12, 16], "out_shape": [1, 6, 4], "long": [1, 192],
    "pairs": [-1, 16],
}  # fmt: skip


def network(name: str, noise: float = 0.0, seed: int = 0, **weights: np.ndarray) -> ModelProto:
    """One of HEADS or PLAIN. noise: relative, of its weights, as rounding makes it. weights: in place of some."""
    rng, off = np.random.default_rng(0), np.random.default_rng(1 + seed)
    shapes = {"w_body": (16, 16), "w_box": (16, 4), "w_score": (16, 1), "w_class": (16, 16), "w_box_back": (16, 16)}
    arrays: dict[str, np.ndarray] = {
        key: rng.standard_normal(shape).astype(np.float32) / 3 for key, shape in shapes.items()
    }
    arrays["w_expert"] = rng.standard_normal((16, 16, 16)).astype(np.float32) / 4
    arrays["w_expert_back"] = rng.standard_normal((16, 16, 16)).astype(np.float32) / 4
    arrays["w_scores"] = rng.standard_normal((2, 16, 1)).astype(np.float32) / 3
    arrays |= weights
    for key in arrays:
        arrays[key] = (arrays[key] * (1 + noise * off.standard_normal(arrays[key].shape))).astype(np.float32)
    arrays |= {key: np.array(value, np.int64) for key, value in _NUMBERS.items()}
    arrays |= {"count": np.array(2), "yes": np.array(True)}
    scalars = {"half": 0.5, "small": 0.05, "zero_float": 0.0, "one_float": 1.0}
    arrays |= {key: np.float32(value) for key, value in scalars.items()}
    text = {**HEADS, **PLAIN}[name].replace("BODY", _BODY)
    proto = parse_text(f"{name} {text}", "com.microsoft")
    used = collect_reads(proto.graph)
    add_arrays(proto.graph, **{key: value for key, value in arrays.items() if key in used})
    onnx.checker.check_model(proto)
    return name_nodes(proto)


def samples(count: int = 8, seed: int = 2) -> Mapping[str, np.ndarray]:
    """Inputs of the networks."""
    return {"x": np.random.default_rng(seed).standard_normal((count, TOKENS, WIDTH)).astype(np.float32)}
