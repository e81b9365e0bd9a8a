"""The command's own check, where few samples are held back for it."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnxq
from onnxq.errors import ModelError, VerificationError
from onnxq.graph import name_nodes
from onnxq.graph.precision.widen import emulate_types
from onnxq.pipeline.check import check_model, explain_slowness, load_file
from onnxq.plan import PlacementChoice, PlacementMethod, Plan
from onnxq.runtime import KernelError
from tests.graph.kit import model
from tests.pipeline.models import EVERYTHING, images, quantize, residual


def _network(*weights: float) -> onnx.ModelProto:
    """y = x * w."""
    return model("g (float[N,2] x) => (float[N,2] y) { y = Mul(x, w) }", w=np.array(weights, np.float32))


EASY, HARD = ({"x": np.array([row], np.float32)} for row in ((1, 0), (0, 1)))


@pytest.mark.parametrize(("few", "told"), [((), 0), ((EASY,), 0), ((EASY, HARD), 1)])
def test_an_easy_sample_does_not_hide_that_others_are_lost(few: tuple[dict[str, np.ndarray], ...], told: int) -> None:
    found = check_model(_network(1, 1), _network(1.001, 0), [EASY], other_samples=few)
    assert found.samples == 1
    assert found.outputs[0].sqnr_db[0] > 50
    assert [note.code for note in found.notes] == ["W108"] * told
    assert all("though not on the 1 held back" in str(note) for note in found.notes)


def test_answers_lost_on_the_sample_held_back_are_told_once() -> None:
    found = check_model(_network(1, 1), _network(1, 0), [HARD], other_samples=[EASY, HARD])
    assert found.notes == ()


def _make_typed(dtype: int, inner: int) -> onnx.ModelProto:
    """y = x * w in a float type between two Casts, of which the first casts to another."""
    text = f"g (float[N,2] x) => (float[N,2] y) {{ a = Cast <to={inner}>(x) b = Mul(a, w) y = Cast <to=1>(b) }}"
    return name_nodes(model(text, 21, 10, w=np.ones(2, onnx.helper.tensor_dtype_to_np_dtype(dtype))))


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_file_whose_types_do_not_fit_is_an_error_also_where_its_emulation_runs(dtype: int) -> None:
    fits, clashes = _make_typed(dtype, dtype), _make_typed(dtype, TensorProto.FLOAT)
    check_model(_network(1, 1), fits, [EASY], exact=emulate_types(fits), optimized=False)
    with pytest.raises(VerificationError, match="not legal") as caught:
        check_model(_network(1, 1), clashes, [EASY], exact=emulate_types(fits), optimized=False)
    assert caught.value.code == "Q701"


def test_a_file_without_kernels_is_loaded_and_the_note_says_what_was_run() -> None:
    proto = _make_typed(TensorProto.BFLOAT16, TensorProto.BFLOAT16)
    (note,) = load_file(proto, optimized=False)
    assert (note.code, "b/Mul" in str(note)) == ("W116", True)
    with pytest.raises(KernelError):
        load_file(proto, optimized=True)
    assert load_file(_make_typed(TensorProto.FLOAT16, TensorProto.FLOAT16), optimized=False) == ()


def test_a_file_that_loads_and_does_not_run_is_noted_too() -> None:
    text = """g (float[N,2] x) => (float[N,2] y) {
        a = Cast <to=10>(x) b = ScatterElements <axis=0, reduction="add">(a, at, a) y = Cast <to=1>(b) }"""
    named = name_nodes(model(text, 21, 10, at=np.array([[0, 0]])))
    assert load_file(named, optimized=False) == ()
    (note,) = load_file(named, EASY, optimized=False)
    assert (note.code, "ScatterElements" in note, "was not run" in note) == ("W116", True, True)
    exact = emulate_types(named)
    (same,) = check_model(exact, named, [EASY], exact=exact, optimized=False).notes
    assert same == note


def test_a_part_of_an_operators_function_that_has_no_kernel_is_told_as_any_other() -> None:
    """ONNX Runtime runs such an operator by its function, and names none of that function's nodes."""
    (note,) = load_file(model("g (bfloat16[4] x) => (bfloat16[4] y) { [gelu] y = Gelu(x) }", 20, 10), optimized=False)
    assert (note.code, "an unnamed" in str(note)) == ("W116", True)


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Plans of one network by their mode."""
    static, weights = (quantize(residual(), images(), mode=mode).plan for mode in ("static", "weight-only"))
    choice = PlacementChoice(method=PlacementMethod.MEASURED)
    return {"static": static, "weight-only": weights, "measured": replace(static, placement=choice)}


ADVICE = {
    "static": "`placement='measured'` looks",
    "weight-only": "saves bytes and not arithmetic",
    "measured": "it was the fastest of the placements timed",
}


@pytest.mark.parametrize(("mode", "advice"), ADVICE.items())
def test_what_is_said_of_a_slower_model_fits_its_plan(plans: dict[str, Plan], mode: str, advice: str) -> None:
    text = explain_slowness(plans[mode], "ONNX Runtime")
    assert advice in text
    # Placements of pairs on activations are timed, of which weights alone have none.
    assert ("placement='measured'" in text) == (mode == "static")


def test_the_sample_that_is_timed_is_the_first_everywhere() -> None:
    proto = residual()
    proto.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 32, "H", "W"]))
    data = [{"x": images(1)["x"].repeat(2, 2)[:, :, :size]} for size in (5, 3, 4, 6, 7, 8, 9, 10)]
    made = onnxq.quantize(proto, data, EVERYTHING)
    timed = onnxq.bench([proto], data, overrides={"engine": "ort", "seconds": 0.01})
    assert made.report.latency is not None
    assert made.report.latency.shapes == timed.shapes == {"x": (1, 32, 5, 8)}
    assert "1 thread, x 1x32x5x8" in onnxq.summarize(made)
    assert "1 thread, x 1x32x5x8" in onnxq.summarize(timed)


@pytest.mark.parametrize(("name", "sure"), [("logits", True), ("y", False)])
def test_how_often_the_class_is_the_same_is_told_of_scores(name: str, sure: bool) -> None:
    text = f"g (float[N,8] x) => (float[N,4] {name}) {{ {name} = MatMul(x, w) }}"
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 4)).astype(np.float32)
    near = weight + 0.2 * rng.standard_normal((8, 4)).astype(np.float32)
    proto, other = model(text, w=weight), model(text, w=near)
    x = rng.standard_normal((5, 6, 8)).astype(np.float32)
    samples = [{"x": rows} for rows in x]
    (check,) = check_model(proto, other, samples).outputs
    same = float(((x @ weight).argmax(2) == (x @ near).argmax(2)).mean())
    assert 0.3 < same < 1
    assert (check.rows, check.classes) == (30, sure)
    assert check.top_1 == pytest.approx((same, same))
    (found,) = onnxq.diff(proto, other, samples, overrides={"engines": ["ort"]}).outputs
    assert (found.classes, found.accuracy[0].rows) == (sure, 30)
    assert found.accuracy[0].top_k == pytest.approx(same)


def test_what_only_the_optimizations_refuse_is_told_so_and_the_remedy_helps() -> None:
    """ONNX Runtime 1.32 takes the sizes of some axes for those of all axes beside int8 convolutions."""
    text = """g (float[1,2,4,4] x, int64[2] sizes) => (float[1,2,2,2] y) {
        [c] a = Conv(x, w)
        [r] b = Resize<axes = [2, 3], keep_aspect_ratio_policy = "not_larger", mode = "nearest">(a, , , sizes)
        [d] y = Conv(b, w) }"""
    rng = np.random.default_rng(0)
    proto = model(text, 19, 9, w=rng.standard_normal((2, 2, 1, 1)).astype(np.float32))
    samples = [{"x": rng.standard_normal((1, 2, 4, 4)).astype(np.float32), "sizes": np.array([2, 2])} for _ in range(4)]
    with pytest.raises(ModelError, match="loads without them") as caught:
        quantize(proto, samples)
    assert caught.value.subject == "node 'r' (Resize)"
    assert "float with a rule" in caught.value.fix
    quantize(proto, samples, rules=[{"op": "Conv", "set": {"float": True}}])


def test_lost_answers_are_told_where_the_samples_held_back_have_little_of_the_noise_that_is_to_be_removed() -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((16, 16)).astype(np.float32) / 4, "one": np.float32(1)}
    nodes = "m = MatMul(x, w) a = Mul(m, sigma) r = Sub(one, sigma) q = Add(r, r) b = Mul(x, q) y = Add(a, b)"
    net = model(f"g (float[1,16] x, float[1,1] sigma) => (float[1,16] y) {{ {nodes} }}", **weights)
    rng = np.random.default_rng(21)
    samples = [
        {
            "x": rng.standard_normal((1, 16)).astype(np.float32),
            "sigma": np.full((1, 1), rng.random() < 0.75, np.float32),
        }
        for _ in range(32)
    ]
    force = {"quantize": True}
    rules = [{"role": "weight", "set": force | {"bits": 2}}, {"node": "*", "set": force}]
    report = onnxq.quantize(net, samples, overrides={"effort": "fast", "latency": False, "rules": rules}).report
    assert report.checks[0].sqnr_db[0] > 10
    assert "though not on the 4 held back" in " ".join(str(note) for note in report.warnings if note.code == "W108")


def test_others_are_not_run_where_the_samples_held_back_agree() -> None:
    others = iter([HARD])
    assert check_model(_network(1, 1), _network(1.25, 0), [EASY] * 4, other_samples=others).notes == ()
    assert next(others) is HARD
