"""`onnxq bench`: on the CPU with times, ahead of time without, on a GPU where there is one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import numpy_helper

import onnxq
from onnxq.backends import find_engine
from onnxq.backends.engine import BuildState, TimedModel, Timing, Untimed
from onnxq.backends.trt.cuda import count_gpus
from onnxq.engines.bench import Bench, BenchedModel, demand_timer, time_placements
from onnxq.errors import ConfigError, ModelError, VerificationError
from tests.cli.kit import run as invoke
from tests.commands.test_bench import latency
from tests.commands.test_prove import PROOF
from tests.engines import kit
from tests.runtime.test_providers import OTHER, needs_another

pytestmark = pytest.mark.usefixtures("engines_here")
needs_rtx = kit.needs_rtx[1]
no_gpu = pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")
BRIEF = ("--seconds", "0.1")


def run(*args: object) -> Result:
    return invoke("bench", *args)


def network(kind: str = "float", size: int = 64) -> onnx.ModelProto:
    """y = x @ w for any batch; kind: of its input and weight."""
    weight = np.random.default_rng(0).standard_normal((size, size)).astype({"float": "f4", "float16": "f2"}[kind])
    model = kit.graph(f"({kind}[N,{size}] x) => ({kind}[N,{size}] y) {{ y = MatMul(x, w) }}", w=weight)
    assert numpy_helper.to_array(model.graph.initializer[0]).dtype == weight.dtype
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    onnx.save(kit.conv(batch="N"), path / "trt.onnx")
    onnx.save(kit.ort_residual(), path / "q.onnx")
    onnx.save(network(), path / "float.onnx")
    onnx.save(network("float16"), path / "half.onnx")
    return path


def test_models_of_several_types_are_timed_side_by_side(folder: Path) -> None:
    done = run(folder / "float.onnx", folder / "half.onnx", "--engine", "ort", "--batch", 4, "--json", *BRIEF)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["engine"], document["untimed"], document["shapes"]) == ("ort", None, {"x": [4, 64]})
    first, second = document["models"]
    assert first["types"] == {"float32": 1}
    assert first["ratio"] == 1.0
    assert second["ratio"] > 0
    for one in (first, second):
        assert one["graph"] is None
        assert 0 < one["eager"]["min_ms"] <= one["eager"]["median_ms"] <= one["eager"]["p99_ms"] * 1.01
        assert one["eager"]["per_second"] == pytest.approx(1e3 / one["eager"]["median_ms"], rel=3)
        assert one["eager"]["threads"] == 1


def test_the_table(folder: Path) -> None:
    done = run(folder / "q.onnx", "--engine", "ort", "-v", *BRIEF)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 model  (ONNX Runtime ")
    assert "1 thread" in lines[0]
    assert lines[1].split() == ["model", "heavy", "nodes", "kernels", "moving", "median", "p99", "runs/s", "faster"]
    assert "2 int8" in lines[2]
    assert "1.00×" in lines[2]
    assert "QLinearConv" in done.stdout


@needs_another
def test_another_provider_is_timed_without_kernels(folder: Path) -> None:
    done = run(folder / "float.onnx", "--provider", OTHER, "--json", *BRIEF)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["provider"] == OTHER
    assert document["models"][0]["kernels"] is None
    assert document["models"][0]["eager"]["median_ms"] > 0


@needs_rtx
@no_gpu
def test_without_a_gpu_kernels_are_counted_and_that_is_said(folder: Path) -> None:
    done = run(folder / "trt.onnx", "--engine", "tensorrt-rtx", "--shapes", "x:2x32x16x16")
    assert done.exit_code == 0, done.stderr
    assert "1 int8" in done.stdout
    assert "not timed  this machine has no NVIDIA GPU" in done.stdout
    assert "capability 8.6" in done.stdout
    assert "median" not in done.stdout


@needs_rtx
def test_a_model_that_is_not_built_is_listed_and_fails_the_command(folder: Path) -> None:
    wanted = {"engine": "tensorrt-rtx", "compute_capability": "8.9", "seconds": 0.1}
    found = onnxq.bench([kit.conv(), kit.conv(zero=np.int8(3))], overrides=wanted)
    assert found.untimed is Untimed.OTHER_GPU
    assert [one.built for one in found.models] == [True, False]
    assert [one.name for one in found.failed] == ["model 2"]
    done = run(folder / "q.onnx", "--engine", "tensorrt-rtx", *BRIEF)
    assert done.exit_code == 1
    assert "error[Q705]" in done.stderr
    assert "not timed" in done.stdout


def test_options_that_do_not_fit(folder: Path) -> None:
    other = kit.graph("(float[1] a) => (float[1] y) { y = Relu(a) }")
    with pytest.raises(ModelError, match="other inputs"):
        onnxq.bench([kit.conv(), other], overrides={"engine": "ort"})
    with pytest.raises(ConfigError, match="fixed size"):
        onnxq.bench(kit.conv(), overrides={"engine": "ort", "batch": 8})
    with pytest.raises(ConfigError, match="none was given"):
        onnxq.bench([])
    with pytest.raises(ConfigError, match="another engine"):
        onnxq.bench(kit.conv(), overrides={"engine": "tensorrt", "provider": "cpu"})
    assert run().exit_code == 2


@pytest.mark.gpu
@pytest.mark.trt
def test_engines_are_timed_on_the_gpu() -> None:
    found = onnxq.bench([network(), network("float16")], overrides={"seconds": 1.0, "batch": 32})
    assert found.device
    for one in found.models:
        assert one.eager is not None
        assert one.graph is not None, one.reason
        assert 0 < one.graph.median_ms < 100
        assert one.eager.p99_ms >= one.eager.median_ms * 0.9


# ---- Benches as values: what failed, how types are counted, and ratios to the first model.

REFUSED = replace(PROOF, build=replace(PROOF.build, state=BuildState.REFUSED))


def bench(*models: BenchedModel, untimed: Untimed | None = None) -> Bench:
    return Bench(engine="tensorrt", version="", models=models, untimed=untimed)


def test_the_faster_way_counts() -> None:
    one = BenchedModel(name="a", eager=latency(2.0, 2.0), graph=latency(1.0, 1.0))
    other = BenchedModel(name="b", eager=latency(4.0, 2.0))
    assert one.best == one.graph
    found = bench(one, other)
    assert found.ratio(one) == 1.0
    assert found.ratio(other) == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert found.failed == ()


def test_models_that_were_not_built_or_not_timed_failed() -> None:
    good, bad = BenchedModel(name="a", proof=PROOF, eager=latency(1.0)), BenchedModel(name="b", proof=REFUSED)
    slow = BenchedModel(name="c", proof=PROOF, reason="it crashed")
    assert bench(good, bad, slow).failed == (bad, slow)
    # Where nothing is timed, only builds can fail.
    assert bench(good, bad, slow, untimed=Untimed.NO_GPU).failed == (bad,)
    assert bench(good, slow).ratio(slow) is None


def test_heavy_nodes_are_counted_by_type() -> None:
    assert BenchedModel(name="a", proof=PROOF).types == {"int8": 1, "float32": 1}
    assert not BenchedModel(name="a").types
    assert BenchedModel(name="a").built


# ---- Engines timed in a process of their own: words where there is no GPU, figures where there is one.

FEEDS = {"x": np.zeros((1, 32, 16, 16), np.float32)}


@pytest.mark.trt
def test_an_engine_that_cannot_be_timed_is_an_error_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "engine").write_bytes(b"no engine")
    models = {"a/b": TimedModel(kit.conv(), tmp_path / "engine", FEEDS)}
    with pytest.raises(VerificationError, match=r"\[Q710\]") as caught:
        find_engine("tensorrt-rtx").time_models(models, Timing(seconds=0.1))
    assert "driver" in caught.value.cause or count_gpus()


@no_gpu
def test_without_a_gpu_nothing_is_timed() -> None:
    with pytest.raises(VerificationError, match=r"\[Q708\]"):
        demand_timer("trt", "placement")


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
    assert plan.placement.speedups
    assert plan.placement.cpu == ""
