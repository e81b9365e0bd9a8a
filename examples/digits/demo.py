#!/usr/bin/env python3
"""Quantize the digit classifier and compare: size, accuracy on unseen digits, latency. Run by `make demo`.

The same from the shell, from the repository's root:

    onnxq quantize examples/digits/digits.onnx --data examples/digits/digits.npz -o out/digits.q.onnx
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

import onnxq
from onnxq.runtime import latency

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "out"


def accuracy(model: Path, images: np.ndarray, labels: np.ndarray) -> float:
    """Share of images [N, 1, 16, 16] whose largest logit is their label."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return float((session.run(["logits"], {"image": images})[0].argmax(1) == labels).mean())


def main() -> None:
    """Quantize with the default preset, then print one row per model."""
    source, target = HERE / "digits.onnx", OUT / "digits.q.onnx"
    result = onnxq.quantize(source, HERE / "digits.npz")
    OUT.mkdir(exist_ok=True)
    result.save(target, overwrite=True)

    held_back = np.load(HERE / "digits_eval.npz")
    images, labels = held_back["image"], held_back["label"]
    models = {"float32": source, "int8": target}
    times = latency(models, {"image": images[:1]}, threads=1)
    print(
        f"\n{'':8}  {'size':>8}  {'accuracy':>8}  {'latency':>9}   ({len(images)} unseen digits; one image, one thread)"
    )
    for name, path in models.items():
        right, ms = accuracy(path, images, labels), times[name].median_ms
        print(f"{name:8}  {path.stat().st_size / 1e3:5.0f} kB  {right:8.1%}  {ms:6.3f} ms")
    smaller = source.stat().st_size / target.stat().st_size
    print(f"\nint8 is {smaller:.1f}x smaller and {times['int8'].speedup(times['float32']):.2f}x as fast.")
    print(f"Written: {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")


if __name__ == "__main__":
    main()
