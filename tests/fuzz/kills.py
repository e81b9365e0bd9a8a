"""`onnxq quantize` stopped by signals at random moments: nothing half-written, and nothing left after the next run.

python -m tests.fuzz.kills --moments 200 --seed 0
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from tests.networks import parse_text
from tests.processes import start

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_METRIC = """
import numpy as np
X = np.load({data!r})["x"][:2]
def score(model):
    return float(sum(model({{"x": x[None]}})["y"].mean() for x in X)) if model.path else 0.0
"""
_CONFIG = "rules:\n  - {op: '*', set: {quantize: true}}\n"
# A run that a signal has reached ends within this.
_SECONDS = 300


class Bench:
    """A small model with its data; runs of it in folders of their own, with their own folder for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(0)
        weights = [rng.standard_normal(shape).astype(np.float32) / 8 for shape in ((16, 3, 3, 3), (16, 16, 3, 3))]
        text = """net (float[N,3,8,8] x) => (float[N,16,8,8] y) {
            [first] c = Conv <pads=[1,1,1,1]>(x, a) [relu] r = Relu(c) [second] y = Conv <pads=[1,1,1,1]>(r, b) }"""
        onnx.save(parse_text(text, opset=21, ir=10, a=weights[0], b=weights[1]), folder / "m.onnx")
        np.savez(folder / "d.npz", x=rng.standard_normal((8, 3, 8, 8)).astype(np.float32))
        (folder / "c.yaml").write_text(_CONFIG)
        (folder / "score.py").write_text(_METRIC.format(data=str(folder / "d.npz")))

    def command(self, out: Path) -> list[str]:
        """`onnxq quantize` of everything that writes files: data beside the model, a plan, a metric's folder."""
        given = ["m.onnx", "--data", "d.npz", "--config", "c.yaml", "--no-latency", "--quiet"]
        wished = ["--metric", "score.py:score", "--max-drop", "99"]
        written = ["-o", str(out / "q.onnx"), "--plan", str(out / "p.json"), "--external-data", "--force"]
        return [sys.executable, "-m", "onnxq", "quantize", *given, *wished, *written]

    def begin(self, out: Path) -> subprocess.Popen[str]:
        """Start a run that writes into `out` and keeps its temporary files in `out`-tmp."""
        temporary = out.with_name(f"{out.name}-tmp")
        for folder in (out, temporary):
            folder.mkdir(exist_ok=True)
        environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONFAULTHANDLER": "1"}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return start(self.command(out), cwd=self.folder, env=environ, **pipes)

    def run(self, out: Path) -> float:
        """A run to its end; the seconds it took."""
        begun = time.monotonic()
        child = self.begin(out)
        errors = child.communicate(timeout=_SECONDS)[1]
        assert child.returncode == 0, errors
        return time.monotonic() - begun


def faults(out: Path) -> list[str]:
    """What is half-written in `out`: a model that cannot be run, a plan that is no JSON."""
    found = []
    model, plan = out / "q.onnx", out / "p.json"
    try:
        if model.exists():
            onnx.checker.check_model(str(model))
            ort.InferenceSession(str(model)).run(None, {"x": np.zeros((1, 3, 8, 8), np.float32)})
        if plan.exists():
            json.loads(plan.read_text())
    except Exception as error:  # whatever a broken file makes these raise
        found.append(f"half-written: {error}")
    return found


def litter(out: Path) -> list[str]:
    """What lies in the folder of the outputs and in that for temporary files and does not belong there."""
    # .ses: ONNX Runtime's own, written by each process that imports it, and by none twice.
    mine = {"q.onnx", "q.onnx_data", "p.json", ".ses"}
    temporary = out.with_name(f"{out.name}-tmp")
    return [f"left: {path}" for path in (*out.iterdir(), *temporary.iterdir()) if path.name not in mine]


def stop(bench: Bench, out: Path, number: signal.Signals, after: float) -> tuple[str, list[str]]:
    """One moment: how the run ended, and everything that is wrong after it and after the next one."""
    child = bench.begin(out)
    time.sleep(after)
    child.send_signal(number)
    try:
        errors = child.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGABRT)  # its fault handler says where it stands
        errors = child.communicate()[1]
    code = child.returncode
    # Killed while Python itself started, before there was anything to clean up, a process says -number.
    endings = {0: "finished", -number: "killed", 128 + number: "stopped"}
    if "init_import_site" in errors:  # SIGINT then
        code = -number
    wrong = faults(out)
    if code not in endings or (code > 0 and errors.strip() != "stopped; nothing half-written is left"):
        wrong.append(f"exit code {code}: {errors}")
    if code >= 0:
        wrong += litter(out)
    if code != 0 and litter(out):
        bench.run(out)
        wrong += [*faults(out), *(f"after the next run {one}" for one in litter(out))]
    return endings.get(code, str(code)), wrong


def stop_often(moments: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """So many moments, spread over the time a run takes; how the runs ended, and what was wrong."""
    bench, draw = Bench(folder), random.Random(seed)
    seconds = bench.run(folder / "first")
    endings: Counter[str] = Counter()
    wrong: list[str] = []
    for k in range(moments):
        number = SIGNALS[k % len(SIGNALS)]
        # Every second run finds an earlier result in its place.
        out = folder / ("again" if k // len(SIGNALS) % 2 else f"fresh{k}")
        ended, found = stop(bench, out, number, draw.uniform(0, 1.05 * seconds))
        endings[f"{number.name} {ended}"] += 1
        wrong += [f"moment {k}, {number.name}: {one}" for one in found]
    return endings, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        endings, wrong = stop_often(given.moments, given.seed, Path(folder))
    print(*(f"{count:4} {ending}" for ending, count in sorted(endings.items())), sep="\n")
    print(*wrong, f"{len(wrong)} faults in {given.moments} moments", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
