"""Why pairs did not fuse."""

from __future__ import annotations

import onnxq
from onnxq.engines.prove.reasons import Reasons
from onnxq.graph import GraphIndex
from tests.engines import kit


def test_a_pair_placed_for_another_node_s_sake_is_not_called_waste() -> None:
    model = kit.conv()
    pair = onnxq.inspect(model).pairs[0]
    told = {
        engine: Reasons(engine, GraphIndex(model), ()).explain_site(pair, "matmul-qkv", ("r",), {})
        for engine in ("tensorrt", "ort")
    }
    assert "keeps the product in front of it in int8" in told["tensorrt"]
    assert "reads floats" in told["ort"]
