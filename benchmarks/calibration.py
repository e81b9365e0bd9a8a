#!/usr/bin/env python3
"""The cost of calibration alone: onnxq beside onnxruntime.quantization's calibrator, same model, tensors and samples.

    python benchmarks/calibration.py MODEL.onnx DATA.npz [--samples 32] [--method percentile] [--rounds 3]

The model first goes through the peer's own preprocessing, and the peer says which tensors it calibrates; onnxq then
observes the same ones. Every measurement is a child of its own, the two tools in turn; seconds and peak memory are the
whole child's, Python's start and imports included. DATA holds one array [N, ...] per model input.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from measure import Run, run, table

PEER_METHODS = {"percentile": "Percentile", "entropy": "Entropy", "minmax": "MinMax"}
# What quantize_static quantizes by default.
_EXCLUDED_BY_PEER = ("If", "Loop", "Scan")


def prepare(source: str, folder: str) -> None:
    """Child: the peer's preprocessing, and the names of the tensors it would calibrate."""
    import onnx
    from onnxruntime.quantization.calibrate import CalibraterBase
    from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready = f"{folder}/model.onnx"
    try:
        quant_pre_process(source, ready)
    # It raises plain Exception where its symbolic shape inference gives up.
    except Exception as error:
        print(f"the peer's symbolic shape inference failed ({error}); prepared without it")
        quant_pre_process(source, ready, skip_symbolic_shape=True)
    ops = sorted({*QDQRegistry, *QLinearOpsRegistry} - {*_EXCLUDED_BY_PEER})
    tensors, _ = CalibraterBase(ready, ops).select_tensors_to_calibrate(onnx.load(ready))
    Path(folder, "choice.json").write_text(json.dumps({"ops": ops, "tensors": sorted(tensors)}))


def samples_of(model: str, data: str, count: int) -> list[dict[str, object]]:
    """One feed for each sample, batch 1, in float32 where the file holds float16."""
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    inputs = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).get_inputs()
    arrays = {}
    with np.load(data) as archive:
        for value in inputs:
            found = archive[value.name][:count]
            arrays[value.name] = found.astype(np.float32) if found.dtype == np.float16 else found
    ranks = {value.name: len(value.shape) for value in inputs}
    return [
        {
            name: array[k] if array.ndim > ranks[name] else array[k : k + 1]
            for name, array in arrays.items()
        }
        for k in range(len(next(iter(arrays.values()))))
    ]


def peer(folder: str, data: str, method: str, count: int) -> None:
    """Child: onnxruntime.quantization's calibrator."""
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rows = iter(samples_of(model, data, count))

        def get_next(self) -> object:
            return next(self.rows, None)

    model = f"{folder}/model.onnx"
    ops = json.loads(Path(folder, "choice.json").read_text())["ops"]
    calibrator = create_calibrator(
        model,
        ops,
        f"{folder}/augmented.onnx",
        getattr(CalibrationMethod, PEER_METHODS[method]),
        extra_options={"symmetric": False},
    )
    calibrator.collect_data(Reader())
    ranges = calibrator.compute_data()
    told = {
        name: [float(end) for end in (one.range_value[0], one.range_value[1])]
        for name, one in ranges.items()
    }
    Path(folder, "peer.json").write_text(json.dumps(told))


def ours(folder: str, data: str, method: str, count: int) -> None:
    """Child: onnxq, from the file to the plan's numbers."""
    from onnxq.calibrate import calibrate
    from onnxq.config import DataConfig
    from onnxq.data import load_data
    from onnxq.graph import GraphIndex, infer_shapes, load_model, name_nodes
    from onnxq.plan import Plan, SitePlan
    from onnxq.sites import Role, TensorId
    from onnxq.spec import ObserverSpec, QuantSpec

    proto = infer_shapes(name_nodes(load_model(f"{folder}/model.onnx").proto))
    index = GraphIndex(proto)
    spec = QuantSpec(signed=False, symmetric=False)
    tensors = json.loads(Path(folder, "choice.json").read_text())["tensors"]
    sites = tuple(
        SitePlan(
            site=TensorId(name), role=Role.ACTIVATION, spec=spec, observer=ObserverSpec(method)
        )
        for name in tensors
    )
    dataset = load_data(data, index.inputs, DataConfig(samples=count))
    plan = calibrate(
        proto, Plan(target="ort", model="", topology="", weights="", sites=sites), dataset
    )
    told = {}
    for site in plan.sites:
        if site.qparams is not None:
            scale, zero = float(site.qparams.scale), int(site.qparams.zero_point)
            told[str(site.site)] = [-zero * scale, (255 - zero) * scale]
    Path(folder, "ours.json").write_text(json.dumps(told))


CHILDREN = {"prepare": prepare, "peer": peer, "ours": ours}


def child(name: str, *arguments: str) -> Run:
    """Run one of CHILDREN in a fresh interpreter."""
    return run([sys.executable, __file__, "--child", name, *arguments]).checked(name)


def agreement(folder: Path) -> str:
    """How alike the two tools' ranges are: median and smallest ratio of widths."""
    ranges = [json.loads((folder / f"{name}.json").read_text()) for name in ("ours", "peer")]
    both = [(ranges[0][name], ranges[1][name]) for name in ranges[0] if name in ranges[1]]
    widths = [((a[1] - a[0]), (max(b[1], 0) - min(b[0], 0))) for a, b in both]
    ratios = sorted(min(a, b) / max(a, b) for a, b in widths if max(a, b) > 0)
    return f"{len(both)} tensors in both; widths agree to {median(ratios):.3f} (median), {ratios[0]:.3f} (least)"


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--child"]:
        name, *arguments = sys.argv[2:]
        parsed: list[object] = [int(one) if one.isdigit() else one for one in arguments]
        CHILDREN[name](*parsed)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--method", choices=sorted(PEER_METHODS), default="percentile")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnxq-benchmark-") as name:
        child("prepare", str(args.model), name)
        found: dict[str, list[Run]] = {"ours": [], "peer": []}
        for k in range(args.rounds):
            for tool in ("ours", "peer") if k % 2 == 0 else ("peer", "ours"):
                found[tool].append(
                    child(tool, name, str(args.data), args.method, str(args.samples))
                )
        agreed = agreement(Path(name))
    label = {"ours": "onnxq", "peer": "onnxruntime.quantization"}
    rows = [
        [
            label[tool],
            f"{median(one.seconds for one in runs):.2f}",
            f"{median(one.peak_mb for one in runs):.0f}",
        ]
        for tool, runs in found.items()
    ]
    ratios = [
        f"{median(p.seconds / o.seconds for o, p in zip(found['ours'], found['peer'], strict=True)):.2f}×",
        f"{median(p.peak_mb / o.peak_mb for o, p in zip(found['ours'], found['peer'], strict=True)):.2f}×",
    ]
    print(
        f"{args.model.name}, {args.samples} samples, {args.method}, median of {args.rounds} interleaved rounds\n"
    )
    print(table([*rows, ["peer ÷ onnxq", *ratios]], ["calibration", "seconds", "peak MB"]))
    print(f"\n{agreed}")


if __name__ == "__main__":
    main()
