"""Scripts made for onnxruntime.quantization run here with another import, and nothing they say is lost in silence."""

import importlib
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime import quantization

import onnxq
from onnxq import compat
from onnxq.compat import CompatWarning, StaticQuantConfig, quantize_static
from onnxq.errors import ConfigError
from onnxq.sites import Caution, Role
from tests.compat import scripts
from tests.pipeline.models import narrowed
from tests.pipeline.requantized import kernels

OURS, THEIRS = "onnxq.compat", "onnxruntime.quantization"


def run_script(text: str, package: str) -> list[str]:
    """Run a script in this folder; gives the warnings of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(text.replace("PACKAGE", package), "script.py", "exec"), {})
    return [str(one.message) for one in caught if issubclass(one.category, CompatWarning)]


def float_weights(path: Path) -> set[str]:
    """Names of the weights that no DequantizeLinear makes."""
    graph = onnx.load(path).graph
    known = {tensor.name for tensor in graph.initializer} & {"w0", "w1", "w2"}
    return {name for node in graph.node for name in node.input if name in known and "Quantize" not in node.op_type}


@pytest.mark.parametrize(
    ("script", "body", "stay_float", "said"),
    [
        pytest.param(scripts.IMAGES, scripts.CLASSIFIER, None, "int8 would not pay", id="images"),
        # Its Add stands between float operators, where no pair is worth a kernel of its own.
        pytest.param(scripts.EXCLUDING, scripts.CLASSIFIER, {"w1", "w2"}, "(Add_3)", id="excluding"),
        pytest.param(scripts.CONFIGURED, scripts.CLASSIFIER, {"w2"}, "", id="configured"),
        pytest.param(scripts.NPU, scripts.CLASSIFIER, set(), "", id="npu"),
        pytest.param(scripts.TRANSFORMER, scripts.ENCODER, {"w1"}, "", id="transformer"),
    ],
)
def test_a_script_runs_with_either_import(script, body, stay_float, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    scripts.prepare_folder(tmp_path, body)
    reached = {}
    for package in (THEIRS, OURS):
        warned = run_script(script, package)
        assert [said in text for text in warned] == ([True] if said and package == OURS else []), warned
        reached[package] = scripts.measure_sqnr(tmp_path / "model.onnx", tmp_path / "out.onnx")
        if stay_float is not None:
            assert float_weights(tmp_path / "out.onnx") == stay_float, package
    assert reached[OURS] >= reached[THEIRS], reached


@pytest.mark.recent_ort
@pytest.mark.parametrize(
    "name",
    ["quantize_static", "quantize_dynamic", "quantize", "get_qdq_config", "StaticQuantConfig", "DynamicQuantConfig",
     "quant_pre_process"],
)  # fmt: skip
def test_signatures_are_theirs(name: str) -> None:
    theirs = inspect.signature(getattr(quantization, name)).parameters
    ours = inspect.signature(getattr(compat, name)).parameters
    # Newer releases have more at the end.
    assert list(ours)[: len(theirs)] == list(theirs)
    for key, one in theirs.items():
        default, other = (getattr(each.default, "name", each.default) for each in (one, ours[key]))
        assert other == default, key
        assert ours[key].kind is one.kind, key


def classifier() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    proto = scripts.make_net(scripts.CLASSIFIER)
    return proto, [{"x": x} for x in scripts.make_inputs(proto, 8)]


class ListReader(compat.CalibrationDataReader):
    def __init__(self, samples) -> None:
        self.left = iter(samples)

    def get_next(self):
        return next(self.left, None)


def warned(folder: Path, proto: onnx.ModelProto | None = None, **how: Any) -> tuple[onnxq.Result, list[Caution]]:
    """The result in q.onnx, and the warnings; of the classifier where no other net is given."""
    proto = classifier()[0] if proto is None else proto
    samples = [{"x": x} for x in scripts.make_inputs(proto, 8)]
    with pytest.warns(CompatWarning) as caught:
        done = quantize_static(proto, folder / "q.onnx", ListReader(samples), **how)
    assert {one.filename for one in caught} == {__file__}
    return done, [one.message for one in caught]


def list_codes(cautions: list[Caution]) -> list[str]:
    return [caution.code for caution in cautions]


def test_an_argument_that_means_nothing_warns_once_where_the_function_was_called(tmp_path) -> None:
    extra = {"DedicatedQDQPair": True, "Symetric": 1}
    _, cautions = warned(tmp_path, nodes_to_exclude=["Conv_9"], extra_options=extra)
    said = [str(caution) for caution in cautions if caution.code == "W130"]
    assert [text.split(" means")[0] for text in said] == [
        "DedicatedQDQPair", "Symetric", "nodes_to_exclude: 'Conv_9'",
    ]  # fmt: skip
    assert "did you mean 'Conv_" in said[-1]
    assert set(list_codes(cautions)) == {"W130", "W135"}


def test_an_alarm_about_the_result_is_a_warning(tmp_path) -> None:
    done, cautions = warned(tmp_path, op_types_to_quantize=["LSTM"])
    assert (list_codes(cautions), done.plan.sites) == (["W111"], ())
    assert "nothing was quantized" in str(cautions[0])


def test_by_default_it_says_what_stays_float_and_why(tmp_path) -> None:
    done, (warning,) = warned(tmp_path)
    assert warning.code == "W135"
    assert "1 operator stays float: 1 x int8 would not pay" in str(warning)
    assert "(Gemm_7); nodes_to_quantize and op_types_to_quantize force those that have a kernel" in str(warning)
    assert [one.subject for one in done.report.left_float] == ["Gemm_7"]
    # It is what `quantize` makes.
    proto, samples = classifier()
    plain = onnxq.quantize(proto, samples, overrides={"latency": False})
    assert [(site.site, site.spec) for site in done.plan.sites] == [(one.site, one.spec) for one in plain.plan.sites]
    assert onnx.load(tmp_path / "q.onnx").graph == plain.model.graph


@pytest.mark.parametrize("lists", [{"nodes_to_quantize": ["Gemm_7"]}, {"op_types_to_quantize": ["Gemm"]}])
def test_who_names_an_operator_gets_it_quantized_and_is_told_the_cost(lists, tmp_path) -> None:
    done, cautions = warned(tmp_path, **lists)
    assert list_codes(cautions) == ["W136"]
    assert "forced into integers: 1 operator by rules" in str(cautions[0])
    assert float_weights(tmp_path / "q.onnx") == {"w0", "w1"}
    assert done.report.forced.names == ("Gemm_7",)
    assert done.report.forced.slowdown > 1


def test_a_sum_among_float_operators_gets_pairs_of_its_own(tmp_path) -> None:
    """As ONNX Runtime's own tool makes them; the convolutions around it stay float."""
    assert list_codes(warned(tmp_path, op_types_to_quantize=["Add"])[1]) == ["W136"]
    made = kernels(onnx.load(tmp_path / "q.onnx"))
    assert (made["QLinearAdd"], made["QLinearConv"]) == (1, 0)


def test_bytes_are_not_moved_among_float_operators(tmp_path) -> None:
    _, cautions = warned(tmp_path, op_types_to_quantize=["Flatten"])
    assert list_codes(cautions) == ["W111", "W135"]
    assert "quantized only between quantized nodes" in str(cautions[1])
    assert "force what it reads as well" in str(cautions[1])


def test_a_listed_operator_without_a_name_is_said_by_the_one_it_gets(tmp_path) -> None:
    proto, _ = classifier()
    for node in proto.graph.node:
        node.name = ""
    proto.graph.node[4].op_type = "Sigmoid"
    _, cautions = warned(tmp_path, proto, op_types_to_quantize=["Sigmoid"])
    assert list_codes(cautions) == ["W111", "W135"]
    assert "(t/Sigmoid)" in str(cautions[1])


@pytest.mark.parametrize("op", ["Sigmoid", "Relu"])
def test_a_named_operator_without_a_pair_is_said(op: str, tmp_path) -> None:
    proto = scripts.make_net(scripts.ENCODER)
    proto.graph.node[2].op_type, proto.graph.node[2].name = op, "act"
    _, cautions = warned(tmp_path, proto, op_types_to_quantize=[op])
    assert list_codes(cautions) == ["W111", "W135"]
    assert "1 operator stays float: 1 x pairs are placed where a kernel" in str(cautions[1])
    assert "gives nothing (act) [W135]" in str(cautions[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Between products a pair stands behind it.
        samples = [{"x": x} for x in scripts.make_inputs(proto, 8)]
        quantize_static(proto, tmp_path / "q.onnx", ListReader(samples), op_types_to_quantize=[op, "MatMul"])


@pytest.mark.recent_ort
@pytest.mark.parametrize("body", [scripts.CHAIN, scripts.ENCODER], ids=["convolutions", "matrices"])
@pytest.mark.parametrize("half", [False, True])
def test_float8_answers_that_onnx_runtime_loses_are_said(body: str, half: bool, tmp_path) -> None:
    """Its optimizations misread FP8: the figures are those of the file as its caller runs it."""
    proto = scripts.make_net(body)
    kind = np.float16 if half else np.float32
    samples = [{"x": x.astype(kind)} for x in scripts.make_inputs(proto, 8)]
    float8 = compat.QuantType.QFLOAT8E4M3FN
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = quantize_static(
            narrowed(proto, onnx.TensorProto.FLOAT16) if half else proto, tmp_path / "q.onnx", ListReader(samples),
            activation_type=float8, weight_type=float8,
        )  # fmt: skip
    (check,) = done.report.checks
    assert check.optimized
    # As scales in float32, those of convolutions do not vanish.
    assert done.report.float_types is None
    floats = [{"x": sample["x"].astype(np.float32)} for sample in samples]
    sessions = map(onnxruntime.InferenceSession, (proto.SerializeToString(), tmp_path / "q.onnx"))
    one, other = (
        np.stack([session.run(None, sample)[0] for sample in given]).astype(np.float64)
        for session, given in zip(sessions, (floats, samples), strict=True)
    )
    reached = 10 * np.log10(np.sum(one**2) / np.sum((one - other) ** 2))
    lost = reached < check.sqnr_db[0] - 5
    assert ("W109" in {item.message.code for item in caught}) == lost
    assert not lost or body == scripts.ENCODER


@pytest.mark.recent_ort
def test_a_cache_has_its_plan(tmp_path) -> None:
    proto, samples = classifier()
    plan = tmp_path / "cache.json"
    with pytest.warns(CompatWarning, match="stays float"):
        made = quantize_static(proto, tmp_path / "a.onnx", ListReader(samples), calibration_cache_path=plan)
    again = quantize_static(proto, tmp_path / "b.onnx", calibration_cache_path=plan)
    assert (tmp_path / "a.onnx").stat().st_size
    assert onnx.load(tmp_path / "a.onnx").graph == onnx.load(tmp_path / "b.onnx").graph
    assert [site.site for site in again.plan.sites] == [site.site for site in made.plan.sites]
    # onnxruntime reads it, too, as ranges.
    seen = quantization.load_tensors_data(plan)
    assert seen.calibration_method is quantization.CalibrationMethod.MinMax
    for site in (site for site in made.plan.sites if site.role is Role.ACTIVATION):
        low, high = seen[site.tensor.name].range_value
        np.testing.assert_allclose((high - low) / 255, site.qparams.scale, rtol=1e-5)
    with pytest.warns(CompatWarning, match="calibration_cache_path means nothing here"):
        quantize_static(proto, tmp_path / "b.onnx", calibration_cache_path=plan, nodes_to_exclude=["Conv_0"])


@pytest.mark.recent_ort
def test_ranges_that_onnxruntime_wrote_need_no_samples(tmp_path) -> None:
    proto, samples = classifier()
    onnx.save(proto, tmp_path / "m.onnx")
    cache = tmp_path / "cache.json"
    named = {"op_types_to_quantize": ["Conv", "Gemm"], "calibration_cache_path": cache}
    quantization.quantize_static(tmp_path / "m.onnx", tmp_path / "t.onnx", ListReader(samples), **named)
    text = cache.read_bytes()
    done = quantize_static(proto, tmp_path / "q.onnx", None, **named)
    assert cache.read_bytes() == text
    seen = quantization.load_tensors_data(cache)
    sites = [site for site in done.plan.sites if site.role is Role.ACTIVATION]
    assert len(sites) > 1
    assert {site.qparams.origin for site in sites} == {"given by a rule"}
    for site in sites:
        if site.tensor.name in seen:
            low, high = (float(np.ravel(end)[0]) for end in seen[site.tensor.name].range_value)
            np.testing.assert_allclose(max(high, 0) - min(low, 0), float(site.qparams.scale) * 255, rtol=0.02)
    onnxruntime.InferenceSession(tmp_path / "q.onnx").run(None, samples[0])
    cache.write_text('{"calibration_method": 1}')
    with pytest.raises(ConfigError, match=r"is no calibration cache.*\[Q304\]"):
        quantize_static(proto, tmp_path / "q.onnx", None, **named)


def test_qoperator_writes_operators(tmp_path) -> None:
    warned(tmp_path, quant_format=quantization.QuantFormat.QOperator, op_types_to_quantize=["Conv", "Gemm"])
    ops = [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node]
    assert "QLinearConv" in ops
    assert "QGemm" in ops
    assert {"Conv", "Gemm"}.isdisjoint(ops)


def test_without_samples_and_with_a_configuration_of_another_package_it_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"there are no samples.*\[Q319\]"):
        quantize_static(classifier()[0], tmp_path / "q.onnx")
    with pytest.raises(ConfigError, match="is of type dict"):
        compat.quantize(classifier()[0], tmp_path / "q.onnx", {})


def read_config(package: Any, proto: onnx.ModelProto | Path, **how: Any) -> dict[str, Any]:
    """The fields of a configuration, without our own extra options."""
    config = package.get_qdq_config(proto, None, **how)
    fields = {name: getattr(config, name) for name in inspect.signature(StaticQuantConfig).parameters}
    return fields | {name: sorted(fields[name] or ()) for name in ("op_types_to_quantize", "nodes_to_exclude")}


@pytest.mark.recent_ort
@pytest.mark.parametrize("how", [
    {},
    {"nodes_to_exclude": ["Conv_0", "Conv_2"]},
    {"nodes_to_exclude": lambda _, node: node.op_type == "Gemm"},
    {"op_types_to_quantize": ["Conv"]},
    {"weight_type": quantization.QuantType.QInt4},
    {"tensor_quant_overrides": {"w0": [{"quant_type": quantization.QuantType.QInt4}]}},
    {"tensor_quant_overrides": {"w0": [{"quant_type": quantization.QuantType.QInt4}]},
     "activation_type": quantization.QuantType.QUInt16},
    {"calibrate_method": quantization.CalibrationMethod.Percentile, "calibrate_args": {"percentile": 99.0}},
])  # fmt: skip
@pytest.mark.parametrize("external", [False, True])
def test_a_configuration_reads_as_theirs(how, external: bool, tmp_path) -> None:
    onnx.save(classifier()[0], tmp_path / "m.onnx", save_as_external_data=external)
    mine, theirs = (read_config(package, tmp_path / "m.onnx", **how) for package in (compat, quantization))
    assert mine == theirs


def test_a_configuration_asks_for_no_more_than_its_caller(tmp_path) -> None:
    proto, samples = classifier()
    config = compat.get_qdq_config(proto, ListReader(samples))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompatWarning)
        configured = compat.quantize(proto, tmp_path / "c.onnx", config)
    # Nothing is forced, and what was filled in is not warned about.
    assert {one.message.code for one in caught if issubclass(one.category, CompatWarning)} <= {"W135"}
    done, _ = warned(tmp_path, proto)
    assert configured.model.SerializeToString() == done.model.SerializeToString()


def observe_ends(proto: onnx.ModelProto, samples: list[dict[str, np.ndarray]], name: str) -> tuple[float, float]:
    """The lowest and the highest value of a tensor, with 0."""
    tapped = onnx.ModelProto.FromString(proto.SerializeToString())
    tapped.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(tapped.SerializeToString())
    values = np.stack([session.run([name], sample)[0] for sample in samples])
    return min(float(values.min()), 0.0), max(float(values.max()), 0.0)


def test_minmax_that_is_asked_for_is_the_lowest_and_the_highest_value(tmp_path) -> None:
    proto, samples = classifier()
    # Several times each, as the check holds some back.
    samples *= 4
    # What a file of onnxq leaves out stays left out.
    (tmp_path / "own.yaml").write_text("extends: ort-int8\nskip: [rounding]\n")
    extra, minmax = {"onnxq.config": tmp_path / "own.yaml"}, quantization.CalibrationMethod.MinMax
    how = {"op_types_to_quantize": ["Conv"], "calibrate_method": minmax, "extra_options": extra}
    done = quantize_static(proto, tmp_path / "q.onnx", ListReader(samples), **how)
    assert not any(text.startswith(("rounding", "ranges")) for text in done.report.accounts)
    sites = [site for site in done.plan.sites if site.role is Role.ACTIVATION]
    assert {site.qparams.origin.partition(" over ")[0] for site in sites} == {"minmax"}
    # The input, which nothing was scaled in.
    (scale,) = (float(site.qparams.scale) for site in sites if site.tensor.name == "x")
    low, high = observe_ends(proto, samples, "x")
    assert scale == pytest.approx((high - low) / 255, rel=1e-6)


@pytest.mark.parametrize("least", [None, 1e-4, 50.0])
def test_a_range_has_the_least_width_that_is_asked_for(least: float | None, tmp_path) -> None:
    proto, samples = classifier()
    silent = [{"x": 0 * sample["x"]} for sample in samples]
    extra = {"MinimumRealRange": least}
    done = quantize_static(
        proto, tmp_path / "q.onnx", ListReader(silent), op_types_to_quantize=["Conv"], extra_options=extra
    )
    scales = {site.tensor.name: float(np.min(site.qparams.scale)) for site in done.plan.sites if site.tensor}
    assert scales["x"] == pytest.approx(2**-24 if least is None else least / 255, rel=1e-6)
    if least == 50.0:
        # Weights are around 0, and narrower than that.
        assert scales["w0"] > 25 / 127


def test_blocks_are_for_kernels_of_weights_alone(tmp_path) -> None:
    proto = scripts.make_net(scripts.ENCODER)
    done, cautions = warned(tmp_path, proto, extra_options={"BlockSize": 32})
    assert list_codes(cautions) == ["W111", "W135"]
    assert "no MatMul kernel for 8-bit symmetric int8 per block weights" in str(cautions[1])
    assert not done.plan.sites
    extra = {"BlockSize": 32, "onnxq.config": "ort-int4-weights"}
    samples = [{"x": x} for x in scripts.make_inputs(proto, 8)]
    quantize_static(proto, tmp_path / "b.onnx", ListReader(samples), extra_options=extra)
    blocked = [node for node in onnx.load(tmp_path / "b.onnx").graph.node if node.op_type == "DequantizeLinear"]
    assert [attr.i for node in blocked for attr in node.attribute if attr.name == "block_size"] == [32, 32]


def test_a_configuration_has_its_arguments_as_attributes() -> None:
    config = StaticQuantConfig(None, per_channel=True)
    config.nodes_to_exclude = ["a"]
    assert (config.per_channel, config.nodes_to_exclude, config.extra_options) == (True, ["a"], None)


@pytest.mark.recent_ort
def test_importing_it_loads_no_more_than_theirs() -> None:
    heavy = ("torch", "pydantic", "onnx_graphsurgeon", "yaml")
    code = f"import sys, onnxq.compat; print(*(name for name in {heavy!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.filterwarnings("ignore::onnxq.compat.CompatWarning")
def test_every_name_is_there() -> None:
    for name in (name for name in dir(quantization) if not name.startswith("_")):
        assert getattr(compat, name, None) or importlib.import_module(f"onnxq.compat.{name}")
    with pytest.raises(ConfigError, match="MatMulNBitsQuantizer in the place of MatMul4BitsQuantizer"):
        from onnxq.compat import matmul_4bits_quantizer  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from onnxq.compat import nothing  # noqa: F401


@pytest.mark.usefixtures("engines_here")
def test_what_onnxruntime_left_is_quantized_around_its_pairs_in_front_of_activations(tmp_path: Path) -> None:
    proto, samples = classifier()
    onnx.save(proto, tmp_path / "m.onnx")
    convolutions = [node.name for node in proto.graph.node if node.op_type == "Conv"]
    options: dict[str, Any] = {
        "nodes_to_quantize": convolutions[:1], "activation_type": quantization.QuantType.QUInt8,
    }  # fmt: skip
    quantization.quantize_static(tmp_path / "m.onnx", tmp_path / "first.onnx", ListReader(samples), **options)
    result = onnxq.quantize(tmp_path / "first.onnx", samples, overrides={"latency": False})
    assert not result.plan.refusals
    assert {node.node for node in onnxq.prove(result.model).nodes if node.type == "int8"} >= set(convolutions)
    stored = {tensor.name: tensor for tensor in result.model.graph.initializer}
    for tensor in onnx.load(tmp_path / "first.onnx").graph.initializer:
        if tensor.name.endswith(("_scale", "_zero_point", "_quantized")):
            assert stored[tensor.name] == tensor
    assert min(check.sqnr_db[0] for check in result.report.checks) > 25
