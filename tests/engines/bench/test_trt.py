"""Engines timed in a process of their own: words where there is no GPU, figures where there is one."""

from pathlib import Path

import numpy as np
import pytest

import onnxq
from onnxq.backends import find_engine
from onnxq.backends.engine import TimedModel, Timing
from onnxq.backends.trt.cuda import count_gpus
from onnxq.engines.bench import demand_timer, time_placements
from onnxq.errors import VerificationError
from tests.engines import kit

no_gpu = pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")
FEEDS = {"x": np.zeros((1, 32, 16, 16), np.float32)}


@pytest.mark.trt
def test_an_engine_that_cannot_be_timed_is_an_error_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "engine").write_bytes(b"no engine")
    models = {"a/b": TimedModel(kit.conv(), tmp_path / "engine", FEEDS)}
    with pytest.raises(VerificationError) as caught:
        find_engine("tensorrt-rtx").time_models(models, Timing(seconds=0.1))
    assert caught.value.code == "Q710"
    assert "driver" in caught.value.cause or count_gpus()


@no_gpu
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(VerificationError) as caught:
        demand_timer("trt", "placement")
    assert caught.value.code == "Q708"


@no_gpu
def test_a_measured_placement_for_tensorrt_asks_for_a_gpu() -> None:
    with pytest.raises(VerificationError, match="placement: measured"):
        onnxq.make_plan(kit.ort_linear(), overrides={"target": "trt", "placement": "measured"})


@pytest.mark.gpu
@pytest.mark.trt
def test_models_are_built_and_timed_on_the_gpu() -> None:
    found = time_placements("trt", {"int8": kit.conv(), "refused": kit.conv(zero=np.int8(3))}, FEEDS, 3)
    assert list(found) == ["int8"]
    assert found["int8"].rounds == 3
    assert 0 < found["int8"].median_ms < 100


@pytest.mark.gpu
@pytest.mark.trt
def test_a_placement_is_measured_on_the_gpu() -> None:
    from tests.pipeline.models import images, residual

    plan = onnxq.make_plan(residual(), images(), overrides={"target": "trt", "placement": "measured"})
    assert plan.placement is not None
    assert plan.placement.speedups
    assert plan.placement.cpu == ""
