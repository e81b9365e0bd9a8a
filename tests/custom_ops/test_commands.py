"""Every command on a model with custom operators: with their library, without, and with a faulty one."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result

import onnxq
from onnxq.backends import load_config
from onnxq.errors import ConfigError, ModelError
from onnxq.graph import add_libraries, get_index, infer_shapes, name_nodes, strip_weights
from onnxq.graph.light import list_libraries
from onnxq.runtime import Session, UnknownOperatorError, check_libraries, optimize_graph, tap_tensors
from onnxq.runtime.tap import lay_out_convolutions
from onnxq.sites import TensorId
from tests.cli.kit import run
from tests.custom_ops.conftest import fill_folder
from tests.custom_ops.models import network
from tests.networks import count_ops

FORCED = "rules:\n  - op: Conv\n    set: {quantize: true}\n"


def succeed(*args: object) -> Result:
    """The result of a command that must end well."""
    done = run(*args)
    assert done.exit_code == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    """A folder of model and samples with model.q.onnx, plan.json and lib.yaml, which names the library."""
    work = fill_folder(tmp_path_factory.mktemp("quantized"))
    (work / "my.yaml").write_text(FORCED)
    (work / "lib.yaml").write_text(f"runtime: {{libraries: {library}}}\n{FORCED}")
    options = ("--config", work / "my.yaml", "--effort", "fast", "--no-latency", "--plan", work / "plan.json")
    succeed("quantize", work / "model.onnx", "--data", work / "samples.npz", *options, "--ort-library", library)
    return work


def test_quantize_runs_the_operator_and_apply_writes_the_same(quantized: Path, library: Path, tmp_path: Path) -> None:
    made = count_ops(onnx.load(quantized / "model.q.onnx"))
    assert made["Swell"] == 2
    assert made["QuantizeLinear"] >= 2  # in front of both convolutions, the second behind the custom operator
    configured = ("--config", quantized / "lib.yaml", "--trust", quantized / "lib.yaml")
    succeed("plan", quantized / "model.onnx", *configured)
    files = (quantized / "model.onnx", quantized / "plan.json", "--data", quantized / "samples.npz")
    done = succeed("apply", *files, "--no-latency", "--ort-library", library, "-o", tmp_path / "again.onnx")
    assert "SQNR" in done.stdout
    assert (tmp_path / "again.onnx").read_bytes() == (quantized / "model.q.onnx").read_bytes()


def test_the_accuracy_passes_run_with_it_and_the_answers_are_those_of_the_operator(work: Path, library: Path) -> None:
    """Float and quantized file side by side, run by ONNX Runtime itself."""
    import onnxruntime

    overrides = {"effort": "high", "latency": False, "ort_library": library}
    (work / "my.yaml").write_text(FORCED)
    result = onnxq.quantize(work / "model.onnx", work / "samples.npz", work / "my.yaml", overrides=overrides)
    assert all(20 < check.sqnr_db[1] < 80 for check in result.report.checks)
    assert count_ops(result.model)["Swell"] == 2
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    x = np.load(work / "samples.npz")["x"]
    before, after = (
        onnxruntime.InferenceSession(m, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (str(work / "model.onnx"), result.model.SerializeToString())
    )
    assert np.linalg.norm(after - before) < 0.1 * np.linalg.norm(before)


def test_convert_compares_both_files_with_it(quantized: Path, library: Path, tmp_path: Path) -> None:
    words = (quantized / "model.q.onnx", "--data", quantized / "samples.npz", "--ort-library", library)
    done = succeed("convert", *words, "--to", "ort", "--no-latency", "--no-kernels", "-o", tmp_path / "again.onnx")
    assert "against the file that it came from" in done.stdout


@pytest.mark.parametrize("command", ["diff", "profile"])
def test_diff_and_profile(quantized: Path, library: Path, command: str, tmp_path: Path) -> None:
    (tmp_path / "lib.yaml").write_text(f"runtime: {{libraries: [{library}]}}\n")
    models = (quantized / "model.onnx", quantized / "model.q.onnx")
    trusted = ("--config", tmp_path / "lib.yaml", "--trust", tmp_path / "lib.yaml")
    for given in (trusted, ("--ort-library", library)):
        succeed(command, *models, "--data", quantized / "samples.npz", "--samples", 2, *given)
    inside = {"engines": ("ort",), "layers": True, "bisect": True, "samples": 2, "ort_library": [library]}
    if command == "diff":
        found = onnxq.diff(*models, quantized / "samples.npz", overrides=inside)
        assert "s" in {layer.name for layer in found.layers}


def test_prove_hands_the_library_to_the_process_that_builds(quantized: Path, library: Path) -> None:
    model = quantized / "model.q.onnx"
    proof = onnxq.prove(model, overrides={"engine": "ort", "ort_library": library})
    assert proof.built
    assert "Swell" in {kernel.kind for kernel in proof.kernels}
    without = run("prove", model, "--engine", "ort")
    assert without.exit_code == 1
    assert "operator 'Swell' of domain 'example.ops'" in without.stderr
    # TensorRT has no use for it.
    assert run("prove", model, "--engine", "tensorrt-rtx", "--ort-library", library).exit_code == 1


def test_a_calibration_cache_is_imported_with_it(work: Path, library: Path) -> None:
    scales = "".join(f"{name}: 3c010a14\n" for name in ("x", "c0", "s", "r", "c1", "y", "shift"))
    (work / "trt.cache").write_text(f"TRT-8601-EntropyCalibration2\n{scales}")
    command = ("import-calibration", work / "trt.cache", "--model", work / "model.onnx", "-o", work / "plan.json")
    without = succeed(*command, "--apply", work / "front.onnx")
    assert "W131" in without.stdout + without.stderr
    succeed(*command, "--ort-library", library, "--apply", work / "t.onnx", "--force")
    front, whole = (count_ops(onnx.load(work / f"{name}.onnx"))["QuantizeLinear"] for name in ("front", "t"))
    assert 0 < front < whole


@pytest.mark.parametrize("opset", [9, 11, 17])
@pytest.mark.parametrize("config", ["ort-int8-weights", "ort-int4-weights"])
def test_weights_alone_need_no_library_and_the_summary_says_what_ran(work: Path, config: str, opset: int) -> None:
    onnx.save(network(opset), work / "model.onnx")
    done = succeed("quantize", work / "model.onnx", "--config", config)
    told = done.stdout + done.stderr
    assert "W131" in told
    assert "in front of it only, at c0" in told
    assert "operator 'Swell' of domain 'example.ops'" in told
    assert "SYNTHETIC" not in told
    quantized = count_ops(onnx.load(work / "model.q.onnx"))["DequantizeLinear"]
    assert quantized == (2 if config == "ort-int8-weights" else 0)  # 4 bits are for MatMul: refused, and said so
    assert ("refused" in told) == (not quantized)
    assert "nothing was run" in succeed("plan", work / "model.onnx", "--config", config).stdout


def test_with_nothing_in_front_nothing_is_run_and_the_summary_says_so(work: Path) -> None:
    proto = network()
    # Its own output, and what a custom operator makes of it: nothing of this can be run.
    proto.graph.node[0].CopyFrom(onnx.helper.make_node("Swell", ["x"], ["v"], domain="example.ops"))
    proto.graph.node.insert(1, onnx.helper.make_node("Conv", ["v", "w0", "b0"], ["c0"], pads=[1, 1, 1, 1]))
    onnx.save(proto, work / "model.onnx")
    done = succeed("quantize", work / "model.onnx", "--config", "ort-int8-weights")
    assert "NOTHING WAS RUN" in done.stdout + done.stderr
    assert count_ops(onnx.load(work / "model.q.onnx"))["DequantizeLinear"] == 2


def test_weights_rounded_unrun_are_those_rounded_with_the_library(work: Path, library: Path) -> None:
    how = {"latency": False}
    alone = onnxq.quantize(work / "model.onnx", config="ort-int8-weights", overrides=how)
    checked = onnxq.quantize(work / "model.onnx", config="ort-int8-weights", overrides={**how, "ort_library": library})
    assert [check.name for check in alone.report.checks] == ["c0"]
    assert [check.name for check in checked.report.checks] == ["y"]
    assert "NOTHING WAS RUN" not in " ".join(checked.report.warnings)
    mine, theirs = ({t.name: t.raw_data for t in one.model.graph.initializer} for one in (alone, checked))
    assert mine == theirs


@pytest.mark.parametrize(
    "asked", [{"data": "samples.npz"}, {"data": "samples.npz", "overrides": {"min_sqnr": 20.0}}, {"config": "ort-int8"}]
)
def test_no_run_without_the_library(work: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]) -> None:
    monkeypatch.chdir(work)
    with pytest.raises(onnxq.OnnxqError, match=r"operator 'Swell' of domain 'example\.ops'"):
        onnxq.quantize("model.onnx", **{"config": "ort-int8-weights", **asked})


def test_a_missing_library_leaves_nothing_behind(work: Path) -> None:
    done = run("quantize", work / "model.onnx", "--data", work / "samples.npz", "--ort-library", work / "no.so")
    assert done.exit_code == 1
    assert f"operator library {work / 'no.so'}: there is no such file" in done.stderr
    assert sorted(path.name for path in work.iterdir()) == ["model.onnx", "samples.npz"]


@pytest.mark.parametrize("light", [False, True])
def test_sessions_of_a_model_with_libraries_have_the_operator_and_others_do_not(library: Path, light: bool) -> None:
    feeds = {"x": np.ones((1, 3, 16, 16), np.float32)}
    libraries = check_libraries([library, str(library)])
    assert libraries == (str(library),)
    model = add_libraries(strip_weights(network()) if light else network(), libraries)
    assert np.isfinite(Session(model, optimize=False).run(feeds, ["y"])["y"]).all()
    with pytest.raises(UnknownOperatorError):
        Session(network())


def test_models_made_from_one_with_libraries_have_them_too(library: Path) -> None:
    made = strip_weights(infer_shapes(name_nodes(add_libraries(network(), (str(library),)))))
    assert list_libraries(made) == list_libraries(get_index(made).model) == (str(library),)
    assert "Swell" in {node.op_type for node in optimize_graph(made).graph.node}
    for model in (made, lay_out_convolutions(made)):
        Session(tap_tensors(model, [TensorId("s")], only=True).proto)
    assert list_libraries(network()) == ()


def test_the_error_names_the_operator_its_domain_and_what_to_give() -> None:
    with pytest.raises(ModelError) as caught:
        Session(network())
    assert caught.value.subject == "operator 'Swell' of domain 'example.ops'"
    assert "`ort_library`" in caught.value.fix
    assert "weights only" in caught.value.fix
    # A package that has the operators is named.
    proto = network()
    for node in proto.graph.node:
        node.domain = node.domain and "ai.onnx.contrib"
    proto.opset_import[1].domain = "ai.onnx.contrib"
    with pytest.raises(ModelError) as caught:
        Session(proto)
    assert "pip install onnxruntime-extensions" in caught.value.fix


def test_a_bare_library_is_in_the_working_directory(library: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Session(work / "model.onnx", libraries=[str(library)])
    monkeypatch.chdir(library.parent)
    assert check_libraries([library.name]) == (str(library),)


@pytest.mark.parametrize("content", [None, b"", b"no library at all"])
def test_what_is_no_library_is_an_error_in_words(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ops.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_libraries([path])
    assert caught.value.subject == f"operator library {path}"
    assert ("no such file" if content is None else "cannot load it") in caught.value.cause
    assert caught.value.fix


def test_libraries_are_relative_to_their_config(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "ops").mkdir(parents=True)
    shutil.copy(library, tmp_path / "conf" / "ops" / "swell.so")
    (tmp_path / "conf" / "base.yaml").write_text("runtime: {libraries: ops/swell.so}\n")
    (tmp_path / "top.yaml").write_text("extends: conf/base.yaml\ntarget: ort\n")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "top.yaml").runtime.libraries == (str(tmp_path / "conf" / "ops" / "swell.so"),)


def test_a_wrong_key_of_the_section_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("runtime:\n  librarys: [a.so]\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: runtime\.librarys: unknown key.*\n.*libraries"):
        load_config(path)
    path.write_text("runtime:\n  libraries: 3\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: runtime\.libraries"):
        load_config(path)
