"""--force overwrites earlier results and never an input, whichever command, and from Python too."""

import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.errors import OutputError
from tests.cli.kit import run
from tests.codes.kit import model, saved

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links and devices")
_X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
_SCRIPT = """
import numpy as np, pathlib
def load():
    return str(pathlib.Path(__file__).parent / "d.npz")
def score(model):
    return 1.0
"""
_FAST = ("--effort", "fast", "--no-latency", "--quiet")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of input there is."""
    folder = tmp_path_factory.mktemp("made")
    weight = np.random.default_rng(1).standard_normal((16, 128)).astype(np.float32)
    network = model("g (float[N,16] x) => (float[N,128] y) { y = MatMul(x, w) }", opset=21, ir=10, w=weight)
    saved(folder, network)
    os.symlink("m.onnx", folder / "soft.onnx")
    onnx.save(network, folder / "in.onnx", save_as_external_data=True, location="o2.onnx_data", size_threshold=0)
    np.savez(folder / "d.npz", x=_X)
    (folder / "samples").mkdir()
    for k in range(3):
        np.savez(folder / "samples" / f"{k}.npz", x=_X[k : k + 1])
    (folder / "s.py").write_text(_SCRIPT)
    (folder / "base.yaml").write_text("extends: ort-int8\n")
    (folder / "c.yaml").write_text("extends: base.yaml\n")
    (folder / "m.cache").write_text("TRT-8601-EntropyCalibration2\nx: 3c010a14\ny: 3d010a14\n")
    done = onnxq.quantize(folder / "m.onnx", folder / "d.npz", overrides={"effort": "fast", "latency": False})
    done.save(folder / "q.onnx")
    (folder / "p.json").write_text(done.plan_json())
    # What is in them does not matter: they must not even be read.
    for name in ("S/results.json", "S/inputs.json", "P/optimized.onnx", "P/reduced.onnx"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("precious")
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(made, tmp_path / "work", symlinks=True))
    os.link(folder / "m.onnx", folder / "hard.onnx")
    monkeypatch.chdir(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


_CASES = {
    "model": ("quantize m.onnx -o m.onnx", "is the input model"),
    "hard link": ("quantize m.onnx -o hard.onnx", "is the input model"),
    "symbolic link": ("quantize soft.onnx -o m.onnx", "is the input model"),
    "plan over model": ("quantize m.onnx --plan m.onnx", "is the input model"),
    "external data": ("quantize in.onnx --data d.npz -o o2.onnx --external-data", "o2.onnx_data: is read by"),
    "external data, apply": ("apply m.onnx p.json -o p.json", "p.json: is read by"),
    "external data, annotate": ("annotate-bits in.onnx -o o2.onnx --external-data", "o2.onnx_data: is read by"),
    "data": ("quantize m.onnx --data d.npz -o d.npz", "d.npz: is read by"),
    "sample": ("quantize m.onnx --data samples -o samples/1.npz", "samples/1.npz: is read by"),
    "plan over sample": ("quantize m.onnx --data samples --plan samples/1.npz", "samples/1.npz: is read by"),
    "configuration": ("quantize m.onnx --data d.npz --config c.yaml --plan c.yaml", "c.yaml: is an input of"),
    "its base": ("plan m.onnx --config c.yaml -o base.yaml", "base.yaml: is read by"),
    "script": ("quantize m.onnx --data s.py:load -o s.py", "s.py: is read by"),
    "a script's data": ("quantize m.onnx --data s.py:load -o d.npz", "d.npz: is read by"),
    "metric": ("quantize m.onnx --data d.npz --metric s.py:score -o s.py", "s.py: is read by"),
    "plan": ("apply m.onnx p.json --plan p.json", "p.json: is read by"),
    "bits": ("annotate-bits q.onnx --plan p.json -o p.json", "p.json: is read by"),
    "exported": ("export-calibration q.onnx --format aimet-2.0 -o q.onnx", "q.onnx: is the input model"),
    "cache": ("import-calibration m.cache --model m.onnx -o m.cache", "m.cache: is read by"),
    "cache's model": ("import-calibration m.cache --model m.onnx -o m.onnx", "is the input model"),
    "cache, applied": ("import-calibration m.cache --model m.onnx --apply m.cache", "m.cache: is read by"),
    "results": ("diff m.onnx q.onnx --load S/results.json --save S", "is read by"),
    "inputs": ("diff m.onnx q.onnx --data S/inputs.json --save S", "S/inputs.json: is read by"),
    "model in the folder": ("prove P/optimized.onnx --engine ort --save P", "P/optimized.onnx: is read by"),
    "proof": ("prove q.onnx --engine ort --compare P/reduced.onnx --save P", "P/reduced.onnx: is read by"),
}


@pytest.mark.parametrize("case", _CASES)
def test_force_overwrites_no_input(work: Path, case: str) -> None:
    command, said = _CASES[case]
    before = contents(work)
    result = run(*command.split(), "--force")
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr
    assert contents(work) == before


def test_results_may_lie_among_the_samples_and_replace_earlier_ones(work: Path) -> None:
    for _ in range(2):
        done = run("quantize", "m.onnx", "--data", "samples", "-o", "samples/q.onnx", "--force", *_FAST)
        assert done.exit_code == 0, done.stderr
    assert sorted(os.listdir(work / "samples")) == ["0.npz", "1.npz", "2.npz", "q.onnx"]
    applied = run("apply", "in.onnx", "p.json", "-o", "o2.onnx", "--external-data", "--force", *_FAST[2:])
    assert "is read by" in applied.stderr
    plain = run("quantize", "in.onnx", "--data", "d.npz", "-o", "o2.onnx", *_FAST)
    assert plain.exit_code == 0, plain.stderr


def test_python_callers_are_kept_from_it_too(work: Path) -> None:
    before = contents(work)
    with pytest.raises(OutputError, match="is read by"):
        onnxq.quantize(
            work / "in.onnx", work / "d.npz", out=work / "o2.onnx", overrides={"external_data": True}, force=True
        )
    result = onnxq.quantize(work / "in.onnx", work / "d.npz", overrides={"effort": "fast", "latency": False})
    for name in ("in.onnx", "o2.onnx"):
        with pytest.raises(OutputError, match="is an input"):
            result.save(work / name, force=True, external=True)
    assert contents(work) == before
    result.save(work / "new.onnx")
    with pytest.raises(OutputError, match="overwrite it with `force=True`"):
        result.save(work / "new.onnx")
    result.save(work / "new.onnx", force=True)


def test_a_data_file_in_the_way_is_told_before_the_work(work: Path) -> None:
    (work / "n.onnx_data").write_text("precious")
    result = run("quantize", "m.onnx", "--data", "none.npz", "-o", "n.onnx", "--external-data")
    assert "n.onnx_data: exists" in result.stderr


@pytest.mark.usefixtures("work")
def test_a_model_for_nobody() -> None:
    """/dev/null takes the model and stays what it is, for root too."""
    done = run("quantize", "m.onnx", "--data", "d.npz", "-o", "/dev/null", *_FAST)
    assert done.exit_code == 0, done.stderr
    assert Path("/dev/null").is_char_device()
    refused = run("quantize", "m.onnx", "--data", "d.npz", "-o", "/dev/null", "--external-data", *_FAST)
    assert refused.exit_code == 1


def test_names_that_are_not_utf_8_work_or_are_refused_in_words(work: Path) -> None:
    odd = {
        name: os.fsdecode(name.encode().replace(b"?", b"\xff")) for name in ("m?.onnx", "d?.npz", "c?.yaml", "p?.json")
    }
    for name, plain in zip(odd.values(), ("m.onnx", "d.npz", "c.yaml"), strict=False):
        shutil.copy(work / plain, work / name)
    model, data, config, plan = odd.values()
    done = run("quantize", model, "--data", data, "--config", config, "--plan", plan, "--json", *_FAST)
    assert done.exit_code == 0, done.stderr
    assert '"source": "m\\ufffd.onnx"' in done.stdout
    again = run("apply", model, plan, "--force", *_FAST[2:])
    assert again.exit_code == 0, again.stderr
    missing = run("quantize", f"x{model}")
    assert (missing.exit_code, "xm\ufffd.onnx: there is no such file" in missing.stderr) == (1, True)
    apart = run("quantize", model, "--data", data, "--external-data", "--force", *_FAST)
    assert (apart.exit_code, "is not UTF-8" in apart.stderr) == (1, True)
