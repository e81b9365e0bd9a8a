"""Calibration data from wherever people keep it, checked against the model's inputs, read sample by sample."""

from onnxq.data.augment import augment_sample
from onnxq.data.dataset import Batch, Dataset
from onnxq.data.extremes import find_extremes
from onnxq.data.load import load_data
from onnxq.data.masks import read_mask
from onnxq.data.synthetic import make_synthetic

__all__ = ["Batch", "Dataset", "augment_sample", "find_extremes", "load_data", "make_synthetic", "read_mask"]
