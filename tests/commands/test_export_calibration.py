"""`onnxq export-calibration` as a command: its account as text and JSON, its file, and its page of formats."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from docs.make_formats import PAGE, insert_table
from onnxq.interop import read_scales
from onnxq.plan import Scaling, from_json
from onnxq.sites import TensorId
from tests.cli.kit import run
from tests.interop.real.make import make_network, make_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export")
    onnx.save(make_network(), place / "m.onnx")
    samples = {"x": np.concatenate(make_samples())}
    overrides = {"latency": False, "effort": "fast", "plan_out": place / "p.json"}
    onnxq.quantize(place / "m.onnx", samples, "qnn-int8", overrides=overrides, out=place / "q.onnx")
    return place


def test_the_account_of_a_file(folder: Path) -> None:
    done = run("export-calibration", folder / "q.onnx", "--format", "aimet-2.0", "-o", folder / "e.json")
    assert done.exit_code == 0, done.output
    assert "13 sites, 13 of them to the bit" in done.stdout
    assert "warning[W144]: 2 float tensors have no entry" in done.stderr + done.stdout
    assert {entry.name for entry in read_scales(folder / "e.json").entries} >= {"x", "r1", "w1", "b1", "y"}
    # It is not overwritten.
    again = run("export-calibration", folder / "q.onnx", "--format", "aimet-2.0", "-o", folder / "e.json")
    assert (again.exit_code, "error[Q601]" in again.stderr) == (1, True)


def test_a_plan_and_its_network_say_the_same(folder: Path) -> None:
    both = [
        json.loads(run("export-calibration", source, "--format", "aimet-1.0", "--json", *rest).stdout)
        for source, *rest in ((folder / "q.onnx",), (folder / "p.json", "--model", folder / "m.onnx"))
    ]
    first, second = ({site["site"] for site in one["written"]} for one in both)
    assert first == second
    assert [one["complete"] for one in both] == [True, True]
    assert [sorted(one["uncovered"]) for one in both] == [["c1", "s"]] * 2
    keys = {"schema", "source", "kind", "written", "left", "uncovered", "scaled", "out", "complete", "warnings"}
    assert set(both[0]) == keys
    alone = json.loads(run("export-calibration", folder / "p.json", "--format", "aimet-1.0", "--json").stdout)
    assert (alone["uncovered"], alone["warnings"]) == (None, [])


def test_numbers_of_a_scaled_model_are_told(folder: Path) -> None:
    """By the plan, and by the file that it was carried out on."""
    plan = from_json((folder / "p.json").read_text())
    scaling = Scaling(name="cross_layer_equalization", tensor=TensorId("r1"), factors=np.full(6, 2, np.float32))
    quantized = onnxq.apply(folder / "m.onnx", replace(plan, scalings=(scaling,)), overrides={"new_weights": True})
    for source in (quantized.plan, quantized.model):
        warning = onnxq.export_calibration(source, "aimet-2.0").warnings[-1]
        assert (warning.code, "are scaled at r1: use them with what `onnxq convert`" in warning) == ("W151", True)


def test_what_is_left_is_named(folder: Path) -> None:
    done = run("export-calibration", folder / "p.json", "--format", "tensor-quant-overrides", "-v")
    assert "b1: a bias: ONNX Runtime makes its scale" in done.stdout
    assert "warning[W143]: 3 sites are not in the file" in done.stderr + done.stdout
    done = run("export-calibration", folder / "p.json", "--format", "tensorrt-cache")
    assert (done.exit_code, "error[Q517]" in done.stderr) == (1, True)
    assert "error[Q516]" in run("export-calibration", folder / "p.json", "--format", "aimet").stderr


def test_the_page_has_the_formats_that_there_are() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert insert_table(page) == page, "run `python docs/make_formats.py`"
