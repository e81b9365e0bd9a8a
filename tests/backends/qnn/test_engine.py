"""Building for Qualcomm's NPU, running its emulator, and what is said where either cannot be."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_engine
from onnxq.backends.building import compile_model, serve_child
from onnxq.backends.engine import ENGINE, LOG, MODEL, Job
from onnxq.backends.qnn.build import _judge_build
from onnxq.backends.serving import ServedRunner
from onnxq.errors import ConfigError, MissingDependencyError, ModelError, VerificationError
from onnxq.runtime import Session
from tests.backends.qnn.graphs import make_graph, needs_qnn, prove
from tests.engines.kit import graph

SAMPLES = {"x": np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)}


@needs_qnn
def test_the_emulator_is_compared_by_output_and_by_layer() -> None:
    model = make_graph("conv")
    result = onnxq.diff(model, model, SAMPLES, overrides={"engines": ["qnn", "ort"], "layers": True})
    assert [run.name for run in result.runs] == ["float", "ort-off", "ort-on", "qnn"]
    (error,) = (one for one in result.outputs[0].engines if one.run == "qnn")
    # Not the file's arithmetic to the bit, and no more than a step from it.
    assert 40 < error.sqnr_db < np.inf
    assert 0 < error.levels < 1.01
    layers = {layer.name: [one.run for one in layer.engines] for layer in result.layers}
    assert layers["y"] == ["ort-on", "qnn"]


@needs_qnn
def test_the_emulator_runs_only_where_it_is_asked_for() -> None:
    model = make_graph("conv")
    assert "qnn" not in [run.name for run in onnxq.diff(model, model, SAMPLES).runs]


@needs_qnn
def test_samples_of_several_sizes_are_refused(tmp_path: Path) -> None:
    shapes = {"x": ((1, 3, 8, 8), (1, 3, 8, 8), (4, 3, 8, 8))}
    with (
        pytest.raises(ModelError, match="samples have 1x3x8x8, 4x3x8x8"),
        find_engine("qnn").open_runner("qnn", make_graph("conv", batch="N"), Job(shapes=shapes), tmp_path),
    ):
        pass


@needs_qnn
def test_a_free_size_is_named_and_can_be_given() -> None:
    model = make_graph("conv", batch="N")
    with pytest.raises(ConfigError, match="Nx3x8x8") as caught:
        onnxq.prove(model, overrides={"engine": "qnn"})
    assert "`fix=…`" in caught.value.fix
    proof = onnxq.prove(model, overrides={"engine": "qnn", "shapes": ["x:2x3x8x8"]})
    assert proof.node("c/Conv").type == "int8"
    assert proof.kernels[0].inputs[0].shape[0] == 2


@needs_qnn
def test_a_chip_is_told_to_the_compiler_and_unknown_ones_are_refused() -> None:
    assert prove("conv").build.options == {"soc_model": "60", "htp_arch": "73"}
    assert prove("conv", soc="SM8650", htp_arch="v75").build.options == {"soc_model": "SM8650", "htp_arch": "75"}
    with pytest.raises(ConfigError, match="Unrecognized soc_model 'SM0'"):
        prove("conv", soc="SM0")
    with pytest.raises(ConfigError, match="Qualcomm HTP"):
        onnxq.prove(make_graph("conv"), overrides={"engine": "ort", "soc": "SM8650"})


@needs_qnn
def test_a_compiled_model_loads_again_and_answers_the_same(tmp_path: Path) -> None:
    engine, model, path = find_engine("qnn"), make_graph("conv"), tmp_path / "compiled.onnx"
    compile_model(engine, model, path)
    assert "EPContext" in [node.op_type for node in onnx.load(path).graph.node]
    shutil.copy(path, tmp_path / ENGINE)
    feeds = {"x": SAMPLES["x"][:1]}
    with serve_child(engine, tmp_path, {"options": dict(engine.options)}, timeout=60) as ask:
        runner = ServedRunner("qnn", tmp_path, ask, frozenset(feeds))
        (answer,) = runner.infer(feeds).values()
        expected = Session(model, optimize=False).run(feeds)["yd"]
        assert np.abs(answer - expected).max() <= 1.01 / 32
        with pytest.raises(ModelError, match="the engine cannot run the model"):
            runner.infer({"x": SAMPLES["x"]})
    late = pytest.raises(ModelError, match=r"did not answer within 0\.01 s")
    with late, serve_child(engine, tmp_path, {"options": dict(engine.options)}, timeout=0.01):
        pass


@needs_qnn
def test_a_model_without_a_node_for_the_npu_is_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no node runs on the device: the validator of the HTP"):
        compile_model(find_engine("qnn"), make_graph("gemm"), tmp_path / "compiled.onnx")
    assert not list(tmp_path.iterdir())


@needs_qnn
def test_a_network_with_a_loop_runs_and_is_not_written_compiled(tmp_path: Path) -> None:
    # The provider's compiled form of it does not load: a constant of more than 127 bytes inside is lost.
    text = """(float[1,3,8,8] x, float[1,8,6,6] h) => (float[1,8,6,6] z) {
        xq = QuantizeLinear(x, s, zero) xd = DequantizeLinear(xq, s, zero) wd = DequantizeLinear(w, ws, wz)
        c = Conv(xd, wd) cq = QuantizeLinear(c, s, zero) cd = DequantizeLinear(cq, s, zero)
        z = Loop(trips, , h) <body = b (int64 i, bool go, float[1,8,6,6] m) => (bool on, float[1,8,6,6] n)
            <float[1,8,6,6] f = {VALUES}> { on = Identity(go) p = Mul(m, f) n = Add(p, cd) }> }"""
    model = graph(
        text.replace("{VALUES}", f"{{{','.join(['0.5'] * 288)}}}"),
        21,
        s=np.float32(1 / 32),
        zero=np.uint8(128),
        w=np.random.default_rng(0).integers(1, 100, (8, 3, 3, 3)).astype(np.int8),
        ws=np.float32(0.003),
        wz=np.int8(0),
        trips=np.int64(2),
    )
    samples = {**SAMPLES, "h": np.ones((3, 8, 6, 6), np.float32)}
    result = onnxq.diff(model, model, samples, overrides={"engines": ["qnn"]})
    (error,) = (one for one in result.outputs[0].engines if one.run == "qnn")
    assert error.sqnr_db > 40
    with pytest.raises(ModelError, match="writes no compiled form of If, Loop or Scan"):
        compile_model(find_engine("qnn"), model, tmp_path / "compiled.onnx")


@needs_qnn
def test_nothing_is_said_of_speed() -> None:
    with pytest.raises(VerificationError, match="time of an emulator"):
        onnxq.bench(make_graph("conv"), overrides={"engine": "qnn"})


def test_a_package_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The process that builds looks for packages where this one does.
    (tmp_path / "onnxruntime_qnn.py").write_text("raise ImportError('no such package')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError, match="no such package; it needs Python") as caught:
        prove("cut", forbid="float32")
    assert caught.value.fix == "pip install 'onnxq[qnn]'"


@needs_qnn
def test_what_the_log_alone_says_is_the_reason(tmp_path: Path) -> None:
    onnx.save(make_graph("conv"), tmp_path / MODEL)
    text = "2026-11-27 20:33:25.9 [E:onnxruntime:, interfaces.cc:828 GetCapability] nodes that cannot be fused together"
    (tmp_path / LOG).write_text(f"# LIBNATIVE: none\n{text}\n")
    assert _judge_build(tmp_path, "").reason == "nodes that cannot be fused together"
