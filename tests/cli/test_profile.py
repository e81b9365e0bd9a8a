"""onnxq profile: the text of its figures."""

from pathlib import Path

import numpy as np
import onnx

from tests.cli.kit import run
from tests.codes.kit import gemm


def test_one_sample_is_one_sample(tmp_path: Path) -> None:
    onnx.save(gemm(64, 64), tmp_path / "m.onnx")
    name = onnx.load(tmp_path / "m.onnx").graph.input[0].name
    np.savez(tmp_path / "x.npz", **{name: np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)})
    args = ["profile", tmp_path / "m.onnx", "--data", tmp_path / "x.npz", "--by", "site"]
    shown = {count: run(*args, "--samples", count).stdout for count in (1, 2)}
    assert "with everything quantized, 1 sample\n" in shown[1]
    assert "with everything quantized, 2 samples\n" in shown[2]
