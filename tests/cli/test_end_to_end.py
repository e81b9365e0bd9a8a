"""The commands on a real network with real engines, from file to file."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import Result

from tests.cli.kit import read, run
from tests.codes.kit import model, saved, written

# Three 32-channel convolutions with a residual Add, wide enough for int8 to pay.
NETWORK = """g (float[n,3,16,16] x) => (float[n,32,16,16] y) {
    [conv0] c0 = Conv <pads=[1,1,1,1]>(x, w0, b0) r0 = Relu(c0) [conv1] c1 = Conv <pads=[1,1,1,1]>(r0, w1, b1)
    r1 = Relu(c1) [conv2] c2 = Conv <pads=[1,1,1,1]>(r1, w2, b2) r2 = Relu(c2) y = Add(r2, r0) }"""
ASYMMETRIC = "weights: {bits: 4, signed: false, storage: uint4, scheme: asymmetric, granularity: channel}\n"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {f"b{k}": np.zeros(32, np.float32) for k in range(3)}
    for k, channels in enumerate((3, 32, 32)):
        weight = rng.normal(scale=(2 / (9 * channels)) ** 0.5, size=(32, channels, 3, 3))
        weights[f"w{k}"] = weight.astype(np.float32)
    saved(tmp_path, model(NETWORK, **weights))
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(1).normal(size=(12, 3, 16, 16)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def quantize(*more: str, code: int = 0) -> Result:
    """`onnxq quantize` on samples, quickly and not timed."""
    result = run("quantize", "m.onnx", "--data", "d.npz", "--effort", "fast", "--no-latency", *more)
    assert result.exit_code == code, result.stderr
    return result


def pairs(path: str) -> list[dict[str, Any]]:
    return read("inspect", path)["pairs"]  # type: ignore[no-any-return]


def test_quantize_writes_beside_the_model_and_accounts_for_it(work):
    before = (work / "m.onnx").read_bytes()
    result = run("quantize", "m.onnx", "--data", "d.npz", "--strict")
    # What is left float because it does not pay is nothing that `--strict` counts.
    assert result.exit_code == 0, result.stderr
    for part in ("x smaller", "latency", "accuracy", "Q/DQ pairs", "Conv 2/3", "\nleft float  ",
                 "[F103] the first convolution"):  # fmt: skip
        assert part in result.stdout
    assert "SYNTHETIC" not in result.stdout
    assert "refused" not in result.stdout
    assert (work / "m.onnx").read_bytes() == before
    onnxruntime.InferenceSession(work / "m.q.onnx", providers=["CPUExecutionProvider"])
    assert {pair["origin"] for pair in pairs("m.q.onnx")} == {"metadata"}
    assert sorted(path.name for path in work.iterdir()) == ["d.npz", "m.onnx", "m.q.onnx"]


def test_json_is_one_document_and_says_what_the_files_say(work):
    found = json.loads(quantize("--json", "--holdout", "3").stdout)
    assert found["output"] == "m.q.onnx"
    assert found["output_bytes"] == (work / "m.q.onnx").stat().st_size
    assert found["latency"] is None
    assert found["checked"] == 3
    assert found["checks"][0]["name"] == "y"
    assert found["checks"][0]["sqnr_db"][0] > 30
    assert found["pairs"] == len(pairs("m.q.onnx"))


@pytest.mark.usefixtures("work")
def test_without_data_the_banner_is_on_stderr_even_with_json():
    result = run("quantize", "m.onnx", "--json", "--no-latency", "--effort", "fast")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["synthetic"] is True
    assert "!! SYNTHETIC DATA" in result.stderr
    assert "!! SYNTHETIC DATA" in run("quantize", "m.onnx", "--no-latency", "--effort", "fast", "--force", "-q").stderr


def test_a_second_run_needs_force_and_like_the_plan_carried_out_gives_the_same_bytes(work):
    first = quantize("-q", "--plan", "p.json")
    assert (first.stdout, first.stderr) == ("", "")
    made = (work / "m.q.onnx").read_bytes()
    quantize(code=1)
    quantize("--force")
    applied = run("apply", "m.onnx", "p.json", "-o", "again.onnx", "--no-latency")
    assert applied.exit_code == 0, applied.stderr
    assert (work / "m.q.onnx").read_bytes() == (work / "again.onnx").read_bytes() == made


def test_plan_is_a_dry_run_that_apply_carries_out_on_data(work):
    shown = run("plan", "m.onnx")
    assert shown.exit_code == 0, shown.stderr
    assert "without numbers" in shown.stdout
    assert sorted(path.name for path in work.iterdir()) == ["d.npz", "m.onnx"]
    printed = read("plan", "m.onnx", "-o", "p.json")
    assert json.loads((work / "p.json").read_text()) == printed
    bare = run("apply", "m.onnx", "p.json")
    assert bare.exit_code == 1
    assert "fix: give samples that it is calibrated on, `--data`, or a plan with its numbers" in bare.stderr
    assert "`onnxq quantize` writes one by `--plan`" in bare.stderr
    done = run("apply", "m.onnx", "p.json", "--data", "d.npz", "--no-latency")
    assert done.exit_code == 0, done.stderr
    assert len(pairs("m.q.onnx")) == len(printed["sites"])


def test_a_rule_of_a_file_is_obeyed_and_a_typo_in_it_is_told(work):
    written(work, "extends: ort-int8\nrules:\n  - node: conv1\n    set: {float: true}\n", "c.yaml")
    assert "Conv 1/3" in quantize("--config", "c.yaml").stdout
    written(work, "rules:\n  - node: convv1\n    set: {float: true}\n", "c.yaml")
    result = run("plan", "m.onnx", "--config", "c.yaml")
    assert result.exit_code == 1
    assert "c.yaml:2" in result.stderr
    assert "'conv1'" in result.stderr


def test_strict_exits_with_3_after_writing_when_something_was_refused(work):
    result = quantize("--strict", "--json", "--config", str(written(work, ASYMMETRIC, "asked.yaml")), code=3)
    assert (work / "m.q.onnx").exists()
    assert {one["code"] for one in json.loads(result.stdout)["refusals"]} == {"R103"}


def test_external_data_is_written_beside_and_the_bits_attribute_on_request_with_a_warning(work):
    quantize("--external-data")
    assert (work / "m.q.onnx_data").exists()
    onnxruntime.InferenceSession(work / "m.q.onnx", providers=["CPUExecutionProvider"])
    assert "ONNX Runtime refuse" in quantize("--emit-bits-attribute", "--force").stdout
    nodes = [node for node in onnx.load(work / "m.q.onnx").graph.node if node.op_type.endswith("quantizeLinear")]
    assert nodes
    assert all(any(attribute.name == "bits" for attribute in node.attribute) for node in nodes)


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(
    "preset", ["ort-int8-percentile", "ort-int8-mse", "ort-int8-entropy", "ort-uint16-activations"]
)
def test_presets_give_working_models(preset):
    found = json.loads(quantize("--config", preset, "--effort", "balanced", "--json").stdout)
    assert found["checks"][0]["sqnr_db"][1] > 20


@pytest.mark.parametrize(
    ("preset", "bits", "decibels"), [("ort-int8-weights", [8, 8], 35), ("ort-int4-weights", [4, 8], 12)]
)
def test_weight_only_presets_need_no_data(tmp_path, preset, bits, decibels):
    rng = np.random.default_rng(0)
    weights = {f"w{k}": rng.normal(size=(64, 64)).astype(np.float32) for k in range(2)}
    body = "g (float[n,64] x) => (float[n,64] y) { m = MatMul(x, w0) y = MatMul(m, w1) }"
    found = read("quantize", saved(tmp_path, model(body, **weights)), "--config", preset, "--no-latency")
    assert found["error"] is None
    assert found["checks"][0]["sqnr_db"][0] > decibels
    assert [pair["bits"] for pair in pairs(str(tmp_path / "m.q.onnx"))] == bits


def test_code_that_a_file_names_runs_only_where_it_is_trusted_and_is_named_in_the_summary(work):
    script = written(work, "open(__file__ + '.ran', 'w').close()\ndef score(model): return 1.0\n", "score.py")
    config = written(work, f"accuracy: {{metric: '{script}:score'}}\neffort: fast\n", "my.yaml")
    words = ("m.onnx", "--data", "d.npz", "--config", config)
    for command in ("plan", "quantize"):
        result = run(command, *words)
        assert (result.exit_code, result.stderr[:12]) == (1, "error[Q324]:")
        assert not Path(f"{script}.ran").exists()
    result = run("quantize", *words, "--trust", config, "--no-latency", "-v")
    assert result.exit_code == 0, result.stderr
    assert re.search(rf"^ran +{script}:score$", result.stdout, re.MULTILINE)
    assert Path(f"{script}.ran").exists()
