"""A detector's head: boxes in pixels beside scores, concatenated to one output."""

import numpy as np
import onnx

from tests.passes.kit import parse


def head(noisy: float = 1.0) -> onnx.ModelProto:
    """[N, 8, 6, 6] -> [N, 9, 36]: 4 box channels to 640, 5 scores between 0 and 1.

    noisy: the scale of one channel that the scores' convolution reads and hardly uses; large ones cost it its levels.
    """
    rng = np.random.default_rng(0)
    body = np.eye(8, dtype=np.float32) * 0.9 + rng.standard_normal((8, 8)).astype(np.float32) * 0.1
    scores = rng.standard_normal((5, 8)).astype(np.float32)
    lift = np.ones(8, np.float32)
    lift[0] = noisy
    weights = {
        "w_body": body,
        "w_lift": np.diag(lift) @ (np.eye(8, dtype=np.float32) + 0.1 * np.abs(rng.standard_normal((8, 8)))),
        "w_box": rng.standard_normal((4, 8)) * 100,
        "w_score": scores / lift,
    }
    text = """head (float[N, 8, 6, 6] x) => (float[N, 9, 36] output0)
    <int64[3] shape_box = {0, 4, 36}, int64[3] shape_score = {0, 5, 36}> {
        [body] body = Conv(x, w_body) [feature] feature = Relu(body) [box_map] box_map = Conv(feature, w_box)
        [boxes] boxes = Reshape(box_map, shape_box) [lift] lift = Conv(feature, w_lift) [lifted] lifted = Relu(lift)
        [score_map] score_map = Conv(lifted, w_score) [logits] logits = Reshape(score_map, shape_score)
        [scores] scores = Sigmoid(logits) [output0] output0 = Concat<axis = 1>(boxes, scores) }"""
    return parse(text, **{name: value.astype(np.float32)[:, :, None, None] for name, value in weights.items()})


def samples(count: int = 32, seed: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.abs(np.random.default_rng(seed).standard_normal((count, 8, 6, 6))).astype(np.float32)}
