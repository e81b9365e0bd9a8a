"""Streaming statistics of one activation, and the range that follows from them.

Observers hold integers (counts) or exact sums only. Their ranges are therefore bit-identical for any order and size of
the batches and any merging of partial observers. Their memory does not depend on the data.

    minmax            smallest and largest value
    moving_average    mean of the samples' minima and maxima
    percentile        the share of values to keep
    mse               least squared error after quantization, with the levels of the site's own QuantSpec
    entropy           least Kullback-Leibler divergence (TensorRT's calibration)
    aciq              analytical clipping for a Gaussian or Laplacian

Register further ones by `@register_observer("name")`.
"""

from onnxq.observers.aciq import Aciq, aciq_alpha
from onnxq.observers.base import (
    MinMax,
    MovingAverage,
    Observer,
    check_observers,
    create_observer,
    list_observers,
    register_observer,
)
from onnxq.observers.entropy import Entropy
from onnxq.observers.histogram import Histogram, HistogramView, Percentile
from onnxq.observers.mse import Mse

__all__ = [
    "Aciq",
    "Entropy",
    "Histogram",
    "HistogramView",
    "MinMax",
    "MovingAverage",
    "Mse",
    "Observer",
    "Percentile",
    "aciq_alpha",
    "check_observers",
    "create_observer",
    "list_observers",
    "register_observer",
]
