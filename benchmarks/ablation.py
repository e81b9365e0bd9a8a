#!/usr/bin/env python3
"""The worth of each pass: models quantized with everything on, then with one pass left out at a time, per target.

    python benchmarks/ablation.py --corpus DIR fmnist_resnet_imbalanced:64 efficientnet_lite0 --targets ort trt
    python benchmarks/ablation.py net.onnx=samples.npz --targets ort --weight-bits-budget 4.9

A model is NAME (or NAME:SAMPLES) of a corpus, or MODEL.onnx=DATA.npz, whose SQNR is the one that `onnxq quantize`
reports on samples it held back. No model named: all of the corpus. Rows are passes, columns models; a cell is metric /
SQNR, how far the SQNR falls (-) or rises (+) without the pass, and the seconds of the whole command. Passes that change
nothing in any model are named below the table. TensorRT's files are scored with ORT's optimizations off: what they say.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measure import Run, table
from subjects import Score, Subject, held_back, subject

ACCURACY = (
    "cross_layer_equalization",
    "smoothquant",
    "ranges",
    "sensitive_ops",
    "rounding",
    "promotion",
)
# Worth leaving out only where weights may have few bits: with a budget, or a configuration of one's own.
FEW_BITS = ("augmented_samples",)
BUDGET = ("weight_bits",)
PREPARATION = (
    "constants", "dead", "activations", "layernorm", "residual", "prelu", "pool", "pad", "batchnorm", "scalars",
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One file: its figures, and what making it took."""

    score: Score
    made: Run

    @property
    def figures(self) -> tuple[float | None, float | None, str]:
        """The parts that tell two files apart."""
        return self.score.metric, self.score.sqnr, self.score.error


def trial(one: Subject, target: str, skip: str, args: argparse.Namespace) -> Trial:
    """One model for one target without one pass ("" leaves none out)."""
    file = args.out / f"{one.name}.{target}.{skip or 'all'}.onnx"
    config = args.config or f"{target}-int8"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ablation.yaml"
        path.write_text(
            f"extends: {config}\neffort: {args.effort}\nskip: [{skip}]\n", encoding="utf-8"
        )
        budget = (
            ["--weight-bits-budget", args.weight_bits_budget] if args.weight_bits_budget else []
        )
        made, report = one.quantized(file, "--config", path, *budget)
    if made.code:
        return Trial(Score(error=made.last_line), made)
    if one.corpus is None:
        return Trial(Score(sqnr=held_back(report)), made)
    return Trial(one.score(file, optimize=target == "ort"), made)


def cell(found: Trial, whole: Trial) -> str:
    """Metric / SQNR (difference), seconds; or what went wrong."""
    moved = ""
    if found is not whole and found.score.sqnr is not None and whole.score.sqnr is not None:
        change = found.score.sqnr - whole.score.sqnr
        moved = f" ({change:+.1f})" if abs(change) >= 0.05 else ""
    return f"{found.score}{moved}, {found.made.seconds:.1f} s"


def measured(
    subjects: list[Subject], target: str, passes: list[str], args: argparse.Namespace
) -> str:
    """One target's table."""

    def row(skip: str) -> list[Trial]:
        found = [trial(one, target, skip, args) for one in subjects]
        said = {
            one.name: f"{each.score}, {each.made.seconds:.1f} s"
            for one, each in zip(subjects, found, strict=True)
        }
        print(
            json.dumps({f"{target} without {skip or 'nothing'}": said}), file=sys.stderr, flush=True
        )
        return found

    whole = row("")
    rows, idle = [["everything on", *map(cell, whole, whole)]], []
    for skip in passes:
        found = row(skip)
        if [each.figures for each in found] == [each.figures for each in whole]:
            idle.append(skip)
        else:
            rows.append([f"without {skip}", *map(cell, found, whole)])
    text = table(
        rows, [f"{args.config or f'{target}-int8'}, {args.effort}", *(one.name for one in subjects)]
    )
    return text + (f"\n\nWithout effect here: {', '.join(idle)}." if idle else "")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", help="NAME, NAME:SAMPLES or MODEL.onnx=DATA.npz (default: the corpus)"
    )
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--targets", nargs="+", default=["ort", "trt"])
    parser.add_argument("--config", default="", help="preset or file (default: TARGET-int8)")
    parser.add_argument("--effort", default="balanced", choices=["fast", "balanced", "high"])
    parser.add_argument(
        "--passes",
        nargs="*",
        help=f"default: {', '.join(ACCURACY)}; with --config augmented_samples too, with a budget weight_bits",
    )
    parser.add_argument("--preparation", action="store_true", help="the passes before planning too")
    parser.add_argument("--weight-bits-budget", default="", metavar="BITS")
    parser.add_argument("--out", type=Path, default=Path("out/ablation"))
    args = parser.parse_args()
    args.corpus, args.out = args.corpus and args.corpus.resolve(), args.out.resolve()
    if Path(args.config).is_file():
        args.config = str(Path(args.config).resolve())
    if not args.models and args.corpus:
        args.models = sorted(path.stem for path in (args.corpus / "models").glob("*.onnx"))
    if not args.models:
        parser.error("name models, or a corpus")
    return args


def main() -> None:
    """One Markdown table a target; they go to the output folder too."""
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    subjects = [subject(item, args.corpus, args.out, args.samples) for item in args.models]
    few = FEW_BITS if args.config or args.weight_bits_budget else ()
    passes = list(args.passes or (*ACCURACY, *few, *(BUDGET if args.weight_bits_budget else ())))
    passes += PREPARATION if args.preparation else ()
    parts = [measured(subjects, target, passes, args) for target in args.targets]
    (args.out / "ablation.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
