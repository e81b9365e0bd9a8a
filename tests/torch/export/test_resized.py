"""Networks that torch's own exporter writes, resized to sizes of other tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onnxq
from tests.torch.nets import Network


def resize_twice(net: Any, x: Tensor) -> Tensor:
    """A feature pyramid: each level is resized to the one above, the last to the image."""
    high = net.stem(x).relu()
    low = net.down(high).relu()
    joined = functional.interpolate(low, size=high.shape[-2:], mode="nearest") + high
    return functional.interpolate(net.head(joined), size=x.shape[-2:], mode="bilinear", align_corners=False)


# Of the exporter, which torch calls the old one.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["ort", "trt"])
def test_a_pyramid_of_any_height_and_width(target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    axes = {"x": {0: "N", 2: "H", 3: "W"}}
    layers = {"stem": nn.Conv2d(3, 8, 3, 2, 1), "down": nn.Conv2d(8, 8, 3, 2, 1), "head": nn.Conv2d(8, 4, 3, 1, 1)}
    net, example = Network(resize_twice, **layers).eval(), (torch.randn(1, 3, 24, 24),)
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(net, example, path, dynamic_axes=axes, opset_version=17, dynamo=False, **names)
    samples = {"x": np.random.default_rng(0).standard_normal((16, 3, 24, 24)).astype(np.float32)}
    everything = {"rules": ({"op": "Conv", "set": {"quantize": True}},)} if target == "ort" else {}
    report = onnxq.quantize(path, samples, overrides={"latency": False, "target": target, **everything}).report
    assert report.pairs > 2
    assert report.checks[0].sqnr_db[0] > 25
