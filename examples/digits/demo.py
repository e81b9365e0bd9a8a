#!/usr/bin/env python3
"""Quantize the digit classifier and compare: size, accuracy on unseen digits, latency. Run by `make demo`.

The same from the shell, from the repository's root:

    onnxq quantize examples/digits/digits.onnx --data examples/digits/digits.npz -o out/digits.q.onnx
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

import onnxq
from onnxq.report.live import show_progress
from onnxq.runtime import time_models

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "out"


@dataclass(frozen=True)
class Row:
    """One model of the table. size: kB. accuracy: share of digits read right. milliseconds: for one image."""

    name: str
    size: int
    accuracy: float
    milliseconds: float


def score(model: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of images [N, 1, 16, 16] whose largest logit is their label."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return float((session.run(["logits"], {"image": images})[0].argmax(1) == labels).mean())


def compare(
    models: Mapping[str, Path], images: np.ndarray, labels: np.ndarray, *, seconds: float = 8.0
) -> list[Row]:
    """A row for each model, the first of which the others are measured against; `seconds` of timing at most."""
    times = time_models(models, {"image": images[:1]}, threads=1, seconds=seconds)
    first = times[next(iter(models))]
    return [
        # Not its own median: rounds are compared one by one, so that a busy moment, which hits both, does not count.
        Row(name, round(path.stat().st_size / 1e3), score(path, images, labels),
            round(first.median_ms / times[name].speedup(first), 3))
        for name, path in models.items()
    ]  # fmt: skip


def describe(before: Row, after: Row, count: int) -> str:
    """The table of two models and a sentence made from the numbers in it. count: digits the accuracy is of."""
    lines = [
        f"{'':8}  {'size':>8}  {'accuracy':>8}  {'latency':>9}   ({count} unseen digits; one image, one thread)"
    ]
    for row in (before, after):
        lines.append(
            f"{row.name:8}  {row.size:5} kB  {row.accuracy:8.1%}  {row.milliseconds:6.3f} ms"
        )
    smaller = before.size / after.size
    # The least that the table can show.
    speedup = before.milliseconds / max(after.milliseconds, 0.001)
    said = f"{speedup:.2f}x as fast" if speedup >= 1 else f"SLOWER here: {speedup:.2f}x as fast"
    return "\n".join([*lines, "", f"{after.name} is {smaller:.1f}x smaller and {said}."])


def main() -> None:
    """Quantize with the default preset, then print one row per model."""
    source, target = HERE / "digits.onnx", OUT / "digits.q.onnx"
    print(f"quantizing {source.name} with the samples in digits.npz …", flush=True)
    with show_progress("quantizing", source) as progress:
        result = onnxq.quantize(
            source, HERE / "digits.npz", overrides={"latency": False}, progress=progress
        )
    OUT.mkdir(exist_ok=True)
    result.save(target, force=True)

    held_back = np.load(HERE / "digits_eval.npz")
    images, labels = held_back["image"], held_back["label"]
    print(f"reading {len(images)} digits with both models, and timing them …\n", flush=True)
    before, after = compare({"float32": source, "int8": target}, images, labels)
    print(describe(before, after, len(images)))
    print(
        f"Written: {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}"
    )


if __name__ == "__main__":
    main()
