"""Calibration data from wherever people keep it, checked against the model's inputs, read sample by sample."""

from onnxq.data.dataset import Batch, Dataset, find_extremes, read_mask
from onnxq.data.load import load_data
from onnxq.data.synthetic import augment_sample, make_synthetic

__all__ = [
    "Batch",
    "Dataset",
    "augment_sample",
    "find_extremes",
    "load_data",
    "make_synthetic",
    "read_mask",
]
