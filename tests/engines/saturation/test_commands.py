"""`prove`, `inspect` and `diff` about weights that can overflow 16-bit sums: tables, JSON, exit codes, causes."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from onnxq.engines.diff import bisect as diff_bisect
from onnxq.engines.diff import layers as diff_layers
from onnxq.engines.diff import runs as diff_runs
from onnxq.engines.saturation import emulate_saturation
from onnxq.graph import ModelLike, attach_weights
from onnxq.runtime import Session
from tests.cli.kit import read, run
from tests.engines.saturation import kit
from tests.networks import add_arrays

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("engines_here")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saturation")
    proto, arrays = kit.product("MatMul", (4, 40), (40, 30))
    onnx.save(proto, path / "bad.onnx")
    plain = "g (float[4,40] x) => (float[4,30] y) { [product] y = MatMul(x, f) }"
    onnx.save(kit.parse(plain, f=arrays["w"].astype(np.float32) * arrays["ws"]), path / "float.onnx")
    for tensor in proto.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(onnx.numpy_helper.from_array((arrays["w"] // 2).astype(np.int8), "w"))
    onnx.save(proto, path / "good.onnx")
    np.savez(path / "x.npz", x=np.random.default_rng(0).uniform(-2, 5, (3, 4, 40)).astype(np.float32))
    return path


def test_inspect_lists_the_weights(folder):
    told = run("inspect", folder / "bad.onnx")
    assert told.exit_code == 0
    assert "product  MatMul  w       30/30" in told.stdout
    assert "30 of 30 rows of 1 weight can overflow 16-bit sums on x86 CPUs without VNNI: product" in told.stdout
    assert "overflow" not in run("inspect", folder / "good.onnx").stdout
    assert "0/30" in run("inspect", folder / "good.onnx", "-v").stdout
    (weight,) = read("inspect", folder / "bad.onnx")["weights"]
    assert {key: weight[key] for key in ("node", "op", "weight", "rows", "all_rows", "all_sums", "exact")} == {
        "node": "product", "op": "MatMul", "weight": "w", "rows": 30, "all_rows": 30, "all_sums": 600, "exact": "",
    }  # fmt: skip


def test_operators_in_integers_are_inspected_as_the_pairs_they_stand_for(folder, tmp_path):
    onnx.save(kit.by_tool("dynamic", tmp_path), tmp_path / "q.onnx")
    told = run("inspect", tmp_path / "q.onnx").stdout
    assert "at run time" in told
    assert " Conv " in told
    assert "ConvInteger" not in told


def test_prove_warns_and_with_require_exact_fails(folder):
    told = run("prove", folder / "bad.onnx", "--engine", "ort")
    assert told.exit_code == 0, told.stderr
    assert "warning[W107]: 30 of 30 rows of 1 weight can overflow 16-bit sums on x86 CPUs without VNNI" in told.stdout
    assert "`--data` says how often" in told.stdout
    failed = run("prove", folder / "bad.onnx", "--engine", "ort", "--require-exact")
    assert failed.exit_code == 1
    assert "error[Q707]: `--require-exact`: 30 of 30 rows of 1 weight can overflow" in failed.stderr
    assert "fix: quantize the float model with onnxq" in failed.stderr
    good = run("prove", folder / "good.onnx", "--engine", "ort", "--require-exact")
    assert good.exit_code == 0
    assert "exact: no weight can overflow" in good.stdout


def test_prove_counts_on_samples(folder):
    args = ("prove", folder / "bad.onnx", "--engine", "ort", "--data", folder / "x.npz", "--samples", 2)
    told = run(*args)
    assert told.exit_code == 0, told.stderr
    assert "saturation  y: " in told.stdout
    assert "dB on 2 samples, against exact sums" in told.stdout
    found = read(*args)
    assert found["holds"] is True
    assert found["weights"][0]["rows"] == 30
    assert found["cost"]["samples"] == 2
    (node,) = found["cost"]["nodes"]
    assert node["node"] == "product"
    assert 0 < node["saturated"] < node["sums"] == 2 * 4 * 30 * 20
    (output,) = found["cost"]["outputs"]
    assert output["output"] == "y"
    assert output["sqnr_db"] < 40
    exact = read("prove", folder / "good.onnx", "--engine", "ort", "--data", folder / "x.npz")
    assert (exact["cost"]["nodes"], exact["cost"]["outputs"][0]["sqnr_db"]) == ([], "inf")


def test_a_kernel_in_float_cannot_saturate(tmp_path):
    """The file's rule takes it for an integer kernel; ONNX Runtime's graph says otherwise."""
    proto, _ = kit.product("Conv", (1, 4, 6, 6), (4, 4, 3, 3), quantized=True)
    clip = helper.make_node("Clip", ["c", "low", "high"], ["r"], name="clip")
    at = next(k for k, node in enumerate(proto.graph.node) if node.output[0] == "c")
    proto.graph.node.insert(at + 1, clip)
    proto.graph.node[at + 2].input[0] = "r"
    add_arrays(proto.graph, low=0, high=6)
    onnx.save(proto, tmp_path / "m.onnx")
    assert "can overflow" in run("inspect", tmp_path / "m.onnx").stdout
    told = run("prove", tmp_path / "m.onnx", "--engine", "ort", "--require-exact", "-v")
    assert told.exit_code == 0
    assert "computed in float32" in told.stdout


def test_weights_that_onnx_runtime_rounds_by_itself_are_seen(tmp_path):
    """A float Conv between a DequantizeLinear and a QuantizeLinear."""
    proto, arrays = kit.product("Conv", (1, 4, 6, 6), (4, 4, 3, 3), quantized=True)
    nodes = {node.output[0]: node for node in proto.graph.node}
    nodes["c"].input[1] = "float_weight"
    proto.graph.node.remove(nodes["wd"])
    add_arrays(proto.graph, float_weight=arrays["w"].astype(np.float32) * np.float32(0.01))
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones((1, 1, 4, 6, 6), np.float32))
    assert "overflow" not in run("inspect", tmp_path / "m.onnx").stdout
    found = read("prove", tmp_path / "m.onnx", "--engine", "ort", "--data", tmp_path / "x.npz")
    assert [(one["node"], one["op"], one["all_rows"]) for one in found["weights"]] == [("product", "Conv", 4)]
    assert found["weights"][0]["rows"] > 0
    assert "by itself" in found["cost"]["skipped"][0]["reason"]


@pytest.mark.parametrize("asked", [["--require-exact"], ["--data", "x.npz"]])
def test_tensorrt_has_no_such_sums(folder, asked):
    asked = [str(folder / part) if part.endswith(".npz") else part for part in asked]
    failed = run("prove", folder / "bad.onnx", "--engine", "tensorrt", *asked)
    assert failed.exit_code == 1
    cause = "is about kernels of OpenVINO or ONNX Runtime; TensorRT's sums are exact"
    assert f"error[Q317]: `{asked[0]}`: {cause}" in failed.stderr
    assert "--engine ort" in failed.stderr


@pytest.fixture
def saturating_cpu(monkeypatch):
    """ONNX Runtime with optimizations computes as on a CPU without VNNI."""
    if kit.this_cpu_saturates():
        return

    def session(proto: onnx.ModelProto, *, optimize: bool = True, **options: object) -> Session:
        return Session(emulate_saturation(proto).saturating if optimize else proto, optimize=False)

    for module in (diff_runs, diff_layers, diff_bisect):
        monkeypatch.setattr(module, "Session", session, raising=False)
    monkeypatch.setattr(diff_layers, "optimize_graph", lambda proto, **_: emulate_saturation(proto).saturating)


@pytest.mark.parametrize("options", [[], ["--layers"]])
@pytest.mark.usefixtures("saturating_cpu")
def test_diff_names_the_weights_that_saturate(folder, options):
    args = ("diff", folder / "float.onnx", folder / "bad.onnx", "--data", folder / "x.npz", "--engines", "ort")
    told = run(*args, *options)
    assert told.exit_code == 0, told.output
    cause = "saturates: 30 rows of the weight of product overflow 16-bit sums on x86 CPUs without VNNI"
    assert cause in next(line for line in told.stdout.splitlines() if "diverges from the file" in line)
    assert cause in next(line for line in told.stdout.splitlines() if line.startswith("warning[W109]: as ORT runs it"))
    (divergence,) = read(*args, *options)["divergences"]
    assert [one["node"] for one in divergence["saturating"]] == ["product"]


@pytest.mark.usefixtures("saturating_cpu")
def test_diff_blames_no_weight_for_another_fault(folder, tmp_path, monkeypatch):
    """A run that is as far from the saturating answer as from the exact one."""

    def wrong(model: ModelLike, *, optimize: bool = True, **options: object) -> Session:
        changed = onnx.ModelProto.FromString(attach_weights(model).SerializeToString())
        if optimize:
            changed.graph.node[-1].input[0], changed.graph.node[-1].output[0] = "xd", "y0"
            changed.graph.node.append(helper.make_node("Mul", ["y0", "two"], ["y"], name="fault"))
            add_arrays(changed.graph, two=2)
        return Session(changed, optimize=False)

    for module in (diff_runs, diff_layers):
        monkeypatch.setattr(module, "Session", wrong)
    args = ("diff", folder / "float.onnx", folder / "bad.onnx", "--data", folder / "x.npz", "--engines", "ort")
    told = run(*args)
    assert "as ORT runs it: diverges from the file" in told.stdout
    assert "saturates" not in told.stdout
