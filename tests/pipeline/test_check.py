"""The command's own check, where few samples are held back for it."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper

import onnxq
from onnxq.backends import load_config
from onnxq.config import Config
from onnxq.errors import ModelError, VerificationError
from onnxq.graph import name_nodes
from onnxq.graph.precision.widen import emulate_types
from onnxq.pipeline.check import _note_losses, check_model, explain_slowness, load_file, time_both
from onnxq.pipeline.prepared import load_state, read_data
from onnxq.plan import PlacementChoice, PlacementMethod, Plan
from onnxq.runtime import KernelError, Session
from onnxq.runtime.timing import summarize_rounds
from tests.codes.kit import quantized
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


def test_answers_that_the_optimized_run_alone_loses_are_not_called_near() -> None:
    found = check_model(_network(1, 1), _network(1.001, 0), [EASY])
    pair = (Session(_network(1, 1), optimize=False), Session(_network(1.001, 0), optimize=False))
    for on, notes in ((9.0, 0), (12.0, 1)):
        checks = [replace(found.outputs[0], sqnr_db=(12.0, on))]
        assert len(_note_losses(checks, found.errors["off"], pair, [EASY, HARD])) == notes


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
    table = replace(weights.sites[0], rule="embedding-rows")
    (edge, *_) = weights.sites[0].named_consumers
    shared = replace(weights, sites=(replace(weights.sites[0], consumers=(edge, replace(edge, node="other"))),))
    return {
        "static": static, "weight-only": weights, "shared": shared, "measured": replace(static, placement=choice),
        "tables": replace(weights, sites=(table,)),
    }  # fmt: skip


ADVICE = {
    "static": "`placement='measured'` looks",
    "weight-only": "saves bytes and not arithmetic",
    "shared": "with `emit: nbits`",
    "measured": "it was the fastest of the placements timed",
    "tables": "`embeddings='float'` leaves them",
}


@pytest.mark.parametrize(("mode", "advice"), ADVICE.items())
def test_what_is_said_of_a_slower_model_fits_its_plan(plans: dict[str, Plan], mode: str, advice: str) -> None:
    text = explain_slowness(plans[mode], "ONNX Runtime")
    assert advice in text
    # Placements of pairs on activations are timed, of which weights alone have none.
    assert ("placement='measured'" in text) == (mode == "static")
    assert ("nbits" in text) == (mode == "shared")
    # In mode static, too, tables may be all that is quantized.
    assert ("mode: static" in text) == (mode in ("weight-only", "shared"))
    assert "nbits" not in explain_slowness(replace(plans["shared"], target="openvino"), "OpenVINO")


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


# ---- Outputs that are no plain tensors: what numbers they hold is compared, and of the rest it is said that not.

_X = np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)
# So small a network stays float unless it is asked for.
_CONFIG = load_config("ort-int8", {"rules": [{"op": "MatMul", "set": {"quantize": True}}]})
_FAST = {"effort": "fast", "latency": False}


TAILS = {
    # Which of the outputs is the largest, by name.
    "names": "[largest] k = ArgMax <axis=1, keepdims=0>(q) [named] out = Gather(names, k)",
    "words": f"[last] out = Cast <to={TensorProto.STRING}>(q)",
    "SequenceConstruct": "[last] out = SequenceConstruct(q, q)",
    "Optional": "[last] out = Optional(q)",
}


def network(tail: str, kind: onnx.TypeProto) -> ModelProto:
    """Two layers, and their result through `tail` as the model's only output."""
    layers = "[first] p = MatMul(x, a) [relu] r = Relu(p) [second] q = MatMul(r, b)"
    rng = np.random.default_rng(1)
    weights = {"a": rng.standard_normal((16, 32)), "b": rng.standard_normal((32, 8))}
    text = f"g (float[N,16] x) => (float[N,8] out) {{ {layers} {TAILS[tail]} }}"
    proto = model(text, **{name: value.astype(np.float32) for name, value in weights.items()})
    proto.graph.initializer.append(helper.make_tensor("names", TensorProto.STRING, [8], [b"n%d" % k for k in range(8)]))
    proto.graph.output[0].type.CopyFrom(kind)
    return proto


_TENSOR = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
_SEQUENCE = helper.make_sequence_type_proto(_TENSOR)
_WORDS = helper.make_tensor_type_proto(TensorProto.STRING, ["N", 8])


@pytest.mark.parametrize(
    ("op", "kind", "name"),
    [
        ("SequenceConstruct", _SEQUENCE, "out"),
        ("Optional", helper.make_optional_type_proto(_TENSOR), "out"),
        ("names", helper.make_tensor_type_proto(TensorProto.STRING, ["N"]), "q in front of largest"),
    ],
)
def test_numbers_inside_are_compared_and_names_by_those_that_choose_them(
    op: str, kind: onnx.TypeProto, name: str
) -> None:
    result = onnxq.quantize(network(op, kind), {"x": _X}, _CONFIG, overrides=_FAST)
    assert result.report.pairs > 0
    (check,) = result.report.checks
    assert check.name == name
    assert 15 < check.sqnr_db[0] < 80
    assert [choice.decides for choice in result.report.choices] == ([] if name == "out" else [("out",)])
    assert not any("was not checked" in warning for warning in result.report.warnings)


def test_what_cannot_be_compared_is_said() -> None:
    result = onnxq.quantize(network("words", _WORDS), {"x": _X}, _CONFIG, overrides=_FAST)
    assert result.report.pairs > 0
    assert result.report.checks == ()
    (told,) = [warning for warning in result.report.warnings if warning.code == "W120"]
    assert told.startswith("output 'out', tensor(string), was not checked")
    proto = model(
        "g (float[N,16] x) => (float[N,16] out) { m = MatMul(x, w) out = Sqrt(m) }", w=np.eye(16, dtype=np.float32)
    )
    warnings = onnxq.quantize(proto, {"x": _X}, _CONFIG, overrides=_FAST).report.warnings
    assert any("output 'out' of the float model is NaN in " in warning for warning in warnings)


def test_a_wish_that_nothing_can_be_said_of_is_not_met() -> None:
    result = onnxq.quantize(network("words", _WORDS), {"x": _X}, _CONFIG, overrides={"min_sqnr": 10, "latency": False})
    assert not result.report.promotion.met


# ---- Which samples serve for what: the figure reported must be of samples that nothing was chosen on.

PREPARED = load_state(model("g (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }"))
CONFIG = load_config("ort-int8", {"effort": "balanced"})


def _ids(dataset) -> set[float]:
    return {float(sample["x"][0, 0]) for sample in dataset.samples()}


def _inputs(count: int, config: Config = CONFIG):
    """Samples that are each full of their number."""
    data = np.repeat(np.arange(count, dtype=np.float32)[:, None, None], 4, axis=2)
    return read_data(PREPARED, {"x": data}, config)


@given(count=st.integers(4, 200))
def test_three_disjoint_sets_where_two_samples_beside_the_extremes_are_free(count: int) -> None:
    inputs = _inputs(count)
    sets = [_ids(part) for part in (inputs.calibration, inputs.validation, inputs.test)]
    assert all(sets)
    assert sum(map(len, sets)) == len(set.union(*sets)) == count
    assert inputs.seen == ""
    assert len(sets[0]) >= len(sets[1]) >= len(sets[2])
    assert len(sets[1]) <= 16


@pytest.mark.parametrize("count", [1, 2, 3])
def test_too_few_samples_are_used_twice_and_never_none(count: int) -> None:
    """The least and the greatest are for the ranges, so that of three samples one is left for the check."""
    inputs = _inputs(count)
    sets = [_ids(part) for part in (inputs.calibration, inputs.validation, inputs.test)]
    assert all(sets)
    assert sets[0] == sets[1]
    assert bool(sets[1] & sets[2]) == (count < 3)
    assert inputs.seen == ("calibration" if count < 3 else "")


@pytest.mark.parametrize(("holdout", "note"), [(4, ""), (7, "; 6 samples are held back where 7 were asked for")])
def test_fewer_than_were_asked_for_are_told(holdout: int, note: str) -> None:
    config = load_config("ort-int8", {"verify.holdout": holdout, "effort": "fast"})
    inputs = _inputs(8, config)
    assert inputs.description.partition("8 samples")[2].startswith(note)
    assert len(inputs.test) == min(holdout, 6)


def test_nothing_is_kept_for_choices_where_nothing_is_chosen() -> None:
    inputs = _inputs(32, load_config("ort-int8", {"effort": "fast"}))
    assert len(inputs.calibration) == 28
    assert _ids(inputs.validation) == _ids(inputs.test)
    assert _ids(inputs.ranges) == _ids(inputs.calibration)


def test_what_samples_leaves_over_is_used_first() -> None:
    inputs = _inputs(64, load_config("ort-int8", {"data.samples": 16}))
    assert len(inputs.calibration) == len(inputs.ranges) == 16
    assert len(_ids(inputs.validation) | _ids(inputs.test)) == 4


def test_holdout_0_says_that_the_samples_were_seen() -> None:
    inputs = _inputs(8, load_config("ort-int8", {"effort": "balanced", "verify.holdout": 0}))
    assert len(inputs.test) == 8
    assert inputs.seen == "calibration"


def test_ranges_are_seen_on_everything_but_what_is_reported_on() -> None:
    inputs = _inputs(48)
    ranges, trial, held = (_ids(part) for part in (inputs.ranges, inputs.validation, inputs.test))
    assert ranges | held == {float(k) for k in range(48)}
    assert trial <= ranges
    assert not held & ranges


def test_scores_that_can_only_be_of_one_side_are_told() -> None:
    # Nothing of a Softmax, nor of a gate inside the network, hangs on the side of 0.
    text = """g (float[N,64] x) => (float[N,64] u, float[A,64] v, float[N,64] w, float[N,64] y, float[N,64] z) {
        low = Add(x, below) u = Sigmoid(low) high = Add(x, above) s = Sigmoid(high) v = Reshape(s, sizes)
        both = Add(x, around) w = Sigmoid(both) choice = Add(x, below_too) y = Softmax(choice)
        gate = Add(x, far_below) t = Sigmoid(gate) z = Mul(t, x) }"""
    biases = {"below": -9.0, "above": 9.0, "around": 0.5, "below_too": -10.0, "far_below": -11.0}
    result = quantized(model(text, **biases, sizes=np.asarray([-1, 64])), config="qnn-int8")
    paired = {site.quantized_tensor.name for site in result.plan.sites}
    assert paired >= {"low", "high", "both", "choice", "gate"}
    (warning,) = (warning for warning in result.report.warnings if warning.code == "W150")
    assert "in all samples (high, low)" in warning


def test_a_pool_left_float_between_quantized_operators_is_not_counted_as_quantized() -> None:
    text = """g (float[N,32,8,8] x) => (float[N,32,4,4] y) {
        a = Conv <pads=[1,1,1,1]>(x, w0) r = Relu(a) p = AveragePool <kernel_shape=[2,2], strides=[2,2]>(r)
        c = Conv <pads=[1,1,1,1], strides=[2,2]>(r, w1) y = Add(p, c) }"""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17 for name in ("w0", "w1")}
    report = quantize(model(text, 17, **weights), images(), EVERYTHING).report
    assert [left.subject for left in report.left_float] == ["p/AveragePool"]
    assert [count.op for count in report.ops] == ["Conv"]


@pytest.mark.parametrize(("least", "ratio"), [(0.5, 0.5), (0.8, 0.8), (1.6, 1.0)])
def test_a_model_is_slower_where_the_least_times_say_so_too(least: float, ratio: float) -> None:
    """Rounds of a busy machine: each of int8 takes twice as long, but for its best one."""
    seconds = {"float": [1.0, 1.0, 1.0], "int8": [2.0, 1.0 / least, 2.0]}
    times = {name: summarize_rounds([[second] for second in rounds], 1) for name, rounds in seconds.items()}
    proto = residual()
    measured = time_both(proto, proto, images(1), lambda *_: times, threads=1)
    assert measured is not None
    assert measured.ratio == pytest.approx(ratio)
