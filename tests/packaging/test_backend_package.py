"""A backend of another package goes through every command: the module of docs/extending.md, with its entry point."""

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result

import onnxq
from onnxq import backends
from onnxq.cli import cli
from onnxq.emit import unpack_plan
from onnxq.errors import ConfigError, PlanError
from onnxq.plan import from_json
from tests.packaging.test_extending import COMMON, read_blocks

ENTRY = "[onnxq.backends]\n{name} = {value}\n"
WISHES = "{scheme: symmetric, signed: true, granularity: tensor}"
CONFIG = f"target: accelerator\nactivations: {WISHES}\nweights: {WISHES}\nbias: float\n"


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, value: str = "accelerator:BACKEND", blocks: int = 2
) -> None:
    """Put the package where Python looks for packages. blocks: of its module; 1: without an engine."""
    (folder / "accelerator.py").write_text("\n".join(read_blocks("A target")[:blocks]), encoding="utf-8")
    info = folder / "accelerator-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: accelerator\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY.format(name="accelerator", value=value))
    monkeypatch.syspath_prepend(folder)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a package registers is gone afterwards."""
    before = dict(backends.BACKENDS)
    yield
    backends.BACKENDS.clear()
    backends.BACKENDS.update(before)
    sys.modules.pop("accelerator", None)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the network and samples of the page, and a configuration for the installed target."""
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", monkeypatch)
    names: dict[str, object] = {}
    exec("\n".join(COMMON), names)
    onnx.save(names["model"], tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.concatenate([sample["x"] for sample in names["samples"]]))
    (tmp_path / "c.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str) -> Result:
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code == 0, result.output + result.stderr
    return result


def test_plan_apply_inspect(work: Path) -> None:
    run("plan m.onnx --config c.yaml --data d.npz -o plan.json")
    assert "accelerator" in backends.BACKENDS
    assert json.loads((work / "plan.json").read_text())["target"] == "accelerator"
    run("apply m.onnx plan.json --data d.npz --no-latency -o q.onnx")
    shown = json.loads(run("inspect q.onnx --json").stdout)
    assert {pair["site"] for pair in shown["pairs"]} == {"x", "r", "w0", "w1"}


def test_quantize_diff_prove_profile(work: Path) -> None:
    run("quantize m.onnx --target accelerator --config c.yaml --data d.npz --no-latency -o q.onnx --force")
    note = {entry.key: entry.value for entry in onnx.load("q.onnx").metadata_props}["onnxq.plan"]
    assert unpack_plan(note).target == "accelerator"
    run("diff m.onnx q.onnx --data d.npz --engines ort")
    proof = json.loads(run("prove q.onnx --engine ort --json").stdout)
    assert {site["rule"] for site in proof["sites"].values()} == {"conv"}
    run("profile m.onnx --config c.yaml --data d.npz --by node")


def test_its_own_engine_proves_it(work: Path) -> None:
    run("quantize m.onnx --config c.yaml --data d.npz --no-latency -o q.onnx")
    proof = json.loads(run("prove q.onnx --require-int8 Conv --json").stdout)
    assert proof["build"]["engine"] == "accelerator-sim"
    assert proof["chosen"] == "the plan in the file is for accelerator"
    assert {kernel["kind"] for kernel in proof["kernels"]} == {"conv_s8"}
    assert {site["state"] for site in proof["sites"].values()} == {"fused"}
    run("prove q.onnx --engine accelerator-sim -o proof")
    assert (work / "proof" / "model.engine").exists()
    done = CliRunner().invoke(cli, ["prove", "q.onnx", "--engine", "accelerator-sim", "--require-exact"])
    assert "or `--engine ort`" in done.stderr


def test_its_own_engine_is_compared(work: Path) -> None:
    run("quantize m.onnx --config c.yaml --data d.npz --no-latency -o q.onnx")
    for engines in ("", " --engines accelerator"):
        difference = json.loads(run(f"diff m.onnx q.onnx --data d.npz --layers --bisect --json{engines}").stdout)
        assert "accelerator" in {row["name"] for row in difference["runs"]}
    assert {row["name"] for row in difference["runs"]} == {"float", "ort-off", "accelerator"}


def test_its_own_engine_is_timed(work: Path) -> None:
    run("quantize m.onnx --config c.yaml --data d.npz --no-latency -o q.onnx")
    bench = json.loads(run("bench m.onnx q.onnx --data d.npz --seconds 0.2 --json").stdout)
    assert (bench["engine"]["name"] if isinstance(bench["engine"], dict) else bench["engine"]) == "accelerator-sim"
    assert bench["device"] == "simulator"
    assert onnxq.make_plan("m.onnx", "d.npz", "c.yaml", overrides={"placement": "measured"}).placement.speedups


def test_placements_are_not_timed_without_an_engine(work: Path) -> None:
    (work / "site" / "accelerator.py").write_text(read_blocks("A target")[0], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no engine of target accelerator.*\[Q307\]"):
        onnxq.make_plan("m.onnx", "d.npz", "c.yaml", overrides={"placement": "measured"})


def test_training(work: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch_frontend.quant_model import QuantModel

    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    assert len(QuantModel(net, "c.yaml", example_inputs=torch.randn(2, 3, 8, 8)).quantizers) == 4


def test_the_name_alone_begins_with_the_usual_preset(work: Path) -> None:
    """Its activations are unsigned there, which this target refuses, and says so."""
    plan = onnxq.make_plan("m.onnx", "d.npz", overrides={"target": "accelerator"})
    assert plan.target == "accelerator"
    assert any("accelerator has no Conv kernel" in refusal.reason for refusal in plan.refusals)


def test_a_name_that_is_nearly_its_own(work: Path) -> None:
    with pytest.raises(ConfigError, match="acelerator") as caught:
        onnxq.make_plan("m.onnx", "d.npz", overrides={"target": "acelerator"})
    assert caught.value.fix == "did you mean 'accelerator'?"
    text = json.dumps({"schema": 2, "target": "acelerator"}, indent=1)
    with pytest.raises(
        PlanError, match=r"p.json:3: target: 'acelerator': is not one of accelerator, openvino, ort, qnn, trt, virtual"
    ):
        from_json(text, source="p.json")


@pytest.mark.parametrize("value", ["nowhere:BACKEND", "accelerator:ACCELERATOR", "accelerator:NOTHING"])
def test_a_broken_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    install(tmp_path, monkeypatch, value=value)
    with pytest.raises(ConfigError, match=f"target 'accelerator': its package cannot be loaded from {value}"):
        backends.find_target("accelerator")


def test_a_broken_package_is_in_nobodys_way(work: Path) -> None:
    (work / "site" / "accelerator.py").write_text("raise OSError('no licence')\n", encoding="utf-8")
    assert "accelerator" in backends.list_names()
    assert "accelerator-sim" not in backends.list_engines()
    run("plan m.onnx --data d.npz")
    run("prove m.onnx --engine ort")


def test_own_backends_are_the_entry_points_of_the_project() -> None:
    """The same door for all; a checkout beside older metadata finds them by their folders."""
    root = Path(backends.__file__).resolve().parents[2]
    section = (root / "pyproject.toml").read_text(encoding="utf-8").partition(f'entry-points."{backends.GROUP}"]\n')[2]
    declared = dict(re.findall(r'(\w+) = "([^"]+)"', section.partition("\n\n")[0]))
    assert list(declared) == [backend.name for backend in backends.list_backends()]
    for name, value in declared.items():
        assert EntryPoint(name, value, backends.GROUP).load() is backends.find_backend(name)
