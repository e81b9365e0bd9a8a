"""`onnxq diff` as people and build machines run it: exit codes, messages, JSON."""

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result

import onnxq
from onnxq.backends import find_backend
from onnxq.backends.trt.engine import load_polygraphy, translate_errors
from onnxq.engines.diff.results import Recorder, find_inputs_beside, load_results
from onnxq.errors import DataError, OutputError
from onnxq.plan import Scaling
from onnxq.runtime import Session
from onnxq.sites import TensorId
from tests.cli.kit import run as invoke
from tests.codes.kit import model
from tests.engines.diff.models import chain, diff, pairs, samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("diff")
    onnx.save(chain(), place / "m.onnx")
    onnx.save(pairs(chain()), place / "m.q.onnx")
    onnx.save(pairs(chain(), "w2"), place / "wrong.onnx")
    np.savez(place / "data.npz", **samples())
    return place


def run(folder: Path, *options: object, quantized: str = "m.q.onnx", data: str = "data.npz") -> Result:
    given = ("--data", folder / data) if data else ()
    return invoke("diff", folder / "m.onnx", folder / quantized, *options, *given)


def test_a_sound_model(folder: Path) -> None:
    done = run(folder)
    assert done.exit_code == 0, done.output
    assert "all agree within rounding" in done.stdout
    assert "top-1" in done.stdout
    assert done.stderr == ""
    # On request it says where tensors were read.
    done = run(folder, "--layers", "-v")
    assert "read at" in done.stdout
    assert "r/quantized" in done.stdout


def test_an_unmet_tolerance_fails_and_says_which(folder: Path) -> None:
    options = "--min-sqnr 60 --min-cosine 0.999999 --max-abs 0.001 --top-k 20 --min-agreement 1 --min-engines 500"
    done = run(folder, *options.split(), "--json")
    assert done.exit_code == 1
    assert "error[Q703]: output y: as " in done.stderr
    assert {(one["output"], one["measure"]) for one in json.loads(done.stdout)["unmet"]} == {
        ("y", "SQNR in dB"), ("y", "cosine"), ("y", "max abs error"), ("y", "top-k agreement"),
        ("y", "SQNR in dB against what the file says"),
    }  # fmt: skip


def test_a_disagreement_is_shown_bisected_and_written(folder: Path, tmp_path: Path) -> None:
    save = tmp_path / "out"
    done = run(folder, "--layers", "--bisect", "--save", save, quantized="wrong.onnx")
    assert done.exit_code == 0, done.output
    assert "as ORT runs it: diverges from the file first at y" in done.stdout
    assert "node_y (MatMul)" in done.stdout
    assert "warning[W109]: as ORT runs it: something else than the file says is computed" in done.stdout
    assert sorted(path.name for path in save.iterdir()) == [
        "bisect-ort-on.inputs.json", "bisect-ort-on.onnx", "diff.json", "inputs.json", "results.json"
    ]  # fmt: skip
    again = run(folder, "--save", save, quantized="wrong.onnx")
    assert again.exit_code == 1
    assert "--force" in again.stderr
    assert run(folder, "--save", save, "--force").exit_code == 0
    assert not (save / "bisect-ort-on.onnx").exists()


def test_json_is_one_document(folder: Path) -> None:
    done = run(folder, "--json", "--layers", "--bisect", "--min-sqnr", "20", quantized="wrong.onnx")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["holds"] is False
    assert found["divergences"][0]["tensor"] == "y"
    assert "node_y" in found["bisections"][0]["nodes"]
    assert [layer["name"] for layer in found["layers"]] == ["a", "r", "b", "s", "y"]
    assert found["unmet"][0]["run"] == "ort-on"
    assert found["messages"][0].startswith("as ORT runs it: SQNR in dB is")
    assert "error[Q703]: output y" in done.stderr
    sound = json.loads(run(folder, "--json", "--engines", "ort").stdout)
    assert (sound["schema"], sound["holds"], sound["samples"], sound["layers"]) == (1, True, 12, [])


def test_saved_results_are_read_back_without_data(folder: Path, tmp_path: Path) -> None:
    assert run(folder, "--save", tmp_path / "gpu", "--keep", "4").exit_code == 0
    done = run(folder, "--load", tmp_path / "gpu", "--json", data="")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"] == 4
    assert "ort-on (gpu)" in [one["name"] for one in json.loads(done.stdout)["runs"]]
    # Neither data nor results: inputs are made up, and that is told.
    done = run(folder, data="")
    assert done.exit_code == 0
    assert "made-up inputs" in done.stdout


@pytest.mark.parametrize("engines", ["tensorflow", "ort,cuda"])
def test_an_unknown_engine_is_a_usage_error_and_a_missing_model_the_users_to_mend(folder: Path, engines: str) -> None:
    done = run(folder, "--engines", engines)
    assert done.exit_code == 2
    assert "is not one of openvino, ort, qnn, trt, web" in done.stderr
    done = run(folder, quantized="nothing.onnx")
    assert done.exit_code == 1
    assert "nothing.onnx" in done.stderr


needs_no_gpu = pytest.mark.skipif(find_backend("trt").local.find_obstacle() is None, reason="TensorRT can run here")


@needs_no_gpu
def test_without_tensorrt_the_rest_is_done_and_it_is_said(folder: Path) -> None:
    done = run(folder)
    assert done.exit_code == 0
    assert "trt: " in done.stdout
    assert "fix: " in done.stdout


@needs_no_gpu
def test_asked_for_alone_it_leaves_nothing_to_show(folder: Path) -> None:
    """There is no table without a column, and no engine that ran."""
    done = run(folder, "--engines", "trt")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "error[Q704]: engine trt: must run, and did not" in done.stderr


@pytest.fixture
def no_polygraphy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "polygraphy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "polygraphy", None)


@pytest.mark.usefixtures("no_polygraphy")
def test_onnx_runtime_alone_needs_no_polygraphy(folder: Path, tmp_path: Path) -> None:
    done = run(folder, "--engines", "ort", "--layers", "--save", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    assert [one["name"] for one in json.loads(done.stdout)["runs"]] == ["float", "ort-off", "ort-on"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"diff.json", "inputs.json", "results.json"}
    again = run(folder, "--load", tmp_path / "out", "--engines", "ort", "--json", data="")
    assert again.exit_code == 0, again.stderr
    assert "ort-on (out)" in [one["name"] for one in json.loads(again.stdout)["runs"]]


@pytest.mark.usefixtures("no_polygraphy")
def test_tensorrt_asked_for_without_polygraphy_names_the_extra(folder: Path) -> None:
    done = run(folder, "--engines", "ort,trt", "--json", data="")
    assert done.exit_code == 1
    assert "error[Q704]: engine trt: must run, and did not" in done.stderr
    assert "fix: " in done.stderr
    assert 'pip install "onnxq[' in done.stderr
    assert "onnxq[polygraphy]" in done.stderr
    found = json.loads(done.stdout)
    assert found["missing"] == ["trt"]
    assert [one["name"] for one in found["runs"]] == ["float", "ort-off", "ort-on"]


def test_outputs_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    body = """g (float[N,4] x) => (float[N,4] y, float[N,4] log, seq(float[N,4]) s) {
        y = Relu(x) negative = Neg(x) square = Mul(x, negative) log = Log(square) s = SequenceConstruct(x, y)
    }"""
    onnx.save(model(body), tmp_path / "m.onnx")
    result = invoke("diff", *2 * [tmp_path / "m.onnx"], "--engines", "ort", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (refusal,) = report["skipped"]
    assert report["notes"] == ["output log: 64 values of the float model are NaN, and are left out"]
    assert (refusal["subject"], refusal["code"]) == ("output s", "R111")
    assert "only tensors of numbers are compared" in refusal["reason"]


def test_layers_are_compared_in_the_channels_of_the_file() -> None:
    """Equalization scales the channels of tensors inside, which is no error of theirs."""
    rng = np.random.default_rng(0)
    text = """g (float[N,8,8,8] x) => (float[N,8,8,8] y) {
        a = Conv<pads=[1,1,1,1]>(x, u, b) r = Relu(a) y = Conv<pads=[1,1,1,1]>(r, v, c) }"""
    weights = {name: (rng.standard_normal((8, 8, 3, 3)) / 9).astype(np.float32) for name in "uv"}
    net = model(text, **weights, b=np.zeros(8, np.float32), c=np.zeros(8, np.float32))
    x = {"x": rng.standard_normal((8, 8, 8, 8)).astype(np.float32)}
    plan = onnxq.make_plan(net, x, overrides={"rules": [{"op": "Conv", "set": {"quantize": True}}]})
    factors = Scaling(
        name="cross_layer_equalization", tensor=TensorId("a"), factors=np.geomspace(0.1, 10, 8).astype(np.float32)
    )
    overrides = {"latency": False, "new_weights": True}
    quantized = onnxq.apply(net, replace(plan, scalings=(factors,)), x, overrides=overrides).model
    layers = {layer.name: layer for layer in onnxq.diff(net, quantized, x, overrides={"layers": True}).layers}
    assert min(error.sqnr_db for error in (*layers["a"].accuracy, *layers["r"].accuracy)) > 30


# ---- Files of results: Polygraphy reads the saved ones, and its own are compared.

needs_polygraphy = pytest.mark.skipif(find_spec("polygraphy") is None, reason="no Polygraphy")


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[str, str]:
    return str(folder / "m.onnx"), str(folder / "m.q.onnx")


@pytest.fixture
def saved(models: tuple[str, str], tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    diff(*models, samples(), keep=5, out=folder)
    return folder


@needs_polygraphy
def test_polygraphy_reads_results_and_inputs(models: tuple[str, str], saved: Path) -> None:
    results = load_polygraphy("comparator").RunResults.load(str(saved / "results.json"))
    assert list(results.keys()) == ["float", "ort-off", "ort-on"]
    assert [len(iterations) for iterations in results.values()] == [5, 5, 5]
    expected = Session(models[1], threads=1).run({"x": samples()["x"][2:3]})["y"]
    np.testing.assert_array_equal(results["ort-on"][2]["y"], expected)
    assert results["ort-on"][2].runtime > 0
    feeds = load_polygraphy("json").load_json(str(saved / "inputs.json"))
    assert len(feeds) == 5
    np.testing.assert_array_equal(feeds[3]["x"], samples()["x"][3:4])


def test_what_was_not_saved_is_said(saved: Path) -> None:
    report = json.loads((saved / "diff.json").read_text())
    assert any("first 5 of 12 samples" in note for note in report["notes"])
    assert {Path(path).name for path in report["saved"]} == {"results.json", "inputs.json", "diff.json"}
    assert (report["samples"], report["holds"] is True) == (12, True)


def test_results_are_compared_on_the_inputs_saved_with_them(models: tuple[str, str], saved: Path) -> None:
    found = diff(*models, load=[saved])
    assert found.samples == 5
    assert [run.name for run in found.runs] == [
        "float", "ort-off", "ort-on", "float (saved)", "ort-off (saved)", "ort-on (saved)"
    ]  # fmt: skip
    (y,) = found.outputs
    there = {error.run: error.sqnr_db for error in y.accuracy}
    assert there["ort-on (saved)"] == there["ort-on"]
    assert "float (saved)" not in there
    assert {error.run: error.sqnr_db for error in y.engines}["ort-off (saved)"] == np.inf


def test_fewer_results_than_samples_are_said_and_those_of_others_refused(models: tuple[str, str], saved: Path) -> None:
    found = diff(*models, samples(), load=[saved / "results.json"])
    assert {run.name: run.samples for run in found.runs}["ort-on (results)"] == 5
    assert any("first 5 of 12" in note for note in found.notes)
    with pytest.raises(DataError, match=r"other samples.*\[Q218\]"):
        diff(*models, samples(seed=9), load=[saved])


@needs_polygraphy
def test_what_polygraphy_runs_and_saves_is_compared(models: tuple[str, str], tmp_path: Path) -> None:
    """As `polygraphy run quantized.onnx --onnxrt --save-inputs --save-outputs` does it."""
    runner = load_polygraphy("backend.onnxrt").OnnxrtRunner(
        load_polygraphy("backend.onnxrt").SessionFromOnnx(models[1])
    )
    with translate_errors():
        loader = load_polygraphy("comparator").DataLoader(seed=1, iterations=3, val_range=(-1, 1))
        results = load_polygraphy("comparator").Comparator.run(
            [runner], data_loader=loader, save_inputs_path=str(tmp_path / "inputs.json")
        )
        results.save(str(tmp_path / "theirs.json"))
    found = diff(*models, load=[tmp_path / "theirs.json"])
    assert found.samples == 3
    (theirs,) = [run for run in found.runs if run.name not in ("float", "ort-off", "ort-on")]
    assert theirs.name == "onnxrt-runner"
    assert next(error for error in found.outputs[0].engines if error.run == theirs.name).sqnr_db > 100


@needs_polygraphy
def test_a_folder_of_iterations_is_read(saved: Path, tmp_path: Path) -> None:
    (whole,) = [run for run in load_results(saved) if run.name == "ort-on"]
    results = load_polygraphy("comparator").RunResults.load(str(saved / "results.json"))
    folder = tmp_path / "iterations"
    folder.mkdir()
    for k in range(5):
        single = load_polygraphy("comparator").RunResults()
        single.append(("ort-on", [results["ort-on"][k]]))
        single.save(str(folder / f"{k:010d}.json"))
    (read,) = load_results(folder)
    assert len(read.samples) == 5
    for mine, theirs in zip(read.samples, whole.samples, strict=True):
        np.testing.assert_array_equal(mine["y"], theirs["y"])


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in ("{}", "nonsense", '{"lst": []}', "[1, 2]"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(DataError, match=r"other\.json"):
            load_results(tmp_path / "other.json")
    with pytest.raises(DataError, match="no such file"):
        load_results(tmp_path / "nothing.json")
    assert find_inputs_beside(tmp_path / "nothing.json") is None


def test_earlier_results_are_not_overwritten_unasked(models: tuple[str, str], saved: Path) -> None:
    before = (saved / "results.json").read_bytes()
    with pytest.raises(OutputError, match=r"results\.json"):
        diff(*models, samples(seed=9), out=saved)
    assert (saved / "results.json").read_bytes() == before
    diff(*models, samples(seed=9), out=saved, force=True)
    assert (saved / "results.json").read_bytes() != before


def test_a_place_that_cannot_be_written_is_refused_before_the_work(models: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        onnxq.diff(*models, samples(), out=tmp_path / "no" / "such" / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        onnxq.diff(*models, samples(), out=tmp_path / "file")


def test_types_numpy_cannot_store_are_kept_as_float32_and_texts_as_texts(tmp_path: Path) -> None:
    import ml_dtypes

    recorder = Recorder(1)
    value = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    words = np.array([["a", "bé"]])
    outputs = {"y": value, "names": ["a"], "words": words.astype(object)}
    recorder.add({"x": value, "words": words}, {"ort-on": outputs}, {"ort-on": 0.1})
    recorder.write(tmp_path, overwrite=False)
    (run,) = load_results(tmp_path)
    np.testing.assert_array_equal(run.samples[0]["y"], np.array([1.5, -2.0], np.float32))
    np.testing.assert_array_equal(run.samples[0]["words"], words)
    assert list(run.samples[0]) == ["y", "words"]


def test_nothing_is_printed(models: tuple[str, str], saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    diff(*models, load=[saved], layers=True, bisect=True)
    assert capfd.readouterr() == ("", "")


@needs_polygraphy
def test_polygraphys_comparators_say_the_same(models: tuple[str, str], tmp_path: Path) -> None:
    """Sample by sample theirs are ours: largest difference and cosine of the saved results."""
    found = diff(*models, {"x": samples(1)["x"]}, out=tmp_path / "out")
    ours = {error.run: error for error in found.outputs[0].accuracy}
    comparator = load_polygraphy("comparator")
    with translate_errors():
        results = comparator.RunResults.load(str(tmp_path / "out" / "results.json"))
        pair = [(0, 2)]
        assert list(results.keys())[2] == "ort-on"
        simple = comparator.Comparator.compare_accuracy(
            results, compare_func=comparator.SimpleCompareFunc(check_error_stat="max"), comparisons=pair
        )
        cosine = comparator.Comparator.compare_accuracy(
            results, compare_func=comparator.CosineSimilarityCompareFunc(), comparisons=pair
        )
    theirs = [result.lst[0].dct["float", "ort-on"][0]["y"] for result in (simple, cosine)]
    assert float(theirs[0].max_absdiff) == pytest.approx(ours["ort-on"].max_abs, rel=1e-5)
    assert float(theirs[1].cosine_similarity) == pytest.approx(ours["ort-on"].cosine, rel=1e-5)


def test_a_run_whose_name_is_no_text_is_read(saved: Path, tmp_path: Path) -> None:
    """Polygraphy takes any JSON value for a name."""
    text = (saved / "results.json").read_text(encoding="utf-8")
    name = json.loads(text)["lst"][0][0]
    (tmp_path / "r.json").write_text(text.replace(json.dumps(name), "true", 1), encoding="utf-8")
    assert load_results(tmp_path / "r.json")[0].name == "True"
