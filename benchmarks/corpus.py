#!/usr/bin/env python3
"""Quantize every model of a corpus with one preset; measure quality, cost and paired latency; print a Markdown table.

    python benchmarks/corpus.py --corpus DIR --samples 64 --length minilm_l6_fp16w=96 --out out/corpus

A corpus is a folder with
    models/NAME.onnx
    evaluate.py --calib NAME OUT.npz --samples N     writes calibration inputs, one array per model input
    evaluate.py NAME [MODEL.onnx]                    prints {"main": …, "sqnr_db": …} as its last line

Everything runs in children, one after the other: `onnxq quantize` as a person runs it, the metric, then float and
int8 interleaved in one process (batch 1). Seconds and peak memory are those of the whole `onnxq quantize` command.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measure import onnxq, run, table

HERE = Path(__file__).resolve().parent
HEAD = [
    "model",
    "float",
    "int8",
    "SQNR dB",
    "float ms",
    "int8 ms",
    "speed",
    "range",
    "size MB",
    "smaller",
    "seconds",
    "peak MB",
]


def evaluate(corpus: Path, *arguments: str | Path) -> dict[str, Any]:
    """The metrics the corpus prints for a model."""
    done = run([sys.executable, corpus / "evaluate.py", *arguments]).checked("evaluate.py")
    return dict(json.loads(done.last_line))


def calibration(corpus: Path, name: str, out: Path, samples: int) -> Path:
    """Calibration inputs of one model, written once per number of samples."""
    path = out / f"{name}.calib{samples}.npz"
    if not path.exists():
        command = [
            sys.executable,
            corpus / "evaluate.py",
            "--calib",
            name,
            path,
            "--samples",
            str(samples),
        ]
        run(command).checked("evaluate.py --calib")
    return path


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one model; {"name", "error"} when onnxq gave none."""
    source = args.corpus / "models" / f"{name}.onnx"
    data = calibration(args.corpus, name, args.out, args.samples)
    target = args.out / f"{name}.q.onnx"
    options = ["--config", args.config, "--force", *args.options]
    made = run(onnxq("quantize", source, "--data", data, "-o", target, *options))
    (args.out / f"{name}.log").write_text(made.output, encoding="utf-8")
    if made.code:
        return {
            "name": name,
            "error": made.output.strip().splitlines()[-1] if made.output.strip() else "no output",
        }
    before, after = evaluate(args.corpus, name), evaluate(args.corpus, name, target)
    command = [
        sys.executable,
        HERE / "latency.py",
        f"float={source}",
        f"int8={target}",
        "--data",
        data,
        "--json",
    ]
    command += [
        "--threads",
        str(args.threads),
        "--rounds",
        str(args.rounds),
        "--blocks",
        str(args.blocks),
    ]
    if name in args.length:
        command += ["--length", str(args.length[name])]
    timed = {row["name"]: row for row in json.loads(run(command).checked("latency.py").last_line)}
    return {
        "name": name,
        "float": before["main"],
        "int8": after["main"],
        "sqnr_db": after["sqnr_db"],
        "float_ms": timed["float"]["median_ms"],
        "int8_ms": timed["int8"]["median_ms"],
        "ratio": timed["int8"]["ratio"],
        "range": [timed["int8"]["ratio_low"], timed["int8"]["ratio_high"]],
        "size_mb": [source.stat().st_size / 1e6, target.stat().st_size / 1e6],
        "seconds": made.seconds,
        "peak_mb": made.peak_mb,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    if "error" in row:
        return [row["name"], row["error"], *[""] * (len(HEAD) - 2)]
    before, after = row["size_mb"]
    return [
        row["name"],
        f"{row['float']:.4f}",
        f"{row['int8']:.4f}",
        f"{row['sqnr_db']:.1f}",
        f"{row['float_ms']:.3f}",
        f"{row['int8_ms']:.3f}",
        f"{row['ratio']:.2f}x",
        "{:.2f}-{:.2f}".format(*row["range"]),
        f"{before:.1f} -> {after:.1f}",
        f"{before / after:.1f}x",
        f"{row['seconds']:.1f}",
        f"{row['peak_mb']:.0f}",
    ]


def parse() -> argparse.Namespace:
    """The command line; what follows `--` goes to `onnxq quantize` as it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--models", nargs="*", help="only these (default: all of models/)")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--config", default="ort-int8", help="preset or file")
    parser.add_argument(
        "--length",
        action="append",
        default=[],
        metavar="NAME=N",
        help="sequence length for latency",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/corpus"))
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    args.options = options
    args.length = {name: int(n) for name, _, n in (item.partition("=") for item in args.length)}
    args.models = args.models or sorted(
        path.stem for path in (args.corpus / "models").glob("*.onnx")
    )
    if not args.models:
        parser.error(f"no models in {args.corpus / 'models'}")
    return args


def main() -> None:
    """Measure model by model; the table and the JSON behind it go to the output folder too."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.models:
        rows.append(measure(name, args))
        print(" ".join(cells(rows[-1])), file=sys.stderr, flush=True)
    text = table([cells(row) for row in rows], HEAD)
    (args.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (args.out / "results.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
