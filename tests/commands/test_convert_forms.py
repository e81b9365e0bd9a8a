"""`convert`: forms that a file may come in, and that it may get: operators on integers, blocks, narrow floats."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, version_converter
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

import onnxq
from onnxq.commands.convert import Conversion
from onnxq.numerics import fake_quant
from onnxq.pipeline.quantized_source import read_quantized
from onnxq.pipeline.retarget import Kept
from onnxq.plan import SitePlans
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.backends.openvino.graphs import needs_openvino
from tests.codes.kit import model
from tests.commands.test_convert import EVERYTHING_IN_TRT, QUICK, list_weights, measure_db
from tests.networks import add_arrays
from tests.pipeline.models import EVERYTHING, Reader, images, quantize, residual

pytestmark = pytest.mark.usefixtures("engines_here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms")
    onnx.save(residual(), path / "m.onnx")
    quantize_static(
        path / "m.onnx", path / "operators.onnx", Reader(images()["x"]), quant_format=QuantFormat.QOperator,
        per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip
    quantize_dynamic(path / "m.onnx", path / "dynamic.onnx", op_types_to_quantize=["Conv", "MatMul", "Gemm"])
    return path


@pytest.fixture(scope="module")
def quantized() -> onnxq.Result:
    return quantize(residual(), images(), EVERYTHING)


def convert(source: Any, to: str, config: Any = None, data: Any = None, **overrides: Any) -> Conversion:
    return onnxq.convert(source, to, data, config, overrides=QUICK | overrides)


def list_ops(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


def count_kept(done: Conversion) -> Counter[Kept]:
    return Counter(site.how for site in done.sites)


@pytest.mark.parametrize(("to", "config"), [("ort", EVERYTHING), ("trt", EVERYTHING_IN_TRT)])
def test_operators_on_integers_become_pairs(folder: Path, to: str, config: Any) -> None:
    done = convert(folder / "operators.onnx", to, config)
    assert count_kept(done)[Kept.INTEGERS] == 4
    assert not count_kept(done)[Kept.ROUNDED]
    assert done.answers is not None
    assert done.answers.after > done.answers.before - 1
    assert not [op for op in list_ops(done.result.model) if op.startswith("Q") and op != "QuantizeLinear"]
    stored = {codes.tobytes() for codes in list_weights(onnx.load(folder / "operators.onnx"))}
    assert stored == {codes.tobytes() for codes in list_weights(done.result.model)}


@pytest.mark.recent_ort
def test_dynamic_operators_stay_dynamic_or_get_ranges(folder: Path) -> None:
    config = onnxq.load_config("ort-dynamic", {"rules": [{"op": "*", "set": {"quantize": True}}]})
    again = convert(folder / "dynamic.onnx", "ort", config)
    assert Kept.DYNAMIC in count_kept(again)
    assert not count_kept(again)[Kept.ROUNDED]
    assert list_ops(again.result.model)["DynamicQuantizeLinear"] >= 1
    bare = convert(folder / "dynamic.onnx", "trt")
    assert {refusal.code for refusal in bare.report.refusals} >= {"R106"}
    full = convert(folder / "dynamic.onnx", "trt", data=images())
    assert count_kept(full)[Kept.SAMPLES] >= 3
    assert count_kept(full)[Kept.INTEGERS] + count_kept(full)[Kept.ROUNDED] >= 3


def test_the_float_network_is_the_one_before(quantized: onnxq.Result) -> None:
    """What `apply` put in is gone, names are those of before, and weights are the values of the plan's integers."""
    before, floats = residual(), onnxq.convert(quantized.model, "float").result.model
    networks = [[(node.op_type, *node.input, *node.output) for node in one.graph.node] for one in (before, floats)]
    assert networks[0] == networks[1]
    names = {one.name for one in before.graph.initializer}
    found = {one.name: numpy_helper.to_array(one) for one in floats.graph.initializer}
    assert found.keys() == names
    for site in quantized.plan.sites:
        if site.role is Role.WEIGHT:
            assert site.qparams is not None
            value = found[str(site.site)]
            assert np.array_equal(fake_quant(value, site.qparams, site.spec), value)


def test_the_plan_of_a_file_is_read_back(quantized: onnxq.Result) -> None:
    """plan -> file -> plan: each site with the numbers that it had."""

    def list_numbers(sites: SitePlans) -> dict[str, tuple[Any, ...]]:
        found = {str(site.site): (site, site.qparams) for site in sites if site.role is not Role.BIAS}
        return {name: (site.role, site.spec, known and (*known.scale.flat,)) for name, (site, known) in found.items()}

    source = read_quantized(quantized.model)
    assert list_numbers(quantized.plan.sites) == list_numbers(source.existing.sites)


@pytest.mark.parametrize(("to", "config"), [("ort", EVERYTHING), ("trt", EVERYTHING_IN_TRT)])
def test_twice_is_once(quantized: onnxq.Result, to: str, config: Any) -> None:
    once = convert(quantized.model, to, config, images()).result.model
    twice = convert(once, to, config, images()).result.model
    # The plan in the notes says where its numbers came from.
    assert once.graph.SerializeToString(deterministic=True) == twice.graph.SerializeToString(deterministic=True)


def test_narrow_floats_stay_around(quantized: onnxq.Result) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(residual())
    typed = quantize(half, images(), EVERYTHING_IN_TRT).model
    done = convert(typed, "ort", EVERYTHING, images())
    assert count_kept(done)[Kept.INTEGERS] == 4
    graph = done.result.model.graph
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert kinds == {onnx.TensorProto.FLOAT16}
    # Between them all is float32, where ONNX Runtime has its kernels.
    scales = {one.data_type for one in graph.initializer if one.name.endswith("/scale")}
    assert scales == {onnx.TensorProto.FLOAT}
    floats = onnxq.convert(typed, "float").result.model
    assert {one.data_type for one in floats.graph.initializer} == {onnx.TensorProto.FLOAT16}
    x = {"x": images(4)["x"].astype(np.float16)}
    exact, found = (Session(proto, optimize=False).run(x)["y"] for proto in (half, floats))
    assert measure_db(np.asarray(exact, np.float32), np.asarray(found, np.float32)) > 30
    # float16 inside alone, as for TensorRT: the float network is the float32 one.
    inside = convert(quantized.model, "trt", data=images()).result.model
    assert list_ops(inside)["Cast"] >= 1
    assert list_ops(onnxq.convert(inside, "float").result.model) == list_ops(residual())


def test_constants_that_were_rounded_to_float16_are_those_of_the_functions_they_are_in() -> None:
    """A Gelu written out: 1/√2 is off by 1e-4 in float16."""
    rng = np.random.default_rng(1)
    arrays = {"w": rng.standard_normal((64, 64)), "root": np.sqrt(2), "one": 1, "half": 0.5}
    floats = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    body = """g (float[4,64] x) => (float[4,64] y) {
        h = MatMul(x, w) d = Div(h, root) e = Erf(d) f = Add(e, one) p = Mul(h, f) g = Mul(p, half) y = Tanh(g)
    }"""
    samples = [{"x": rng.standard_normal((4, 64)).astype(np.float32)} for _ in range(8)]
    typed = quantize(model(body, opset=20, **floats), samples, EVERYTHING_IN_TRT).model
    assert list_ops(typed)["Erf"] == 1
    assert list_ops(convert(typed, "ort", EVERYTHING).result.model)["Gelu"] == 1


def test_channels_that_a_rewrite_scales_keep_their_integers() -> None:
    """A BatchNormalization behind a quantized Conv, as TensorRT's tools leave it, goes into its scales."""
    rng = np.random.default_rng(0)
    proto = residual()
    relu = next(node for node in proto.graph.node if node.output[0] == "r")
    relu.input[0] = "n"
    names = ("gamma", "beta", "mean", "variance")
    add_arrays(proto.graph, **{name: rng.uniform(0.5, 2, 32).astype(np.float32) for name in names})
    norm = onnx.helper.make_node("BatchNormalization", ["a", *names], ["n"], "norm")
    proto.graph.node.insert(1, norm)
    onnx.checker.check_model(proto)
    tool = quantize(proto, images(), EVERYTHING_IN_TRT, skip=["batchnorm"]).model
    assert list_ops(tool)["BatchNormalization"] == 1
    done = convert(tool, "ort", EVERYTHING, images())
    assert list_ops(done.result.model)["BatchNormalization"] == 0
    assert count_kept(done)[Kept.INTEGERS] == 4
    found, wanted = ({codes.tobytes() for codes in list_weights(one)} for one in (done.result.model, tool))
    assert found == wanted


def products() -> onnx.ModelProto:
    """Two products with weights of which blocks can be made."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (64, 96), "b0": (96,), "w1": (96, 40)}
    values = {name: (rng.standard_normal(shape) / 8).astype(np.float32) for name, shape in shapes.items()}
    body = "g (float[N,5,64] x) => (float[N,5,40] y) { a = MatMul(x, w0) b = Add(a, b0) r = Relu(b) y = MatMul(r, w1) }"
    return model(body, **values)


@pytest.fixture(scope="module", params=[True, False], ids=["symmetric", "asymmetric"])
def blocks(request: pytest.FixtureRequest) -> onnx.ModelProto:
    config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=request.param)
    tool = MatMulNBitsQuantizer(products(), block_size=32, is_symmetric=request.param, algo_config=config)
    tool.process()
    made: onnx.ModelProto = tool.model.model
    return made


def list_packed(proto: onnx.ModelProto) -> list[bytes]:
    arrays = map(numpy_helper.to_array, proto.graph.initializer)
    return [value.tobytes() for value in arrays if value.ndim == 3]


def test_blocks_are_operators_or_pairs_with_the_same_integers(blocks: onnx.ModelProto) -> None:
    pairs = convert(blocks, "ort")
    assert list_ops(pairs.result.model) == {"DequantizeLinear": 2, "MatMul": 2, "Add": 1, "Relu": 1}
    assert count_kept(pairs) == {Kept.INTEGERS: 2}
    assert pairs.answers is not None
    assert pairs.answers.agreement == np.inf
    operators = convert(pairs.result.model, "ort", emit="nbits").result.model
    assert list_ops(operators)["MatMulNBits"] == 2
    assert list_packed(operators) == list_packed(blocks)


def test_weights_that_no_output_depends_on_are_left_out() -> None:
    dead = "e = DequantizeLinear(v, s, z) u = MatMul(x, e)"
    text = f"g (float[N,8] x) => (float[N,8] y) {{ {dead} d = DequantizeLinear(w, s, z) y = MatMul(x, d) }}"
    proto = model(text, w=np.eye(8, dtype=np.int8), v=np.eye(8, dtype=np.int8), s=np.float32(0.5), z=np.int8(0))
    assert list_ops(onnxq.convert(proto, "float").result.model) == {"MatMul": 1}


def test_operators_that_stay_in_a_float_model_are_said() -> None:
    tool = MatMulNBitsQuantizer(products(), block_size=32, is_symmetric=True)
    tool.process()
    proto = tool.model.model
    add_arrays(proto.graph, z=np.full(96 * 2, 7.5, np.float32))
    next(node for node in proto.graph.node if node.op_type == "MatMulNBits").input.append("z")
    assert "W140" in onnxq.summarize(onnxq.convert(proto, "float"))


@pytest.mark.parametrize("level", [0, 4])
def test_operators_compute_on_as_many_bits_as_those_of_the_file(level: int) -> None:
    tool = MatMulNBitsQuantizer(products(), block_size=32, is_symmetric=True, accuracy_level=level)
    tool.process()
    done = convert(tool.model.model, "ort", emit="nbits")
    found = [node for node in done.result.model.graph.node if node.op_type == "MatMulNBits"]
    assert [{a.name: a.i for a in node.attribute}.get("accuracy_level", 0) for node in found] == [level, level]
    assert done.answers is not None
    assert done.answers.agreement > 100
    # What is asked for is not the file's.
    asked = convert(tool.model.model, "ort", emit="nbits", accuracy_level=1).result.model
    assert {a.i for node in asked.graph.node for a in node.attribute if a.name == "accuracy_level"} == {1}


def test_blocks_for_an_engine_without_zero_points_are_rounded_anew_and_said(blocks: onnx.ModelProto) -> None:
    done = convert(blocks, "trt")
    assert {site.how for site in done.sites} == {Kept.ROUNDED}
    assert all(site.error_db is not None and site.error_db > 20 for site in done.sites)
    pairs = [node for node in done.result.model.graph.node if node.op_type == "DequantizeLinear"]
    assert [onnx.helper.get_node_attr_value(node, "block_size") for node in pairs] == [32, 32]


@needs_openvino
def test_blocks_of_negative_scales_are_kept_for_openvino(blocks: onnx.ModelProto) -> None:
    done = convert(blocks, "openvino")
    assert count_kept(done) == {Kept.INTEGERS: 2}
    assert done.answers is not None
    assert done.answers.agreement == np.inf
    (engine,) = done.report.engines
    # Its kernels round data to 8 bits.
    assert all(output.sqnr_db > 35 for output in engine.outputs)


def test_rows_in_blocks_are_read_for_engines_that_have_no_such_lookup() -> None:
    """genai's builder looks rows up in the packed weight of the projection."""
    rng = np.random.default_rng(0)
    proto = model(
        """g (int64[N] i) => (float[N,64] y) { t = Reshape(q, shape)
        [look] x = com.microsoft.GatherBlockQuantized<block_size = 32, gather_axis = 0, quantize_axis = 1>(t, i, s)
        y = com.microsoft.MatMulNBits<K = 64, N = 64, bits = 4, block_size = 32>(x, q, s) }""",
        q=rng.integers(0, 256, (64, 2, 16)).astype(np.uint8), s=rng.uniform(0.01, 0.1, (64, 2)).astype(np.float32),
        shape=np.asarray([64, -1]),
    )  # fmt: skip
    done = convert(proto, "openvino")
    assert list_ops(done.result.model) == {"Gather": 1, "DequantizeLinear": 1, "MatMul": 1}
    assert done.answers is not None
    assert done.answers.agreement > 100
    floats = onnxq.convert(proto, "float")
    assert list_ops(floats.result.model) == {"Gather": 1, "MatMul": 1}
    assert not floats.report.warnings
    # ONNX Runtime has no smaller form.
    assert list_ops(convert(proto, "ort").result.model)["GatherBlockQuantized"] == 1


def test_what_cannot_be_run_is_converted_unrun(blocks: onnx.ModelProto) -> None:
    proto = onnx.ModelProto.FromString(blocks.SerializeToString())
    proto.graph.node[-1].output[0] = "inside"
    proto.graph.node.append(onnx.helper.make_node("Thing", ["inside"], ["y"], "thing", domain="of.mine"))
    proto.opset_import.append(onnx.helper.make_opsetid("of.mine", 1))
    done = convert(proto, "ort")
    assert count_kept(done) == {Kept.INTEGERS: 2}
    assert done.answers is None


def test_newer_opsets_are_read() -> None:
    newer = version_converter.convert_version(residual(), 22)
    typed = quantize(newer, images(), EVERYTHING_IN_TRT).model
    done = convert(typed, "ort", EVERYTHING, images())
    assert count_kept(done)[Kept.INTEGERS] == 4
    assert Session(done.result.model, optimize=True).run(images(2))["y"].shape == (2, 10)


def test_kernels_before_and_after_are_counted(quantized: onnxq.Result) -> None:
    # What TensorRT fuses, ONNX Runtime computes in float: a Relu whose range reaches below 0, a sum without pairs.
    source = convert(quantized.model, "trt", EVERYTHING_IN_TRT, images()).result.model
    done = convert(source, "ort", EVERYTHING, images(), kernels=True)
    assert done.kernels is not None
    assert done.kernels.engine.startswith("ONNX Runtime")
    assert done.kernels.before.types["Conv"].get("int8", 0) < 3
    assert done.kernels.after.types["Conv"] == {"int8": 3}
    # Operators on integers are counted as those that they stand for.
    written = convert(source, "ort", EVERYTHING, images(), kernels=True, emit="qoperator")
    assert list_ops(written.result.model)["QLinearConv"] == 3
    assert written.kernels is not None
    assert written.kernels.after == done.kernels.after
    text = onnxq.summarize(done)
    assert f"after: {done.kernels.after.describe()}" in " ".join(text.split())
    assert "before:" in text


def test_codes_survive_the_way_there_and_back(quantized: onnxq.Result) -> None:
    there = convert(quantized.model, "trt", EVERYTHING_IN_TRT, images()).result.model
    back = convert(there, "ort", EVERYTHING, images()).result.model
    before, after = (read_quantized(model) for model in (quantized.model, back))
    assert before.codes.keys() == after.codes.keys()
    for edge, site in before.existing.by_reader.items():
        if site.role is Role.WEIGHT:
            assert np.array_equal(before.codes[edge], after.codes[edge])
            assert site.qparams == after.existing.by_reader[edge].qparams


@pytest.mark.parametrize("turned", [False, True])
def test_integers_at_the_ends_of_a_model_stay(turned: bool) -> None:
    """Full-integer files of tflite turn them around there."""
    body = """g (uint8[64,64] x) => (uint8[64,64] y) {
        d = DequantizeLinear(x, s, z) v = DequantizeLinear(w, t, o) h = Gemm(d, v) y = QuantizeLinear(h, t, z) }"""
    if turned:
        body = body.replace("{", "{ a = Transpose(x)").replace("Linear(x,", "Linear(a,").replace("y = Q", "b = Q")
        body = body.replace("z) }", "z) y = Transpose(b) }")
    codes = np.random.default_rng(0).integers(-90, 90, (64, 64)).astype(np.int8)
    proto = model(body, s=np.float32(0.02), z=np.uint8(120), t=np.float32(0.01), o=np.int8(0), w=codes)
    done = convert(proto, "ort", EVERYTHING)
    assert count_kept(done)[Kept.INTEGERS] == 1
    x = {"x": np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)}
    answers = [Session(one, optimize=False).run(x)["y"] for one in (proto, done.result.model)]
    assert np.array_equal(*answers)
