"""--placement measured: the choice is in the plan, and carrying that out gives the same bytes anywhere."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

import onnxq
from onnxq.evaluation.accumulator import Array
from onnxq.graph import ModelLike
from onnxq.plan import PlacementMethod
from onnxq.runtime import Latency, time_models
from tests.pipeline.models import images, residual


def test_the_choice_is_written_down_and_reproducible() -> None:
    result = onnxq.quantize(residual(), images(), overrides={"placement": "measured", "latency": False})
    choice = result.plan.placement
    assert choice is not None
    assert choice.method is PlacementMethod.MEASURED
    assert choice.speedups
    # On a busy machine none may win; then no site is quantized, and the plan says so.
    assert choice.candidate in ("", *choice.speedups)
    assert choice.threads == (1 if choice.candidate else 0)
    again = onnxq.apply(residual(), result.plan)
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


def test_candidates_of_tensorrt_are_chosen_by_whatever_times_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's times in the place of a GPU's, and one candidate that the engine refuses."""
    seen: list[set[str]] = []

    def measure(models: Mapping[str, ModelLike], feeds: Mapping[str, Array], rounds: int) -> dict[str, Latency]:
        seen.append(set(models))
        return time_models({name: one for name, one in models.items() if name != "linear-only"}, feeds, rounds=rounds)

    monkeypatch.setattr("onnxq.pipeline.quantize_model.choose_timer", lambda _: (measure, 0))
    plan = onnxq.make_plan(residual(), images(), overrides={"target": "trt", "placement": "measured"})
    choice = plan.placement
    assert choice is not None
    assert (choice.method, choice.cpu) == (PlacementMethod.MEASURED, "")
    assert {"float", "rules"} <= seen[0]
    assert choice.speedups.keys() == seen[0] - {"float", "linear-only"}


def test_a_model_that_cannot_gain_is_left_float() -> None:
    import numpy as np
    from onnx import numpy_helper, parser

    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1,4,4,4] x) => (float[1,4,4,4] y) { y = Conv <pads=[1,1,1,1]>(x, w) }"""
    )
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    data = {"x": np.random.default_rng(1).standard_normal((8, 4, 4, 4)).astype(np.float32)}
    result = onnxq.quantize(proto, data, overrides={"placement": "measured", "latency": False})
    assert result.plan.placement is not None
    assert result.plan.placement.candidate == ""
    assert result.report.placement == "measured: none"
    assert not result.plan.sites
    assert any("no placement ran faster" in refusal.reason for refusal in result.plan.left_float)
