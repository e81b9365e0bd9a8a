"""Models and samples through the folder of a crew: they come back as they were, and the same one has one name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from onnxq.graph import attach_weights, strip_weights
from onnxq.runtime.crew import Crew, hash_model, open_model, read_feeds
from tests.pipeline.models import residual

FEEDS = {
    "x/1": np.arange(6, dtype=np.float32).reshape(2, 3),
    "text": np.array(["a", "bc"], object),
    "file": np.int64(3)[None],
}


def test_models_and_samples_come_back() -> None:
    proto = residual()
    with Crew() as crew:
        shared = crew.share_model(strip_weights(proto))
        assert shared == crew.share_model(proto)
        assert shared.digest == hash_model(proto) != hash_model(residual(seed=1))
        # Weights lie in the file once.
        size = (Path(shared.folder) / "weights").stat().st_size
        crew.share_model(proto)
        assert (Path(shared.folder) / "weights").stat().st_size == size > 0
        found = attach_weights(open_model(shared))
        for one, other in zip(found.graph.initializer, proto.graph.initializer, strict=True):
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(one), onnx.numpy_helper.to_array(other))
        feeds = read_feeds(crew.share_feeds(FEEDS))
        assert list(feeds) == list(FEEDS)
        for name, value in FEEDS.items():
            assert feeds[name].dtype == value.dtype
            np.testing.assert_array_equal(feeds[name], value)
    assert not Path(shared.folder).exists()
