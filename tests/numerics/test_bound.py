"""What `bound` is for: ONNX Runtime runs Conv -> Clip -> Q in int8 only where it can drop the Clip.

It drops it where the Clip's ends quantize to qmin and qmax, so that saturation does the Clip's work. `bound` asks for
more: every level inside the Clip. ONNX Runtime up to 1.30 refuses to load a model that has the first without the second
("Invalid model. Node input 'xd' is not a graph input, …"), which a two-sided Clip with a free scale runs into.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxq.numerics import qparams_from_range, quantize
from onnxq.spec import QParams, QuantSpec

UINT8 = QuantSpec(signed=False, symmetric=False)


def _kernels(low: float, high: float, numbers: QParams, path: Path) -> set[str]:
    """Operators of ONNX Runtime's optimized form of DQ -> Conv -> Clip(low, high) -> Q."""
    weight = np.random.default_rng(0).integers(-127, 127, (8, 8, 1, 1)).astype(np.int8)
    floats = {"lo": low, "hi": high, "s": numbers.scale, "xs": 0.05, "ws": 0.01}
    constants: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in floats.items()}
    constants |= {"z": numbers.zero_point.astype(np.uint8), "xz": np.asarray(0, np.uint8)}
    constants |= {"w": weight, "wz": np.asarray(0, np.int8)}
    chain = [
        ("QuantizeLinear", "x xs xz", "xq"),
        ("DequantizeLinear", "xq xs xz", "xd"),
        ("DequantizeLinear", "w ws wz", "wd"),
        ("Conv", "xd wd", "v"),
        ("Clip", "v lo hi", "c"),
        ("QuantizeLinear", "c s z", "q"),
        ("DequantizeLinear", "q s z", "y"),
    ]
    graph = helper.make_graph(
        [helper.make_node(op, inputs.split(), [output]) for op, inputs, output in chain],
        "clipped",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 6, 6])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {node.op_type for node in onnx.load(path).graph.node}


def _fused(low: float, high: float, numbers: QParams, folder: Path) -> bool:
    kernels = _kernels(low, high, numbers, folder / "optimized.onnx")
    assert ("QLinearConv" in kernels) != bool(kernels & {"Clip", "Conv", "FusedConv"})
    return "QLinearConv" in kernels


@pytest.mark.parametrize("high", [6.0, 1.0, 0.1, 3.3, 1000.0])
def test_a_relu6_fuses(high: float, tmp_path: Path) -> None:
    assert _fused(0.0, high, qparams_from_range(0.0, high, UINT8, bound=(0.0, high)), tmp_path)


def test_every_clip_fuses_with_its_bound_whatever_was_seen(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        low, high = float(np.float32(-np.exp(rng.uniform(-2, 2)))), float(np.float32(np.exp(rng.uniform(-2, 2))))
        seen = rng.uniform(0.3, 1.0, 2)
        numbers = qparams_from_range(low * seen[0], high * seen[1], UINT8, bound=(low, high))
        assert _fused(low, high, numbers, tmp_path), (low, high, seen)


def test_without_its_bound_a_clip_may_keep_the_conv_float(tmp_path: Path) -> None:
    assert not _fused(-1.0, 1.0, qparams_from_range(-1.0, 1.0, UINT8), tmp_path)
    assert _fused(-1.0, 1.0, qparams_from_range(-1.0, 1.0, UINT8, bound=(-1.0, 1.0)), tmp_path)


@pytest.mark.skipif(
    tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < (1, 31),
    reason="ONNX Runtime before 1.31 fails to load a droppable Clip with levels outside it",
)
def test_the_engine_drops_a_clip_whose_ends_are_the_outermost_levels(tmp_path: Path) -> None:
    """The rule itself, so that an engine that changes it is noticed."""
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(60):
        low, high = np.float32(-np.exp(rng.uniform(-2, 2))), np.float32(np.exp(rng.uniform(-2, 2)))
        scale = np.float32((high - low) / 255 * (1 + rng.uniform(-6e-3, 6e-3)))
        zero = int(np.clip(np.rint(-low / scale) + rng.integers(-1, 2), 0, 255))
        numbers = QParams(np.asarray(scale), np.asarray(zero, np.int32))
        redundant = quantize(np.array([low, high]), numbers, UINT8).tolist() == [0, 255]
        assert _fused(float(low), float(high), numbers, tmp_path) == redundant
        seen.add(redundant)
    assert seen == {True, False}
