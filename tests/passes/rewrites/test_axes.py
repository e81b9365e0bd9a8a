"""Pad, Resize and CenterCropPad of some axes compute the same of all; ONNX Runtime runs them beside int8 products."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnxq
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.passes.rewrites.single_nodes import write_axes
from tests.passes.kit import assert_changed, assert_untouched, ops, parse, random_weights, read_by

IMAGE = "g (float[N,4,7,8] x) => (float[A,B,C,D] y)"
AMOUNTS = st.lists(st.integers(0, 2), min_size=4, max_size=4)


@settings(max_examples=20, deadline=None)
@given(AMOUNTS, st.permutations([0, 1, 2, 3]), st.sampled_from(["constant", "edge", "reflect", "value"]), st.booleans())
def test_a_pad_of_two_axes_is_one_of_all(amounts: list[int], order: list[int], mode: str, negative: bool) -> None:
    axes = np.array([axis - 4 * negative for axis in order[:2]])
    line = f'Pad <mode = "{mode}"> (x, amounts, , axes)' if mode != "value" else "Pad (x, amounts, value, axes)"
    held = read_by(line, {"amounts": np.array(amounts), "axes": axes, "value": 1.5})
    model = parse(f"{IMAGE.replace('N', '3')} {{ y = {line} }}", opset=18, **held)
    (node,) = GraphIndex(assert_changed(write_axes, model)[0]).nodes
    assert len(node.inputs) == (3 if mode == "value" else 2)


RESIZE = '<mode = "{}", axes = [3, 2]> (x, , {})'


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("kind", ["scales", "sizes"])
@pytest.mark.parametrize("batch", ["N", "3"])
def test_a_resize_of_two_axes_is_one_of_all(mode: str, kind: str, batch: str) -> None:
    values = {"scales": np.array([2, 1.5], np.float32), "sizes": np.array([15, 9])}[kind]
    read = "amounts" if kind == "scales" else ", amounts"
    model = parse(f"{IMAGE.replace('N', batch)} {{ y = Resize {RESIZE.format(mode, read)} }}", opset=18, amounts=values)
    result, _ = assert_changed(write_axes, model)
    assert "axes" not in GraphIndex(result).find_node("y/Resize").attrs
    assert (ops(result) == {"Resize": 1}) is (kind == "scales" or batch == "3")


@pytest.mark.parametrize("sizes", ["(3,4,7,8)", "(N,4,H,W)"])
@pytest.mark.parametrize("axes", [(2, 3), (-1, 1)])
def test_a_crop_of_two_axes_is_one_of_all(axes: tuple[int, int], sizes: str) -> None:
    declared = f"g (float[{sizes.strip('()')}] x) => (float[A,B,C,D] y)"
    line = f"y = CenterCropPad <axes = [{axes[0]}, {axes[1]}]> (x, sizes)"
    model = parse(f"{declared} {{ {line} }}", opset=18, sizes=np.array([5, 3]))
    assert "axes" not in GraphIndex(assert_changed(write_axes, model)[0]).nodes[-1].attrs


def test_computed_amounts_are_put_in_their_places() -> None:
    text = """g (float[N,4,7,8] x, float[A,B] like) => (float[N,4,C,D] y, float[N,4,E,F] z) {
        s = Shape(like) y = Resize <mode = "nearest", axes = [2, 3]> (x, , , s) p = Concat <axis = 0> (s, s)
        z = Pad (x, p, , axes) }"""
    model = parse(text, opset=18, axes=np.array([2, 3]))
    result, _ = assert_changed(write_axes, model)
    index = GraphIndex(result)
    assert "axes" not in index.find_node("y/Resize").attrs
    assert len(index.find_node("z/Pad").inputs) == 2
    assert ops(result)["ScatterElements"] == 2


@pytest.mark.parametrize(
    "line",
    [
        'y = Resize <mode = "linear", axes = [2, 3], keep_aspect_ratio_policy = "not_larger"> (x, , , sizes)',
        'y = Resize <axes = [2, 3], coordinate_transformation_mode = "tf_crop_and_resize"> (x, region, , sizes)',
        "y = Pad (x, amounts)",
        'y = Resize <mode = "nearest"> (x, , scales)',
    ],
)
def test_what_is_left_alone(line: str) -> None:
    held = {"sizes": np.array([9, 5]), "amounts": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    held |= {"region": np.array([0, 0, 1, 1], np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}
    assert_untouched(write_axes, parse(f"{IMAGE} {{ {line} }}", opset=18, **read_by(line, held)))


C3 = "<pads=[1,1,1,1], kernel_shape=[3,3]>"
BETWEEN = f"""g (float[N,16,16,16] x) => (float[N,16,A,B] y) {{
    c = Conv {C3}(x, w0) r = Relu(c) d = Conv {C3}(r, w1) s = Relu(d)
    m = LINE
    e = Conv {C3}(m, w2) y = Relu(e)
}}"""


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ('Pad <mode="reflect">(s, amounts, , axes)', np.array([1, 2, 2, 1])),
        ('Pad <mode="edge">(s, amounts, , axes)', np.array([1, 2, 2, 1])),
        ("CenterCropPad <axes=[2,3]>(s, amounts)", np.array([14, 15])),
        ('Resize <mode="nearest", axes=[2,3]>(s, , amounts)', np.array([2, 2], np.float32)),
        ('Resize <mode="linear", axes=[2,3]>(s, , amounts)', np.array([2, 1.5], np.float32)),
        ('Resize <mode="nearest", axes=[2,3]>(s, , , amounts)', np.array([32, 24])),
        ('Resize <mode="linear", axes=[3,2]>(s, , , amounts)', np.array([32, 24])),
    ],
)
@pytest.mark.parametrize("effort", ["default", "fast"])
def test_between_int8_convolutions_they_run(line: str, values: np.ndarray, effort: str) -> None:
    weights = random_weights(dict.fromkeys(("w0", "w1", "w2"), (16, 16, 3, 3)))
    arrays = {**weights, "amounts": values, **({"axes": np.array([2, 3])} if "axes)" in line else {})}
    proto = parse(BETWEEN.replace("LINE", line), opset=18, **arrays)
    data = {"x": np.random.default_rng(1).standard_normal((8, 16, 16, 16)).astype(np.float32)}
    rules = [{"op": "*", "set": {"quantize": True}}]
    overrides = {"latency": False, "rules": rules, **({} if effort == "default" else {"effort": effort})}
    result = onnxq.quantize(proto, data, overrides=overrides)
    (check,) = result.report.checks
    assert min(check.sqnr_db) > 25
    assert sum(node.op_type == "Conv" for node in result.model.graph.node) == 3
    onnx.checker.check_model(result.model)
    infer_shapes(result.model)
