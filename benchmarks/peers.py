#!/usr/bin/env python3
"""onnxq beside onnxruntime.quantization on one corpus model, same samples, one run: metric, SQNR, seconds, peak memory.

    python benchmarks/peers.py --corpus DIR efficientnet_lite0 --samples 32 --methods percentile

The peer is quantize_static after its own preprocessing: QDQ, per-channel int8 weights, activations int8 asymmetric
(and symmetric with --symmetric). Every tool runs in a child of its own, one after the other; onnxq checks its result
as always but does not time it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from corpus import calibration, evaluate
from measure import Run, onnxq, run, table

PRESETS = {
    "minmax": "ort-int8",
    "percentile": "ort-int8-percentile",
    "entropy": "ort-int8-entropy",
    "mse": "ort-int8-mse",
}
PEER_METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}


def quantize_static(source: str, data: str, target: str, method: str, symmetric: bool) -> None:
    """The peer itself; runs in a child, so its imports and its memory are its own."""
    import numpy as np
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    os.chdir(Path(target).parent)  # its shape inference leaves a file in the working folder when it gives up
    ready = f"{target}.pre.onnx"
    try:
        quant_pre_process(source, ready)
    except Exception:  # its symbolic shape inference does not know every operator; its own advice is to skip it
        quant_pre_process(source, ready, skip_symbolic_shape=True)
    session = ort.InferenceSession(source, providers=["CPUExecutionProvider"])
    ranks = {value.name: len(value.shape) for value in session.get_inputs()}
    arrays = dict(np.load(data))
    del session

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.at = 0

        def get_next(self) -> dict[str, np.ndarray] | None:
            i, self.at = self.at, self.at + 1
            if i >= len(next(iter(arrays.values()))):
                return None
            return {name: a[i] if a.ndim == ranks[name] + 1 else a[i : i + 1] for name, a in arrays.items()}

    static(
        ready,
        target,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=getattr(CalibrationMethod, PEER_METHODS[method]),
        extra_options={"ActivationSymmetric": symmetric},
    )
    Path(ready).unlink()


def row(tool: str, made: Run, target: Path, args: argparse.Namespace) -> list[str]:
    """One line of the table; a tool that failed, or whose file cannot be run, says so."""
    cost = [f"{made.seconds:.1f}", f"{made.peak_mb:.0f}"]
    if made.code:
        return [tool, "failed", made.last_line[:80], *cost]
    checked = run([sys.executable, args.corpus / "evaluate.py", args.model, target])
    if checked.code:
        return [tool, "refused", checked.last_line[:80], *cost]
    found = json.loads(checked.last_line)
    return [tool, f"{found['main']:.4f}", f"{found['sqnr_db']:.1f}", *cost]


def main() -> None:
    """Both tools, every method, one table."""
    if sys.argv[1:2] == ["--child"]:
        quantize_static(*sys.argv[2:6], symmetric=sys.argv[6] == "symmetric")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="NAME of models/NAME.onnx")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--methods", nargs="+", choices=sorted(PRESETS), default=["minmax", "percentile"])
    parser.add_argument("--symmetric", action="store_true", help="the peer's symmetric activations as well")
    parser.add_argument("--out", type=Path, default=Path("out/peers"))
    args = parser.parse_args()
    args.corpus, args.out = args.corpus.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    source = args.corpus / "models" / f"{args.model}.onnx"
    data = calibration(args.corpus, args.model, args.out, args.samples)
    rows = [["float", f"{evaluate(args.corpus, args.model)['main']:.4f}", "", "", ""]]
    options = ["--force", "--no-latency"]  # the peer times nothing
    for method in args.methods:
        target = args.out / f"{args.model}.onnxq-{method}.onnx"
        made = run(onnxq("quantize", source, "--data", data, "-o", target, "--config", PRESETS[method], *options))
        rows.append(row(f"onnxq {method}", made, target, args))
        for kind in ("asymmetric", "symmetric")[: 2 if args.symmetric else 1] if method in PEER_METHODS else ():
            target = args.out / f"{args.model}.ort-{method}-{kind}.onnx"
            made = run([sys.executable, Path(__file__).resolve(), "--child", source, data, target, method, kind])
            rows.append(row(f"onnxruntime {method}, {kind} int8", made, target, args))
    print(table(rows, [args.model, "metric", "SQNR dB", "seconds", "peak MB"]))


if __name__ == "__main__":
    main()
