"""Every command says what it is doing: each step before it begins, and that it lives while a step says nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.kernels import build_kernels
from onnxq.progress import Progress, Task, silent
from tests.cli import kit
from tests.pipeline.models import images, residual

pytestmark = pytest.mark.usefixtures("engines_here")
# What must have been announced, in this order, by the time the command is done.
COMMON = ["reading the model", "simplifying the graph", "reading samples"]
STEPS = {
    "quantize": [
        *COMMON, "looking for the extreme samples", "comparing the simplified model with the original",
        "equalizing channels across layers", "planning", "calibrating", "choosing ranges", "rounding weights",
        "making the quantized model", "checking the quantized model", "timing float and quantized model",
        "writing",
    ],
    "plan": [*COMMON, "planning", "observing shapes", "writing"],
    "apply": [*COMMON, "making the quantized model", "checking the quantized model", "writing"],
    "prove": [
        "reading the model", "reading samples", "building with ONNX Runtime, for at most 600 s",
        "reading the engine", "finding the kernels of nodes and pairs", "counting sums that saturate",
    ],
    "diff": [
        "reading the models", "reading samples", "indexing both models", "loading the float model into ONNX Runtime",
        "loading the quantized model into ONNX Runtime", "comparing outputs",
        "having ONNX Runtime optimize the model", "comparing layers", "writing the results",
    ],
    "profile": ["reading the models", "reading samples", "putting every pair behind a switch", "profiling"],
    "inspect": ["looking for pairs"],
    "annotate-bits": ["looking for pairs", "writing"],
    "import-calibration": [*COMMON, "planning", "observing shapes", "calibrating", "writing"],
    "export-calibration": ["reading the scales", "writing"],
    "variants": ["reading samples", "making fp16", "timing the files, for at most 20 s", "writing"],
    "build-kernels": ["compiling for the CPU, about a minute", "compiling for GPUs with nvcc, some minutes"],
}  # fmt: skip


class Log:
    """A Progress that notes every step as it begins, and how deep it is."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.depth = 0

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Task]:
        self.begun.append(description)
        self.depth += 1
        with silent(description, total) as task:
            yield task
        self.depth -= 1


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, samples, and what quantizing it writes; what was announced while it did."""
    folder = tmp_path_factory.mktemp("progress")
    onnx.save(residual(), folder / "m.onnx")
    np.savez(folder / "d.npz", **images(24))
    (folder / "c.yaml").write_text("rules:\n  - {op: '*', set: {quantize: true}}\n")
    log = Log()
    wanted = {"data": folder / "d.npz", "config": folder / "c.yaml"}
    onnxq.quantize(
        folder / "m.onnx", **wanted, out=folder / "m.q.onnx", overrides={"plan_out": folder / "m.json"}, progress=log
    )  # fmt: skip
    (folder / "steps.json").write_text(json.dumps(log.begun))
    return folder


def run(work: Path, command: str, progress: Progress) -> None:
    model, quantized, data = work / "m.onnx", work / "m.q.onnx", work / "d.npz"
    config, plan = work / "c.yaml", work / "m.json"
    if command == "plan":
        onnxq.make_plan(model, data, config, out=work / "p.json", force=True, progress=progress)
    elif command == "apply":
        onnxq.apply(model, plan, data, overrides={"latency": False}, out=work / "a.onnx", force=True, progress=progress)
    elif command == "prove":
        onnxq.prove(quantized, overrides={"engine": "ort", "samples": 2}, data=data, progress=progress)
    elif command == "diff":
        onnxq.diff(
            model, quantized, data, overrides={"engines": ["ort"], "layers": True, "samples": 2}, out=work / "out",
            force=True, progress=progress,
        )  # fmt: skip
    elif command == "profile":
        onnxq.profile_model(model, quantized, data, overrides={"by": ["segment"], "samples": 1}, progress=progress)
    elif command == "inspect":
        onnxq.inspect(quantized, progress=progress)
    elif command == "import-calibration":
        cache = work / "m.cache"
        cache.write_text("TRT-8601-EntropyCalibration2\nx: 3c010a14\n")
        onnxq.import_calibration(cache, model, data, out=work / "i.json", force=True, progress=progress)
    elif command == "export-calibration":
        onnxq.export_calibration(quantized, "aimet-2.0", out=work / "e.json", force=True, progress=progress)
    elif command == "variants":
        wanted = {"only": "fp16", "effort": "fast"}
        onnxq.variants(model, data, overrides=wanted, out=work / "hub", progress=progress)
    elif command == "build-kernels":
        build_kernels(output=work / "kernels", progress=progress)
    else:
        onnxq.annotate_bits(quantized, out=work / "b.onnx", force=True, progress=progress)


@pytest.mark.parametrize("command", STEPS)
def test_every_step_is_announced(work: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    if command == "build-kernels":
        # Without compilers it is done at once.
        for name in ("PATH", "CXX", "ONNXQ_NVCC"):
            monkeypatch.setenv(name, str(work))
        monkeypatch.setattr("onnxq.kernels.build.find_nvrtc", lambda: None)
    if command == "quantize":
        log.begun = json.loads((work / "steps.json").read_text())
    else:
        run(work, command, log)
    assert log.depth == 0
    seen = iter(log.begun)
    assert [step for step in STEPS[command] if step not in seen] == [], log.begun


def test_a_step_is_announced_before_its_work_begins(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after: what cannot report from within must have been named."""
    import onnxq.pipeline.prepared as prepared
    from onnxq.pipeline import check

    log = Log()
    at: dict[str, str] = {}

    def spied(module: object, name: str) -> None:
        real = getattr(module, name)

        def spy(*given: object, **wanted: object) -> object:
            at[name] = log.begun[-1]
            return real(*given, **wanted)

        monkeypatch.setattr(module, name, spy)

    for module, name in (
        (prepared, "load_model"),
        (prepared, "infer_shapes"),
        (check, "Session"),
        (check, "time_models"),
    ):
        spied(module, name)
    onnxq.quantize(
        work / "m.onnx", work / "d.npz", work / "c.yaml", overrides={"effort": "fast", "latency": True}, progress=log
    )
    assert at == {
        "load_model": "reading the model",
        "infer_shapes": "simplifying the graph",
        "Session": "running float and quantized model",
        "time_models": "timing float and quantized model",
    }


@pytest.mark.parametrize("options", [["--json"], []])
def test_lines_go_to_stderr_alone(work: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.report.live.PATIENCE", 0.0)
    done = kit.run("inspect", work / "m.q.onnx", *options)
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines() == [f"inspecting {work / 'm.q.onnx'}", "looking for pairs"]
    assert "looking for pairs" not in done.stdout
    if options:
        json.loads(done.stdout)


@pytest.mark.parametrize(
    "command",
    [
        "quantize m.onnx --data d.npz --effort fast --no-latency -o x.onnx --force",
        "plan m.onnx --data d.npz",
        "apply m.onnx m.json -o x.onnx --force --no-latency",
        "prove m.q.onnx --engine ort",
        "profile m.onnx m.q.onnx --data d.npz --samples 1 --by segment",
        "variants m.onnx --data d.npz --only fp16 --no-latency -o quiet",
        "inspect m.q.onnx",
        "annotate-bits m.q.onnx -o x.onnx --force",
    ],
    ids=lambda command: command.split()[0],
)
def test_quiet_is_silent(work: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.report.live.PATIENCE", 0.0)
    monkeypatch.chdir(work)
    done = kit.run(*command.split(), "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert all(line.startswith("warning[W") for line in done.stderr.splitlines())


_SLOW = """
import time
import numpy as np

def load_data():
    for k in range(4):
        time.sleep(2.5 if k == 1 else 0)
        yield {"x": np.random.default_rng(k).standard_normal(%s).astype(np.float32)}
"""


def test_a_slow_function_of_the_users_shows_that_it_lives(work: Path) -> None:
    """In a pipe: the step is named, and after two seconds without a sample a line says that it still runs."""
    (work / "slow.py").write_text(_SLOW % (images(1)["x"].shape,))
    command = [sys.executable, "-m", "onnxq.cli", "plan", "m.onnx", "--data", "slow.py:load_data", "--json"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    lines = done.stderr.splitlines()
    assert lines[0] == "planning m.onnx"
    assert any(re.fullmatch(r"reading samples: \d, \d\.\d s so far", line) for line in lines), lines
    assert "\x1b" not in done.stderr
