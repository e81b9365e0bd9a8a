"""The subjects of `peers.py` and `ablation.py`: a model, its samples, and who scores what became of it.

NAME or NAME:SAMPLES     a model of the corpus, scored by its evaluate.py
MODEL.onnx=DATA.npz      any model; its score is the SQNR that `onnxq quantize` reports on samples it held back
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import calibration
from measure import Run, onnxq, run


def brief(text: str, length: int = 120) -> str:
    """Both ends of a long line, fit for a cell of a table: engines say what first and why last."""
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[: length // 3]} … {text[-2 * length // 3 :]}"


@dataclass(frozen=True)
class Score:
    """metric: the corpus's, higher is better; None without a scorer. sqnr: dB against float. error: why neither."""

    metric: float | None = None
    sqnr: float | None = None
    error: str = ""

    def __str__(self) -> str:
        if self.error:
            return brief(self.error, 80)
        figures = [] if self.metric is None else [f"{self.metric:.4f}"]
        return " / ".join([*figures, "-" if self.sqnr is None else f"{self.sqnr:.1f}"])


@dataclass(frozen=True)
class Subject:
    """One model with its samples; corpus: the folder with its scorer."""

    name: str
    source: Path
    data: Path
    corpus: Path | None

    def score(
        self, target: Path | None = None, *, optimize: bool = True, prefix: Sequence[str] = ()
    ) -> Score:
        """The scorer's figures for a file, or for the float model; without a scorer there are none.

        prefix: a command that runs the scorer.
        """
        if self.corpus is None:
            return Score()
        command: list[str | Path] = [
            *prefix,
            sys.executable,
            self.corpus / "evaluate.py",
            self.name,
        ]
        done = run(
            [
                *command,
                *([] if target is None else [target]),
                *([] if optimize else ["--no-optimize"]),
            ]
        )
        if done.code:
            return Score(error=f"refused: {done.last_line}")
        found = json.loads(done.last_line)
        return Score(found["main"], found.get("sqnr_db"))

    def quantized(self, target: Path, *options: str | Path) -> tuple[Run, dict[str, Any]]:
        """One `onnxq quantize` to `target`, and its report; {} if it failed. `--no-data` among options: no samples."""
        data = () if "--no-data" in options else ("--data", self.data)
        options = tuple(each for each in options if each != "--no-data")
        made = run(
            onnxq("quantize", self.source, *data, "-o", target, "--force", "--no-latency", "--json",
                  *options)
        )  # fmt: skip
        return made, {} if made.code else report_in(made.output)


def subject(item: str, corpus: Path | None, out: Path, count: int) -> Subject:
    """The subject that one argument names; ends the program if it names nothing."""
    if "=" in item:
        source, _, data = item.partition("=")
        return Subject(Path(source).stem, Path(source).resolve(), Path(data).resolve(), None)
    name, _, own = item.partition(":")
    if corpus is None:
        sys.exit(f"{item}: give --corpus DIR, or MODEL.onnx=DATA.npz")
    data = calibration(corpus, name, out, int(own or count))
    return Subject(name, corpus / "models" / f"{name}.onnx", data, corpus)


def report_in(output: str) -> dict[str, Any]:
    """The JSON document among lines of progress."""
    start = output.find("\n{") + 1 if not output.startswith("{") else 0
    return dict(json.JSONDecoder().raw_decode(output, start)[0])


def held_back(report: dict[str, Any]) -> float | None:
    """The worst output's SQNR on the samples that the report is about, with ORT's optimizations where they can."""
    found = [check["sqnr_db"][1 if check["optimized"] else 0] for check in report.get("checks", ())]
    known = [float(each) for each in found if each is not None]
    return min(known) if known else None


def repeat(data: str, count: str, target: str) -> None:
    """Child: `count` samples out of fewer: again and again, floats with 1 % of noise."""
    import numpy as np

    rng = np.random.default_rng(0)
    made = {}
    for name, values in np.load(data).items():
        more = np.resize(values, (int(count), *values.shape[1:]))
        if np.issubdtype(more.dtype, np.floating):
            noise = rng.standard_normal(more.shape, dtype=np.float32) * (0.01 * values.std())
            noise[: len(values)] = 0
            more = (more + noise).astype(values.dtype)
        made[name] = more
    np.savez(target, **made)


if __name__ == "__main__":
    repeat(*sys.argv[1:4])
