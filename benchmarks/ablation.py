#!/usr/bin/env python3
"""What each pass is worth: every model of a corpus quantized with all passes, then with one of them left out at a time.

    python benchmarks/ablation.py --corpus DIR --config ort-int8 --effort balanced

Rows are passes, columns models; a cell is the metric and the SQNR of the file without that pass, and how far the SQNR
falls (-) or rises (+) from that with all passes. Passes that change nothing in any model are left out and named below.
The corpus is laid out as for corpus.py. A pass that a model cannot do without (it then cannot be quantized) says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from corpus import calibration, evaluate
from measure import onnxq, run, table

PREPARATION = (
    "constants", "dead", "activations", "layernorm", "residual", "prelu", "pool", "pad", "batchnorm", "scalars",
)  # fmt: skip
ACCURACY = ("equalize", "smooth", "sweep")


def quantized(name: str, skip: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one model without one pass ("" leaves none out); {"error"} where there is no file."""
    source = args.corpus / "models" / f"{name}.onnx"
    data = calibration(args.corpus, name, args.out, args.samples)
    target = args.out / f"{name}.{skip or 'all'}.onnx"
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "ablation.yaml"
        config.write_text(f"extends: {args.config}\neffort: {args.effort}\nskip: [{skip}]\n", encoding="utf-8")
        made = run(
            onnxq("quantize", source, "--data", data, "-o", target, "--config", config, "--force", "--no-latency")
        )
    if made.code:
        return {"error": made.last_line}
    options = ["--no-optimize"] if args.config.startswith("trt") else []
    found = evaluate(args.corpus, name, target, *options)
    return {**found, "seconds": made.seconds}


def cell(found: dict[str, Any], whole: dict[str, Any]) -> str:
    """Metric / SQNR (difference), or what went wrong."""
    if "error" in found or "error" in whole:
        return found.get("error", "")[:60] or "-"
    change = found["sqnr_db"] - whole["sqnr_db"]
    moved = f" ({change:+.1f})" if found is not whole and abs(change) >= 0.05 else ""
    return f"{found['main']:.4f} / {found['sqnr_db']:.1f}{moved}"


def main() -> None:
    """All models without each pass in turn, one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--models", nargs="*", help="only these (default: all of models/)")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--config", default="ort-int8", help="preset or file")
    parser.add_argument("--effort", default="balanced", choices=["fast", "balanced", "high"])
    parser.add_argument("--passes", nargs="*", default=[*ACCURACY, *PREPARATION])
    parser.add_argument("--out", type=Path, default=Path("out/ablation"))
    args = parser.parse_args()
    args.corpus, args.out = args.corpus.resolve(), args.out.resolve()
    if Path(args.config).is_file():
        args.config = str(Path(args.config).resolve())
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.models or sorted(path.stem for path in (args.corpus / "models").glob("*.onnx"))
    whole = {name: quantized(name, "", args) for name in names}
    rows = [["all passes", *(cell(whole[name], whole[name]) for name in names)]]
    idle = []
    for skip in args.passes:
        found = {name: quantized(name, skip, args) for name in names}
        print(json.dumps({skip: {n: f.get("sqnr_db", f.get("error")) for n, f in found.items()}}), file=sys.stderr)
        figures = [(f.get("main"), f.get("sqnr_db")) for f in found.values()]
        if figures == [(f.get("main"), f.get("sqnr_db")) for f in whole.values()]:
            idle.append(skip)
        else:
            rows.append([f"without {skip}", *(cell(found[name], whole[name]) for name in names)])
    text = table(rows, [f"{args.config}, {args.effort}", *names])
    if idle:
        text += f"\n\nWithout effect here: {', '.join(idle)}."
    (args.out / "ablation.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
