"""OpenVINO builds, runs and times files in processes of its own, and each of its kernels has the names of its nodes."""

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends.openvino import engine
from onnxq.report.model import REFUSED
from onnxq.runtime import detect_cpu
from tests.backends.openvino.graphs import make_net, make_samples, needs_openvino, quantize_all, quantize_net
from tests.codes.kit import model
from tests.motifs.catalogue import MOTIFS
from tests.motifs.net import compose
from tests.passes.kit import random_weights

pytestmark = needs_openvino
_PRODUCTS = {"stem", "expand", "depthwise", "project", "swish", "linear"}


def test_every_product_runs_in_integers_under_its_own_name() -> None:
    proof = onnxq.prove(quantize_net().model)
    assert proof.build.engine == "openvino"
    assert {node.node: node.type for node in proof.nodes if node.op != "GlobalAveragePool"} == dict.fromkeys(
        _PRODUCTS, "int8"
    )
    kernels = {kernel.name: kernel for kernel in proof.kernels}
    swish = kernels[proof.node("swish").kernel]
    # The activation and the pair behind a product are in its kernel.
    assert {"swish", "product"} <= set(swish.nodes)
    assert swish.outputs[0].dtype == "uint8"
    assert swish.tactic.endswith("I8")


def test_small_layers_that_one_kernel_computes_run_in_integers() -> None:
    """On CPUs with VNNI they are one kernel, which quantizes within."""
    net = model(
        """g (float[1,64] x) => (float[1,64] y) {
            h = Gemm(x, w, b) r = Relu(h) g = Gemm(r, w, b) s = Relu(g) y = Gemm(s, w, b) }""",
        **random_weights({"w": (64, 64), "b": (64,)}),
    )
    samples = [{"x": np.random.default_rng(k).standard_normal((1, 64)).astype(np.float32)} for k in range(4)]
    proof = onnxq.prove(quantize_all(net, samples).model, overrides={"engine": "openvino"})
    assert {node.type for node in proof.nodes} == {"int8"}
    proof = onnxq.prove(net, overrides={"engine": "openvino"})
    assert {node.type for node in proof.nodes} == {"float32"}


def test_float_nodes_are_float_and_requirements_name_them() -> None:
    proof = onnxq.prove(
        make_net(), overrides={"engine": "openvino", "require": [("int8", "Conv")], "forbid": ["float32"]}
    )
    assert {node.type for node in proof.nodes if node.op == "Conv"} == {"float32"}
    required, forbidden = proof.requirements
    assert set(required.unmet) == _PRODUCTS - {"linear"}
    assert set(forbidden.unmet) == _PRODUCTS


def test_signed_data_with_a_zero_point_are_seen_to_be_dequantized() -> None:
    net = onnx.ModelProto.FromString(quantize_net().model.SerializeToString())
    signed = 0
    for tensor in net.graph.initializer:
        if tensor.data_type == onnx.TensorProto.UINT8 and not tensor.dims:
            zero = int(onnx.numpy_helper.to_array(tensor))
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(zero - 128, np.int8), tensor.name))
            signed += 1
    assert signed
    proof = onnxq.prove(net, overrides={"engine": "openvino"})
    # Which kernels take such data depends on the CPU: those for AVX2 do, those for VNNI on some.
    dequantized = proof.node("stem").type == "int8 weights, float32"
    assert dequantized or proof.node("stem").type == "int8"
    assert dequantized <= (detect_cpu() == "vnni")
    assert ("without a zero point" in proof.node("stem").reason) == dequantized


def test_the_check_of_quantize_is_as_the_engine_runs_it() -> None:
    report = quantize_net().report
    (engine,) = report.engines
    assert not engine.reason
    assert engine.run == "as OpenVINO runs it"
    (output,) = engine.outputs
    # The file's arithmetic: no pair stands within a kernel, where the engine would not round.
    assert output.agreement_db > 100
    assert output.sqnr_db > 25
    assert "as OpenVINO runs it" in [figure.run for figure in report.figures]


def test_a_file_that_takes_narrow_floats_is_run() -> None:
    (engine,) = quantize_all(make_net(), make_samples(), io_types="float16").report.engines
    assert not engine.reason
    assert engine.outputs[0].sqnr_db > 25


def test_models_are_timed_side_by_side_and_compared_by_output() -> None:
    data = list(make_samples())[:2]
    bench = onnxq.bench([make_net(), quantize_net().model], data, overrides={"engine": "openvino", "seconds": 0.2})
    assert bench.engine == "openvino"
    assert [model.eager is not None for model in bench.models] == [True, True]
    diff = onnxq.diff(make_net(), quantize_net().model, data, overrides={"engines": ["openvino"]})
    assert "openvino" in [run.name for run in diff.runs]


@pytest.mark.usefixtures("engines_here")
def test_free_sizes_stay_free_where_models_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As applications load the file: OpenVINO has other kernels for sizes that it knows."""
    compiled = []
    compile_model = engine._compile
    monkeypatch.setattr(engine, "_compile", lambda *settings: compiled.append(compile_model(*settings)) or compiled[-1])
    net = model("g (float[N,8] x) => (float[N,8] y) { y = Relu(x) }")
    onnxq.bench([net], [{"x": np.zeros((3, 8), np.float32)}], overrides={"engine": "openvino", "seconds": 0.1})
    assert compiled
    assert all(network.input(0).get_partial_shape().is_dynamic for network in compiled)


def test_a_node_that_the_engine_does_not_have_is_named() -> None:
    net = model("g (float[1,4] x) => (float[1,4] y) { a = Relu(x) [mine] y = own.Own(a) }", ir=10)
    net.opset_import.add(domain="own", version=1)
    proof = onnxq.prove(net, overrides={"engine": "openvino"})
    assert not proof.built
    assert proof.build.node == "mine"


def test_a_file_that_the_engine_refuses_is_a_warning() -> None:
    rng = np.random.default_rng(0)
    text = """g (float[1,8,4,4] x) => (float[1,8,1,1] y) {
        c = Conv(x, w) y = AveragePool<kernel_shape=[9,9], strides=[9,9], ceil_mode=1>(c) }"""
    net = model(text, w=rng.standard_normal((8, 8, 1, 1)).astype(np.float32))
    samples = [{"x": rng.standard_normal((1, 8, 4, 4)).astype(np.float32)} for _ in range(6)]
    report = quantize_all(net, samples, rules=[{"op": "Conv", "set": {"quantize": True}}]).report
    (alarm,) = [alarm for alarm in report.alarms() if alarm.code == "W148"]
    assert "OpenVINO refuses the file: quantized: cannot build the engine" in str(alarm)
    assert str(alarm).endswith("it refuses the float model, too")
    assert report.grade is REFUSED


def test_sizes_to_fix_are_named_where_the_engine_takes_the_model_with_them() -> None:
    rng = np.random.default_rng(0)
    text = "g (float[N,8,4,4] x) => (float[N,8,1,1] y) { c = Conv(x, w) y = GlobalLpPool(c) }"
    net = model(text, w=rng.standard_normal((8, 8, 1, 1)).astype(np.float32))
    samples = [{"x": rng.standard_normal((1, 8, 4, 4)).astype(np.float32)} for _ in range(6)]
    (alarm,) = [alarm for alarm in quantize_all(net, samples).report.alarms() if alarm.code == "W148"]
    assert str(alarm).endswith("it refuses the float model, too, but takes it with the sizes of the samples: `fix=…`")


def test_answers_are_compared_on_the_choices_of_the_float_model() -> None:
    """As detectors choose boxes by scores: of two with nearly equal ones either comes first, and nothing is lost."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 400)) / 8, "v": rng.standard_normal((64, 3200)) / 8}
    text = """g (float[1,64] x) => (float[1,40,8] y) {
        scores = MatMul(x, w) best, places = TopK(scores, count)
        values = MatMul(x, v) boxes = Reshape(values, shape) y = Gather(boxes, places)
    }"""
    arrays = {name: value.astype(np.float32) for name, value in weights.items()}
    net = model(text, shape=np.array([400, 8]), count=np.array([40]), **arrays)
    samples = [{"x": rng.standard_normal((1, 64)).astype(np.float32)} for _ in range(8)]
    report = quantize_all(net, samples).report
    scores, boxes = (output.sqnr_db for output in report.engines[0].outputs)
    assert min(scores, boxes) > 25
    assert not report.alarms()


def test_the_float_model_runs_there_where_answers_are_far_from_the_file() -> None:
    """OpenVINO pads a transposed convolution of a given size at other ends than ONNX says."""
    (motif,) = [motif for motif in MOTIFS if motif.name == "conv_transpose_output_shape"]
    net, samples = compose([motif], 20)
    (output,) = quantize_all(net, samples).report.engines[0].outputs
    assert output.float_db < output.sqnr_db + 1
    assert output.agreement_db < 10
    (output,) = quantize_net().report.engines[0].outputs
    assert output.float_db == np.inf
