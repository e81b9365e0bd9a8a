"""Samples of one input of three columns, told apart by their first value."""

import numpy as np
from onnx import TensorProto

from onnxq.data import Dataset
from onnxq.graph import ValueInfo

X = ValueInfo("x", TensorProto.FLOAT, ("N", 3))
FRAMES = ValueInfo("frames", TensorProto.FLOAT, (None, 3))


def feed(k: int, rows: int = 1) -> dict[str, np.ndarray]:
    """A sample, or several in rows, of the value k."""
    return {"x": np.full((rows, 3), k, np.float32)}


def firsts(dataset: Dataset) -> list[float]:
    """The first value of each sample."""
    return [float(sample["x"].flat[0]) for sample in dataset.samples()]
