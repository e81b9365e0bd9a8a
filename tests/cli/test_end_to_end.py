"""The commands on a real network with real engines, from file to file."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from onnxq.cli import cli


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def network(path: Path) -> Path:
    """Three 32-channel convolutions with a residual Add, wide enough for int8 to pay."""
    rng = np.random.default_rng(0)
    inits, nodes, at = [], [], "x"
    for k, channels in enumerate((3, 32, 32)):
        weight = rng.normal(scale=(2 / (9 * channels)) ** 0.5, size=(32, channels, 3, 3)).astype(np.float32)
        inits += [numpy_helper.from_array(weight, f"w{k}"), numpy_helper.from_array(np.zeros(32, np.float32), f"b{k}")]
        nodes.append(helper.make_node("Conv", [at, f"w{k}", f"b{k}"], [f"c{k}"], name=f"conv{k}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{k}"], [f"r{k}"], name=f"relu{k}"))
        at = f"r{k}"
    nodes.append(helper.make_node("Add", ["r2", "r0"], ["y"], name="add"))
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32, 16, 16]),
    ]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], inits)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def work(tmp_path) -> Path:
    network(tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(1).normal(size=(12, 3, 16, 16)).astype(np.float32))
    return tmp_path


def pairs(path: Path) -> list[dict]:
    return json.loads(run("inspect", path, "--json").stdout)["pairs"]


def test_quantize_writes_beside_the_model_and_accounts_for_it(work):
    before = (work / "m.onnx").read_bytes()
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz")
    assert result.exit_code == 0, result.stderr
    for part in ("x smaller", "latency", "accuracy", "Q/DQ pairs", "Conv 2/3"):
        assert part in result.stdout
    assert "SYNTHETIC" not in result.stdout
    assert (work / "m.onnx").read_bytes() == before
    onnxruntime.InferenceSession(work / "m.q.onnx", providers=["CPUExecutionProvider"])
    assert {pair["origin"] for pair in pairs(work / "m.q.onnx")} == {"metadata"}
    assert sorted(path.name for path in work.iterdir()) == ["d.npz", "m.onnx", "m.q.onnx"]


def test_json_is_one_document_and_says_what_the_files_say(work):
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--json", "--no-latency", "--holdout", 3)
    found = json.loads(result.stdout)
    assert found["output"] == str(work / "m.q.onnx")
    assert found["output_bytes"] == (work / "m.q.onnx").stat().st_size
    assert found["latency"] is None
    assert found["checked"] == 3
    assert found["checks"][0]["name"] == "y"
    assert found["checks"][0]["sqnr_db"][0] > 30
    assert found["pairs"] == len(pairs(work / "m.q.onnx"))


def test_without_data_the_banner_is_on_stderr_even_with_json(work):
    result = run("quantize", work / "m.onnx", "--json", "--no-latency")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["synthetic"] is True
    assert "!! SYNTHETIC DATA" in result.stderr
    assert "!! SYNTHETIC DATA" in run("quantize", work / "m.onnx", "--no-latency", "--force", "-q").stderr


def test_a_second_run_needs_force_and_gives_the_same_bytes(work):
    first = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--no-latency", "-q")
    assert (first.exit_code, first.stdout, first.stderr) == (0, "", "")
    made = (work / "m.q.onnx").read_bytes()
    assert run("quantize", work / "m.onnx", "--data", work / "d.npz").exit_code == 1
    assert run("quantize", work / "m.onnx", "--data", work / "d.npz", "--no-latency", "--force").exit_code == 0
    assert (work / "m.q.onnx").read_bytes() == made


def test_a_plan_carried_out_gives_the_same_bytes(work):
    made = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--plan", work / "p.json", "--no-latency")
    assert made.exit_code == 0, made.stderr
    applied = run("apply", work / "m.onnx", work / "p.json", "-o", work / "again.onnx", "--no-latency")
    assert applied.exit_code == 0, applied.stderr
    assert (work / "again.onnx").read_bytes() == (work / "m.q.onnx").read_bytes()


def test_plan_is_a_dry_run_that_apply_carries_out_on_data(work):
    shown = run("plan", work / "m.onnx")
    assert shown.exit_code == 0, shown.stderr
    assert "without numbers" in shown.stdout
    assert sorted(path.name for path in work.iterdir()) == ["d.npz", "m.onnx"]
    printed = json.loads(run("plan", work / "m.onnx", "--json", "-o", work / "p.json").stdout)
    assert json.loads((work / "p.json").read_text()) == printed
    bare = run("apply", work / "m.onnx", work / "p.json")
    assert bare.exit_code == 1
    assert "fix: give samples that it is calibrated on, `--data`, or a plan with its numbers" in bare.stderr
    assert "`onnxq quantize` writes one by `--plan`" in bare.stderr
    done = run("apply", work / "m.onnx", work / "p.json", "--data", work / "d.npz", "--no-latency")
    assert done.exit_code == 0, done.stderr
    assert len(pairs(work / "m.q.onnx")) == len(printed["sites"])


def test_a_rule_of_a_file_is_obeyed_and_a_typo_in_it_is_told(work):
    (work / "c.yaml").write_text("extends: ort-int8\nrules:\n  - node: conv1\n    set: {float: true}\n")
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--config", work / "c.yaml", "--no-latency")
    assert result.exit_code == 0, result.stderr
    assert "Conv 1/3" in result.stdout
    (work / "c.yaml").write_text("rules:\n  - node: convv1\n    set: {float: true}\n")
    result = run("plan", work / "m.onnx", "--config", work / "c.yaml")
    assert result.exit_code == 1
    assert f"{work / 'c.yaml'}:2" in result.stderr
    assert "'conv1'" in result.stderr


def test_strict_exits_with_3_after_writing_when_something_was_refused(work):
    asked = work / "asked.yaml"
    asked.write_text(
        "weights: {bits: 4, signed: false, storage: uint4, scheme: asymmetric, granularity: channel}\n",
        encoding="utf-8",
    )
    result = run(
        "quantize", work / "m.onnx", "--data", work / "d.npz", "--no-latency", "--strict", "--config", asked, "--json"
    )
    assert result.exit_code == 3
    assert (work / "m.q.onnx").exists()
    assert {one["code"] for one in json.loads(result.stdout)["refusals"]} == {"R103"}


def test_strict_counts_nothing_that_is_left_float_because_it_does_not_pay(work):
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--no-latency", "--strict")
    assert result.exit_code == 0, result.stderr
    assert "\nleft float  " in result.stdout
    assert "refused" not in result.stdout
    assert "[F103] the first convolution" in result.stdout


def test_bits_attribute_is_written_on_request_with_a_warning(work):
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--no-latency", "--emit-bits-attribute")
    assert result.exit_code == 0, result.stderr
    assert "ONNX Runtime refuse" in result.stdout
    nodes = [node for node in onnx.load(work / "m.q.onnx").graph.node if node.op_type.endswith("quantizeLinear")]
    assert nodes
    assert all(any(attribute.name == "bits" for attribute in node.attribute) for node in nodes)


def test_external_data_is_written_beside(work):
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--no-latency", "--external-data")
    assert result.exit_code == 0, result.stderr
    assert (work / "m.q.onnx_data").exists()
    onnxruntime.InferenceSession(work / "m.q.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    "preset", ["ort-int8-percentile", "ort-int8-mse", "ort-int8-entropy", "ort-uint16-activations"]
)
def test_presets_give_working_models(work, preset):
    result = run("quantize", work / "m.onnx", "--data", work / "d.npz", "--config", preset, "--json", "--no-latency")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["checks"][0]["sqnr_db"][1] > 20


@pytest.mark.parametrize(
    ("preset", "bits", "decibels"), [("ort-int8-weights", [8, 8], 35), ("ort-int4-weights", [4, 8], 12)]
)
def test_weight_only_presets_need_no_data(tmp_path, preset, bits, decibels):
    rng = np.random.default_rng(0)
    inits = [numpy_helper.from_array(rng.normal(size=(64, 64)).astype(np.float32), f"w{k}") for k in range(2)]
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["m"]), helper.make_node("MatMul", ["m", "w1"], ["y"])]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], inits)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    result = run("quantize", tmp_path / "m.onnx", "--config", preset, "--json", "--no-latency")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["checks"][0]["sqnr_db"][0] > decibels
    assert [pair["bits"] for pair in pairs(tmp_path / "m.q.onnx")] == bits


def test_wrong_data_is_the_users_fault(work):
    np.savez(work / "bad.npz", z=np.zeros((2, 3, 16, 16), np.float32))
    result = run("quantize", work / "m.onnx", "--data", work / "bad.npz")
    assert result.exit_code == 1
    assert "fix:" in result.stderr
    assert not (work / "m.q.onnx").exists()


def test_code_that_a_file_names_runs_only_where_it_is_trusted_and_is_named_in_the_summary(work):
    script = work / "score.py"
    script.write_text("open(__file__ + '.ran', 'w').close()\ndef score(model): return 1.0\n")
    config = work / "my.yaml"
    config.write_text(f"accuracy: {{metric: '{script}:score'}}\neffort: fast\n")
    words = (work / "m.onnx", "--data", work / "d.npz", "--config", config)
    for command in ("plan", "quantize"):
        result = run(command, *words)
        assert (result.exit_code, result.stderr[:12]) == (1, "error[Q324]:")
        assert not Path(f"{script}.ran").exists()
    result = run("quantize", *words, "--trust", config, "--no-latency", "-v")
    assert result.exit_code == 0, result.stderr
    assert re.search(rf"^ran +{script}:score$", result.stdout, re.MULTILINE)
    assert Path(f"{script}.ran").exists()
