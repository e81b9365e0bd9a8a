"""python compare.py FOLDER KIND…: does ONNX Runtime answer on this CPU as `record.py` says? Exit status 1 if not.

Runs with numpy and ONNX Runtime alone, so that it can on machines and emulators with nothing else.

kernel: every answer to the bit; answers are integers, whatever their type.
network: as the file says (optimizations off) and as users run it (all on), each output within RIGHT dB of the recorded
one. What remains are sums of floats in another order, which move a few values by one quantization step.
"""

import json
import platform
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented  # noqa: A004

RIGHT = 60.0


def run(model: Path, feeds: dict[str, np.ndarray], *, optimize: bool) -> list[np.ndarray]:
    """All outputs, in one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def agreement(right: list[np.ndarray], found: list[np.ndarray]) -> float:
    """The lowest signal-to-noise ratio of any output, in dB; 200 where equal."""
    ratios = [200.0]
    for one, other in zip(right, found, strict=True):
        gap = np.square(other.astype(np.float64) - one).sum()
        ratios.append(10 * np.log10(np.square(one, dtype=np.float64).sum() / gap) if gap else 200.0)
    return float(min(ratios))


def main(folder: Path, kinds: list[str]) -> int:
    """Compare every entry of the kinds; a line for each that differs and one that counts them all."""
    wrong, absent, lowest = 0, 0, 200.0
    entries = [entry for entry in json.loads((folder / "list.json").read_text()) if entry["kind"] in kinds]
    for name, kind in ((entry["name"], entry["kind"]) for entry in entries):
        feeds = dict(np.load(folder / f"{name}.inputs.npz"))
        right = list(np.load(folder / f"{name}.answers.npz").values())
        if kind == "kernel":
            try:
                found = run(folder / f"{name}.onnx", feeds, optimize=True)
            except NotImplemented:
                absent += 1
                continue
            if not all(np.array_equal(one, other) for one, other in zip(right, found, strict=True)):
                wrong += 1
                print(f"{name}: differs from the exact answer")
            continue
        for optimize in (False, True):
            ratio = agreement(right, run(folder / f"{name}.onnx", feeds, optimize=optimize))
            lowest = min(lowest, ratio)
            if ratio < RIGHT:
                wrong += 1
                print(f"{name}: {ratio:.1f} dB with optimizations {'on' if optimize else 'off'}")
    counts = ", ".join(f"{sum(entry['kind'] == kind for entry in entries)} {kind}s" for kind in kinds)
    print(
        f"{platform.machine()}, onnxruntime {onnxruntime.__version__}: {counts} compared, {wrong} wrong, "
        f"{absent} absent from this release; networks within {lowest:.1f} dB"
    )
    return 1 if wrong or not entries else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
