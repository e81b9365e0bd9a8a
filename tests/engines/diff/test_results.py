"""Files of results: Polygraphy reads the saved ones, and its own are compared."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends.trt.run import load_polygraphy, translate_errors
from onnxq.engines.diff.results import Recorder, find_inputs_beside, load_results
from onnxq.errors import DataError, OutputError
from onnxq.runtime import Session
from tests.engines.diff.models import CHAIN, PAIRS, diff, samples

needs_polygraphy = pytest.mark.skipif(find_spec("polygraphy") is None, reason="no Polygraphy")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("float", CHAIN), ("quantized", PAIRS)):
        onnx.save(model, folder / f"{name}.onnx")
    return str(folder / "float.onnx"), str(folder / "quantized.onnx")


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


def test_what_was_not_saved_is_said(models: tuple[str, str], tmp_path: Path) -> None:
    found = diff(*models, samples(), keep=5, out=tmp_path / "out")
    assert any("first 5 of 12 samples" in note for note in found.notes)
    assert {Path(path).name for path in found.saved} == {"results.json", "inputs.json", "diff.json"}
    report = json.loads((tmp_path / "out" / "diff.json").read_text())
    assert report["samples"] == 12
    assert report["holds"] is True


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


def test_fewer_results_than_samples_are_said(models: tuple[str, str], saved: Path) -> None:
    found = diff(*models, samples(), load=[saved / "results.json"])
    assert {run.name: run.samples for run in found.runs}["ort-on (results)"] == 5
    assert any("first 5 of 12" in note for note in found.notes)


def test_results_of_other_samples_are_refused(models: tuple[str, str], saved: Path) -> None:
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
    raw = json.loads(text)
    name = raw["lst"][0][0]
    (tmp_path / "r.json").write_text(text.replace(json.dumps(name), "true", 1), encoding="utf-8")
    assert load_results(tmp_path / "r.json")[0].name == "True"
