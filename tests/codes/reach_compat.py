"""W130, W135, W136: calls of other tools' functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxq import compat
from tests.codes.kit import gemm, reach, rows


@reach("W130")
def dedicated_pairs(folder: Path):
    with pytest.warns(compat.CompatWarning) as caught:
        compat.quantize_static(
            gemm(64, 64), folder / "q.onnx", rows(8, 64), op_types_to_quantize=["Gemm"],
            extra_options={"DedicatedQDQPair": True},
        )  # fmt: skip
    return [one.message for one in caught]


@reach("W135")
def nothing_pays(folder: Path):
    with pytest.warns(compat.CompatWarning) as caught:
        compat.quantize_static(gemm(), folder / "q.onnx", rows(8, 4))
    return [one.message for one in caught]


@reach("W136")
def forced(folder: Path):
    with pytest.warns(compat.CompatWarning) as caught:
        compat.quantize_static(gemm(), folder / "q.onnx", rows(8, 4), op_types_to_quantize=["Gemm"])
    return [one.message for one in caught]
