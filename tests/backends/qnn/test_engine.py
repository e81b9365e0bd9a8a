"""Building for Qualcomm's NPU, running its emulator, and what is said where either cannot be."""

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.backends import find_engine
from onnxq.backends.building import compile_model, serve_child
from onnxq.backends.engine import ENGINE, LOG, MODEL, Job
from onnxq.backends.qnn.engine import NodeNames, _judge_build, find_fix
from onnxq.backends.serving import ServedRunner
from onnxq.commands.prove import find_unmet_requirement
from onnxq.engines.prove.proof import SiteState
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
    with serve_child(engine, tmp_path, timeout=60) as ask:
        runner = ServedRunner("qnn", tmp_path, ask, frozenset(feeds))
        (answer,) = runner.infer(feeds).values()
        expected = Session(model, optimize=False).run(feeds)["yd"]
        assert np.abs(answer - expected).max() <= 1.01 / 32
        with pytest.raises(ModelError, match="the engine cannot run the model"):
            runner.infer({"x": SAMPLES["x"]})
    late = pytest.raises(ModelError, match=r"did not answer within 0\.01 s")
    with late, serve_child(engine, tmp_path, timeout=0.01):
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
    with pytest.raises(MissingDependencyError, match="no such package; it needs a CPU of x86") as caught:
        prove("cut", forbid="float32")
    assert caught.value.fix == 'pip install "onnxq[qnn]"'


def test_packages_for_other_cpus_than_x86_hold_no_emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("def get_library_path():", "    raise RuntimeError('its library offers no device')")
    (tmp_path / "onnxruntime_qnn.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(VerificationError, match="offers no device") as caught:
        prove("cut", forbid="float32")
    assert caught.value.fix.startswith("it needs a CPU of x86, Python 3.11")


@needs_qnn
def test_what_the_log_alone_says_is_the_reason(tmp_path: Path) -> None:
    onnx.save(make_graph("conv"), tmp_path / MODEL)
    text = "2026-11-27 20:33:25.9 [E:onnxruntime:, interfaces.cc:828 GetCapability] nodes that cannot be fused together"
    (tmp_path / LOG).write_text(f"# LIBNATIVE: none\n{text}\n")
    assert _judge_build(tmp_path, "").reason == "nodes that cannot be fused together"


# ---- What the QNN provider says of its graphs, as kernels and as nodes left to the CPU.


@needs_qnn
@pytest.mark.parametrize(("data", "dtype"), [(np.uint8, "int8"), (np.uint16, "int16")])
def test_a_product_with_pairs_on_all_sides_computes_in_integers(data: type, dtype: str) -> None:
    proof = prove("conv", data)
    assert (proof.placement.partitions, proof.placement.left) == (1, ())
    node = proof.node("c/Conv")
    assert (node.type, node.kind, node.types) == (dtype, "Conv2d", f"{np.dtype(data)} x int8 -> {np.dtype(data)}")
    assert {site.site: site.state for site in proof.sites} == dict.fromkeys(("x", "w", "yd"), SiteState.FUSED)
    kernel = next(one for one in proof.kernels if one.kind == "Conv2d")
    assert "y/Relu" in kernel.nodes
    assert kernel.weights[0].layout == "several scales"
    assert re.fullmatch(r"scale [\d.e-]+, zero point 0", kernel.outputs[0].layout)


@needs_qnn
def test_weights_of_four_bits_are_told_from_those_of_eight() -> None:
    model = make_graph("conv", np.uint16)
    for name in ("w", "wz"):
        tensor = next(one for one in model.graph.initializer if one.name == name)
        values = numpy_helper.to_array(tensor) % 8
        tensor.CopyFrom(helper.make_tensor(name, TensorProto.INT4, values.shape, values.ravel().tolist()))
    node = onnxq.prove(model, overrides={"engine": "qnn"}).node("c/Conv")
    assert (node.type, node.types, node.reason) == ("int4 weights, int16", "uint16 x int4 -> uint16", "")


@needs_qnn
def test_an_operator_that_the_npu_lacks_cuts_the_network_in_two() -> None:
    proof = prove("cut", max_partitions=1)
    (left,) = proof.placement.left
    assert (proof.placement.partitions, left.subject, left.code) == (2, "e/Erf", "R116")
    assert "not supported" in left.reason
    assert "Gelu" in left.fix


@needs_qnn
def test_a_node_that_the_validator_refuses_is_named_with_a_fix() -> None:
    proof = prove("gemm", require_int=True)
    (left,) = proof.placement.left
    reason = "the validator of the HTP refuses it as FullyConnected (error 3110)"
    assert (left.subject, left.reason) == ("y/Gemm", reason)
    assert "on its output" in left.fix
    assert proof.node("y/Gemm").type == "CPU"
    assert left.reason in proof.node("y/Gemm").reason
    assert "left to the CPU" in proof.site("v").reason


@needs_qnn
@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("conv", {"require_int": True, "max_partitions": 1}, ""),
        ("cut", {"max_partitions": 1}, "2 partitions run on the device, and 1 nodes on the CPU"),
        ("gemm", {"require_int": True}, "not in integers"),
    ],
)
def test_demands_on_the_device_fail_the_command(name: str, overrides: dict[str, object], text: str) -> None:
    proof = prove(name, **overrides)
    error = find_unmet_requirement(proof)
    assert proof.holds == (error is None)
    assert text in str(error) if text else error is None


@needs_qnn
def test_a_build_that_the_validator_ends_blames_the_node() -> None:
    build = prove("conv", np.int16, np.uint8).build
    assert (str(build.state), build.node) == ("failed", "c/Conv")
    assert "refuses it as Conv2d" in build.reason
    assert "int8 for weights" in str(find_unmet_requirement(prove("conv", np.int16, np.uint8)))


@needs_qnn
@pytest.mark.usefixtures("engines_here")
def test_integers_are_demanded_of_other_engines_too() -> None:
    assert onnxq.prove(make_graph("conv"), overrides={"engine": "ort", "require_int": True}).holds
    (requirement,) = onnxq.prove(make_graph("cut"), overrides={"engine": "ort", "require_int": True}).requirements
    assert "e/Erf" in requirement.unmet


def test_nodes_are_found_by_the_names_that_rewrites_give_them() -> None:
    names = NodeNames(graph("(float[4] x) => (float[4] y) { [a] h = Relu(x) [Transpose] y = Transpose(h) }"))
    found = [names.find_node(name) for name in ("a", "a_token_7", "a/duplicated", "Transpose_token_7", "b_token_1")]
    assert found == ["a", "a", "a", "", ""]


def test_known_reasons_have_a_fix() -> None:
    assert "sizes" in find_fix("Cannot get shape")
    assert find_fix("no such reason") == ""
