"""Calibration data from wherever people keep it, checked against the model's inputs, read sample by sample."""

from onnxq.data.augment import views
from onnxq.data.dataset import Batch, Dataset
from onnxq.data.extremes import extremes
from onnxq.data.load import load_data
from onnxq.data.masks import attended
from onnxq.data.synthetic import synthetic

__all__ = ["Batch", "Dataset", "attended", "extremes", "load_data", "synthetic", "views"]
