"""Operators that stay float though they could be quantized, with their reasons."""

import onnx
import pytest

import onnxq
from onnxq.config import Config, Rule
from tests.backends.graphs import model


def build(text: str, shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    proto = model(text, weights=shapes)
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def refused(plan: onnxq.Plan) -> dict[str, str]:
    return {one.subject: one.rule for one in (*plan.refusals, *plan.left_float)}


STEM = """g (float[1,3,224,224] x) => (float[1,64,112,112] y) {
    stem = Conv <pads=[1,1,1,1], strides=[2,2]>(x, w0) stem_relu = Relu(stem)
    depthwise = Conv <pads=[1,1,1,1], group=32>(stem_relu, w1) depthwise_relu = Relu(depthwise)
    wide = Conv(depthwise_relu, w2) wide_relu = Relu(wide) y = Conv(wide_relu, w3)
}"""
STEM_SHAPES = {"w0": (32, 3, 3, 3), "w1": (32, 1, 3, 3), "w2": (128, 32, 1, 1), "w3": (64, 128, 1, 1)}


def test_stem_and_the_depthwise_behind_it() -> None:
    rules = refused(onnxq.make_plan(build(STEM, STEM_SHAPES)))
    assert rules["stem"] == "stem"
    assert rules["depthwise"] == "stem-depthwise"
    assert "y" not in rules


@pytest.mark.parametrize("target", ["ort", "openvino", "web", "ort,openvino"])
@pytest.mark.parametrize("wide", [False, True], ids=["3x3", "7x7"])
def test_a_stem_goes_into_integers_where_its_float_takes_much_of_the_time(target: str, wide: bool) -> None:
    # The stems of an EfficientNet and of a ResNet, in front of layers of the same sizes.
    size, pad, channels = (7, 3, 64) if wide else (3, 1, 16)
    text = f"""g (float[1,3,224,224] x) => (float[1,64,56,56] y) {{
        stem = Conv <pads=[{pad},{pad},{pad},{pad}], strides=[2,2]>(x, w0) stem_relu = Relu(stem)
        pooled = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2]>(stem_relu)
        first = Conv <pads=[1,1,1,1]>(pooled, w1) first_relu = Relu(first)
        y = Conv <pads=[1,1,1,1]>(first_relu, w2) }}"""
    shapes = {"w0": (channels, 3, size, size), "w1": (64, channels, 3, 3), "w2": (64, 64, 3, 3)}
    rules = refused(onnxq.make_plan(build(text, shapes), overrides={"target": target}))
    assert rules == ({} if wide else {"stem": "stem"})


def test_a_person_overrules_it() -> None:
    force = Config(rules=(Rule.model_validate({"node": "stem", "set": {"quantize": True}}),))
    plan = onnxq.make_plan(build(STEM, STEM_SHAPES), config=force)
    assert "stem" not in refused(plan)
    assert any(str(site.site) == "w0" for site in plan.sites)


@pytest.mark.parametrize("square", ["Mul(stft, stft)", "ReduceSumSquare <axes=[2]>(stft)"])
def test_a_spectrogram_front_end(square: str) -> None:
    text = f"""g (float[1,1,16000] x) => (float[1,64,t] y) <float two = {{2.0}}, float tiny = {{0.000001}}> {{
        stft = Conv <strides=[256]>(x, w0) power = {square} floor = Add(power, tiny) logged = Log(floor)
        y = Conv <pads=[0,0]>(logged, w1) }}"""
    plan = onnxq.make_plan(build(text, {"w0": (64, 1, 512), "w1": (64, 64, 1)}))
    assert refused(plan)["stft"] == "log-front-end"
    assert any("logarithm logged" in refusal.reason for refusal in plan.left_float)


@pytest.mark.parametrize("product", ["MatMul", "Gemm"])
def test_a_spectrogram_front_end_of_products(product: str) -> None:
    # A transform and a filterbank as MatMuls; the layers behind the logarithm are none of it.
    text = f"""g (float[400,512] x) => (float[400,64] y) <float tiny = {{0.000001}}> {{
        dft = {product}(x, w0) power = Mul(dft, dft) mel = {product}(power, w1)
        floor = Add(mel, tiny) logged = Log(floor)
        layer = MatMul(logged, w2) r = Relu(layer) y = MatMul(r, w2) }}"""
    proto = build(text, {"w0": (512, 256), "w1": (256, 64), "w2": (64, 64)})
    for target in ("ort", "trt", "openvino", "web"):
        rules = refused(onnxq.make_plan(proto, overrides={"target": target}))
        assert {name for name, rule in rules.items() if rule == "log-front-end"} == {"dft", "mel"}


def test_the_filters_in_front_of_a_transform_belong_to_the_front_end() -> None:
    # A constant-Q transform halves the rate by a filter before the transform of each octave; a Relu ends the filters.
    text = """g (float[1,64,16000] x) => (float[1,64,3998] y) <float tiny = {0.000001}> {
        layer = Conv <pads=[1,1]>(x, w2) r = Relu(layer) filtered = Conv <strides=[2]>(r, w0) turned = Neg(filtered)
        cqt = Conv <strides=[2]>(turned, w0) power = Mul(cqt, cqt) floor = Add(power, tiny) logged = Log(floor)
        y = Conv <pads=[0,0]>(logged, w1) }"""
    for target in ("trt", "ort"):
        plan = onnxq.make_plan(
            build(text, {"w0": (64, 64, 4), "w1": (64, 64, 1), "w2": (64, 64, 3)}), overrides={"target": target}
        )
        assert {name for name, rule in refused(plan).items() if rule == "log-front-end"} == {"filtered", "cqt"}


@pytest.mark.parametrize("order", [("turned", "squared"), ("squared", "turned")])
def test_a_filter_is_found_whichever_path_to_the_transform_is_looked_at_first(order: tuple[str, str]) -> None:
    # The transform reads a sum of the filter's result and of its square: a linear path, and another that is none.
    lines = {"turned": "turned = Neg(filtered)", "squared": "squared = Mul(filtered, filtered)"}
    text = f"""g (float[1,64,16000] x) => (float[1,64,3998] y) <float tiny = {{0.000001}}> {{
        filtered = Conv <strides=[2]>(x, w0)
        {lines[order[0]]}
        {lines[order[1]]}
        both = Concat <axis=1>({order[0]}, {order[1]}) cqt = Conv <strides=[2]>(both, w1) power = Mul(cqt, cqt)
        floor = Add(power, tiny) logged = Log(floor) y = Conv(logged, w2)
    }}"""
    shapes = {"w0": (64, 64, 4), "w1": (64, 128, 4), "w2": (64, 64, 1)}
    rules = refused(onnxq.make_plan(build(text, shapes), overrides={"target": "trt"}))
    assert {name for name, rule in rules.items() if rule == "log-front-end"} == {"filtered", "cqt"}


MAGNITUDE = """g (float[1,8192] x) => (float[1,64,63] y)
    <int64[1] ends = {1}, int64[1] none = {0}, int64[1] middle = {64}, int64[1] end = {128}, float two = {2.0}> {
    wave = Unsqueeze(x, ends) stft = Conv <pads=[0,0], strides=[128]>(wave, w0)
    real = Slice(stft, none, middle, ends) imaginary = Slice(stft, middle, end, ends) power = Pow(real, two)
    other = Pow(imaginary, two) sum = Add(power, other) size = Sqrt(sum)
    layer = Conv <pads=[1,1]>(size, w1) r = Relu(layer) y = Conv <pads=[1,1]>(r, w1) }"""
MAGNITUDE_SHAPES = {"w0": (128, 1, 256), "w1": (64, 64, 3)}


@pytest.mark.parametrize("target", ["ort", "trt", "openvino", "web", "qnn"])
def test_the_magnitude_of_a_spectrum(target: str) -> None:
    """As silero_vad has it: eight bits of a loud frame leave nothing of a quiet one, as in front of a logarithm."""
    plan = onnxq.make_plan(build(MAGNITUDE, MAGNITUDE_SHAPES), overrides={"target": target})
    assert [refused(plan).get(name) for name in ("stft", "layer", "y")] == ["magnitude", None, None]
    assert any("square root size" in left.reason for left in plan.left_float if left.subject == "stft")


def test_whole_numbers_between_casts_stay_float() -> None:
    """As SLANet counts its steps. What is cast from integers alone, such as masks, the NPU reads in integers."""
    text = """g (float[1,16,8] x, int64[1] n) => (float[1,32,8] z, int64[1] m)
        <float[1] one = {1}, int64[1] axis = {0}> {
        layer = Conv(x, w0) counted = Cast <to=1>(n) next = Add(counted, one) flat = Unsqueeze(next, axis)
        again = Squeeze(flat, axis) m = Cast <to=7>(again) scaled = Mul(counted, one) z = Add(layer, scaled) }"""
    plan = onnxq.make_plan(build(text, {"w0": (32, 16, 1)}), overrides={"target": "qnn"})
    assert {name for name, rule in refused(plan).items() if rule == "counting"} == {"next", "flat", "again"}
    assert {"counted", "z"} <= {str(site.quantized_tensor) for site in plan.sites}


@pytest.mark.parametrize(
    "text",
    [
        # A root of means normalizes; a magnitude in the middle of a network is one of its activations.
        MAGNITUDE.replace("size = Sqrt(sum)", "m = ReduceMean <axes=[1]>(sum) r2 = Sqrt(m) size = Div(sum, r2)"),
        MAGNITUDE.replace("wave = Unsqueeze(x, ends)", "first = Relu(x) wave = Unsqueeze(first, ends)"),
    ],
    ids=["normalization", "inside"],
)
def test_other_roots_leave_a_convolution_in_integers(text: str) -> None:
    assert "stft" not in refused(onnxq.make_plan(build(text, MAGNITUDE_SHAPES)))


def test_tiny_layers_do_not_pay() -> None:
    text = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) {
        a = Conv <pads=[1,1,1,1]>(x, w0) r = Relu(a) y = Conv <pads=[1,1,1,1]>(r, w1) }"""
    plan = onnxq.make_plan(build(text, {"w0": (4, 4, 3, 3), "w1": (4, 4, 3, 3)}))
    assert not plan.sites
    assert refused(plan)["y"] == "size"


def test_recurrent_layers_name_their_reason() -> None:
    text = "g (float[7,1,16] x) => (float[7,1,1,16] y) { y, h = GRU <hidden_size=16>(x, w, r) }"
    assert refused(onnxq.make_plan(build(text, {"w": (1, 48, 16), "r": (1, 48, 16)})))["y"] == "no-kernel"
