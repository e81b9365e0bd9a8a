"""Every kernel of ORT by itself."""

import numpy as np
import onnx
from onnx import numpy_helper

from onnxq.engines.diff.bisect import check_kernels
from onnxq.engines.diff.layers import Inner, open_inner
from onnxq.engines.diff.model import ON
from onnxq.graph import GraphIndex, name_nodes
from tests.engines.diff.models import WIDTH, chain, diff, indexed, pairs, quantized_cnn, samples
from tests.pipeline.models import images, residual


def opened(float_proto: onnx.ModelProto, quantized: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Inner:
    return open_inner(GraphIndex(name_nodes(float_proto)), indexed(quantized), feeds, fused=True, threads=1)


def test_every_kernel_of_a_sound_model_agrees_alone() -> None:
    feeds = images(1, seed=3)
    found = check_kernels(opened(residual(), quantized_cnn(), feeds), feeds, threads=1)
    assert found.point is None
    assert found.kernels >= 6
    assert found.levels <= 1
    assert found.share < 0.01
    assert f"each of {found.kernels} kernels alone" in found.describe()


def nearly_right() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A weight along its rows, whose scales differ by a few percent, behind an input quantized to a few levels."""
    rng = np.random.default_rng(2)
    proto = chain()
    for k, tensor in enumerate(proto.graph.initializer):
        weight = rng.uniform(-1, 1, (WIDTH, WIDTH))
        weight[np.arange(WIDTH), np.arange(WIDTH)] = 1 + 0.02 * rng.standard_normal(WIDTH)
        proto.graph.initializer[k].CopyFrom(numpy_helper.from_array(weight.astype(np.float32), tensor.name))
    made = pairs(proto, "w2")
    coarse = next(tensor for tensor in made.graph.initializer if tensor.name == "x/scale")
    coarse.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(coarse) * np.float32(32), "x/scale"))
    zero = next(tensor for tensor in made.graph.initializer if tensor.name == "x/zero_point")
    zero.CopyFrom(numpy_helper.from_array(np.asarray(128, np.uint8), "x/zero_point"))
    return proto, made


def test_a_fault_below_the_noise_of_the_network_is_found_in_its_kernel() -> None:
    proto, made = nearly_right()
    shown = diff(proto, made, samples(), layers=True)
    assert shown.divergences == ()  # Quantization itself costs more than the fault.
    found = diff(proto, made, samples(), bisect=True)
    (part,) = found.divergences
    assert (part.run, part.tensor) == (ON, "y")
    (piece,) = found.bisections
    assert set(piece.nodes) == {"s/DequantizeLinear", "w2/DequantizeLinear", "node_y"}
