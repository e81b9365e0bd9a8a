"""Taps give the very tensors of the model, wherever they lie, and change nothing else."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

from onnxq.errors import ModelError
from onnxq.graph import get_index, strip_weights
from onnxq.runtime import Session, Shapes, observe_shapes, tap_tensors
from onnxq.runtime.tap import list_float_tensors
from onnxq.sites import TensorId
from tests.calibrate.kit import model

X = np.array([[-2, -1, 1, 2], [3, -4, 5, -6]], np.float32)

CHAIN = model(
    """g (float[N,4] x) => (float[N,4] y) <float[4] w = {1,2,3,4}> {
        [mul] m = Mul(x, w) [relu] r = Relu(m) [neg] y = Neg(r) [side] unused = Exp(m) }"""
)
NESTED = model(
    """g (bool outer, bool inner, float[N,4] x) => (float[N,4] y) {
        [pre] p = Relu(x)
        [choose] y = If (outer) <
            then_branch = a () => (float[N,4] ya) {
                [twice] t = Add(p, p)
                [deeper] ya = If (inner) <
                    then_branch = aa () => (float[N,4] yaa) { [cube] c = Mul(t, p) [out_aa] yaa = Neg(c) },
                    else_branch = ab () => (float[N,4] yab) { [out_ab] yab = Identity(t) }>
            },
            else_branch = b () => (float[N,4] yb) { [half] h = Neg(p) [out_b] yb = Relu(h) }>
    }"""
)
THEN = "choose.then_branch"
CUBE = TensorId("c", f"{THEN}/deeper.then_branch")
TWICE = TensorId("t", THEN)
HALF = TensorId("h", "choose.else_branch")


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], *, optimize: bool = True) -> dict[str, np.ndarray]:
    return Session(proto, optimize=optimize, threads=1).run(feeds)


def test_main_graph_inputs_constants_and_outputs() -> None:
    wanted = [TensorId("m"), TensorId("x"), TensorId("w"), TensorId("y")]
    proto, outputs, refusals = tap_tensors(CHAIN, wanted)
    found = run(proto, {"x": X})
    assert refusals == ()
    m = X * np.arange(1, 5, dtype=np.float32)
    for name, value in {"m": m, "x": X, "w": np.arange(1, 5), "y": -np.maximum(m, 0)}.items():
        np.testing.assert_array_equal(found[outputs[TensorId(name)]], value)


def test_the_given_model_is_not_changed() -> None:
    before = NESTED.SerializeToString(deterministic=True)
    tap_tensors(NESTED, [CUBE, HALF])
    assert NESTED.SerializeToString(deterministic=True) == before


def test_only_the_taps_are_computed() -> None:
    proto = tap_tensors(CHAIN, [TensorId("m")], only=True).proto
    assert [node.name for node in proto.graph.node] == ["mul"]
    assert list(run(proto, {"x": X})) == ["m"]


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_if_bodies_give_their_tensors_or_nothing(outer: bool, inner: bool, optimize: bool) -> None:
    proto, outputs, refusals = tap_tensors(NESTED, [CUBE, TWICE, HALF])
    feeds = {"outer": np.array(outer), "inner": np.array(inner), "x": X}
    found = run(proto, feeds, optimize=optimize)
    p = np.maximum(X, 0)
    expected = {
        TWICE: 2 * p if outer else None,
        CUBE: 2 * p * p if outer and inner else None,
        HALF: None if outer else -p,
    }
    assert refusals == ()
    for tensor, value in expected.items():
        got = found[outputs[tensor]]
        if value is None:
            assert got.size == 0
        else:
            np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(found["y"], run(NESTED, feeds, optimize=optimize)["y"])


def choose(then: str, other: str, given: str = "float[N]", made: str = "float[N]", front: str = "") -> onnx.ModelProto:
    """y = ya of the nodes of `then`, or yb of those of `other`, behind those of `front`."""
    return model(
        f"""g (bool c, {given} x) => ({made} y) {{ {front} [choose] y = If (c) <
            then_branch = a () => ({made} ya) {{ {then} }}, else_branch = b () => ({made} yb) {{ {other} }}> }}"""
    )


def test_half_precision_bodies_have_dummies_of_their_type() -> None:
    half = choose("[n] t = Neg(x) [r] ya = Relu(t)", "[i] yb = Identity(x)", "float16[N]", "float16[N]")
    tensor = TensorId("t", THEN)
    proto, outputs, _ = tap_tensors(half, [tensor])
    found = run(proto, {"c": np.array(False), "x": np.ones(3, np.float16)})[outputs[tensor]]
    assert found.dtype == np.float16
    assert found.size == 0


def test_loop_bodies_give_all_iterations_stacked_and_not_what_some_of_them_lack() -> None:
    loop = model(
        """g (int64 trips, float[3] x) => (float[3] y) {
            [yes_node] yes = Constant <value = bool {1}> ()
            [loop] y = Loop (trips, yes, x) <
                body = b (int64 i, bool c_in, float[3] v) => (bool c_out, float[3] v_out) {
                    [go] c_out = Identity(c_in) [plus] s = Add(v, v)
                    [choose] v_out = If (c_in) <
                        then_branch = t () => (float[3] a) { [n] k = Abs(s) [minus] a = Neg(s) },
                        else_branch = e () => (float[3] z) { [i] z = Identity(s) }>
                }>
        }"""
    )
    tensor, seldom = TensorId("s", "loop.body"), TensorId("k", "loop.body/choose.then_branch")
    proto, outputs, refusals = tap_tensors(loop, [tensor, seldom])
    x = np.array([1, 2, 3], np.float32)
    found = run(proto, {"trips": np.array(3), "x": x})
    assert [(refusal.subject, refusal.code) for refusal in refusals] == [(str(seldom), "R107")]
    np.testing.assert_array_equal(found[outputs[tensor]], np.stack([2 * x, -4 * x, 8 * x]))
    assert tensor not in observe_shapes(loop, [{"trips": np.array(3), "x": x}])


def test_scan_bodies_give_all_iterations_stacked() -> None:
    scan = model(
        """g (float[T,3] x, float[3] zero) => (float[3] total, float[T,3] sums) {
            [scan] total, sums = Scan <num_scan_inputs = 1, scan_output_axes = [0],
                body = b (float[3] state, float[3] row) => (float[3] next, float[3] sum) {
                    [double] d = Add(row, row) [add] next = Add(state, d) [copy] sum = Identity(next)
                }> (zero, x) }"""
    )
    tensor = TensorId("d", "scan.body")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    proto, outputs, refusals = tap_tensors(scan, [tensor])
    found = run(proto, {"x": x, "zero": np.zeros(3, np.float32)})
    assert refusals == ()
    np.testing.assert_array_equal(found[outputs[tensor]], 2 * x)
    np.testing.assert_array_equal(found["total"], 2 * x.sum(0))


def test_names_in_use_are_left_alone() -> None:
    taken = choose("[n] t = Neg(u) [r] ya = Relu(t)", "[i] yb = Identity(x)", front="[a] u = Neg(x)")
    taken.graph.node[0].output[0] = "t/Identity"
    taken.graph.node[1].attribute[0].g.node[0].input[0] = "t/Identity"
    tensor = TensorId("t", THEN)
    proto, outputs, _ = tap_tensors(taken, [tensor])
    assert outputs[tensor] != "t/Identity"
    x = np.array([-1, 2], np.float32)
    np.testing.assert_array_equal(run(proto, {"c": np.array(True), "x": x})[outputs[tensor]], x)


def test_a_tensor_that_is_not_there_is_named_with_its_neighbours() -> None:
    with pytest.raises(ModelError, match="did you mean"):
        tap_tensors(NESTED, [TensorId("tt", THEN)])


def test_shapes_are_those_of_the_run_and_need_no_values() -> None:
    feeds = {"outer": np.array(True), "inner": np.array(False), "x": X}
    shapes = observe_shapes(NESTED, [feeds])
    assert shapes[TensorId("x")] == shapes[TensorId("p")] == shapes[TWICE] == (2, 4)
    assert CUBE not in shapes
    assert HALF not in shapes
    both = observe_shapes(NESTED, [feeds, {**feeds, "outer": np.array(False), "x": X[:1]}])
    assert both[HALF] == (1, 4)
    assert both[TWICE] == (2, 4)


def test_a_scalar_is_told_from_a_branch_that_did_not_run() -> None:
    highest, lowest = (f"{op}<keepdims = 0>(x)" for op in ("ReduceMax", "ReduceMin"))
    scalar = choose(f"[m] t = {highest} [r] ya = Relu(t)", f"[n] s = {lowest} [i] yb = Identity(s)", made="float")
    shapes = observe_shapes(scalar, [{"c": np.array(True), "x": np.ones(3, np.float32)}])
    assert shapes[TensorId("t", THEN)] == ()
    assert TensorId("s", "choose.else_branch") not in shapes


def test_constants_and_integers_have_no_observed_shape() -> None:
    mixed = model(
        """g (float[N,4] x) => (float[N,4] y) {
            [c] k = Constant <value = float[4] {1, 2, 3, 4}> () [s] dims = Shape(x) [m] y = Mul(x, k) }"""
    )
    assert set(observe_shapes(mixed, [{"x": X}])) == {TensorId("x"), TensorId("y")}


@settings(max_examples=25, deadline=None)
@given(
    ops=st.lists(st.sampled_from(["Relu", "Neg", "Abs", "Tanh", "Floor"]), min_size=1, max_size=6),
    chosen=st.sets(st.integers(0, 5), min_size=1),
    rows=st.integers(1, 3),
)
def test_any_taps_give_what_the_model_computes(ops: list[str], chosen: set[int], rows: int) -> None:
    lines = [f"[n{k}] t{k + 1} = {op}(t{k})" for k, op in enumerate(ops)]
    proto = model(f"g (float[N,2] t0) => (float[N,2] t{len(ops)}) {{ {' '.join(lines)} }}")
    x = np.linspace(-2, 2, 2 * rows, dtype=np.float32).reshape(rows, 2)
    value, values = x, {TensorId("t0"): x}
    functions = {
        "Relu": lambda v: np.maximum(v, 0),
        "Neg": np.negative,
        "Abs": np.abs,
        "Tanh": np.tanh,
        "Floor": np.floor,
    }
    for k, op in enumerate(ops):
        value = functions[op](value)
        values[TensorId(f"t{k + 1}")] = value
    wanted = [TensorId(f"t{k % (len(ops) + 1)}") for k in sorted(chosen)]
    tapped = tap_tensors(proto, wanted, only=True)
    found = run(tapped.proto, {"t0": x}, optimize=False)
    assert set(tapped.outputs) == set(wanted)
    for tensor, name in tapped.outputs.items():
        np.testing.assert_allclose(found[name], values[tensor], atol=1e-6)
    assert {v.type.tensor_type.elem_type for v in tapped.proto.graph.input} == {TensorProto.FLOAT}


# ---- Shapes that tensors have in a run: of which tensors, and of which feeds they are known without one.


SIZES = model(
    """g (float[N,4] x, int64 count) => (float[M,4] y) <float[4] w = {1,2,3,4}> {
        [c] k = Constant<value = float[4] {1, 2, 3, 4}>() [m] m = Mul(x, k) [h] h = Cast<to=10>(m) [s] dims = Shape(x)
        [b] b = Cast<to=1>(h) [t] y = Concat<axis=0>(b, x) }"""
)
BRANCHES = model(
    """g (bool c, float[N,4] x) => (float[N,4] y) {
        [p] p = Relu(x)
        [i] y = If (c) <then_branch = t () => (float[N,4] a) { [n] a = Neg(p) },
                        else_branch = e () => (float[N,4] b) { [l] b = Loop (trips, go, p) <
                            body = q (int64 k, bool on, float[N,4] v) => (bool off, float[N,4] o) {
                                [u] off = Identity(on) [v] o = Abs(v) }> }>
    }"""
)
BRANCHES.graph.initializer.extend(
    [numpy_helper.from_array(np.array(2), "trips"), numpy_helper.from_array(np.array(True), "go")]
)
FEEDS = {"x": np.ones((3, 4), np.float32), "count": np.array(1)}


def test_which_tensors_have_a_shape_to_be_told() -> None:
    """Floats of every width that are computed: no constants, no integers, nothing inside a loop."""
    assert [str(t) for t in list_float_tensors(get_index(SIZES))] == ["x", "m", "h", "b", "y"]
    found = [str(t) for t in list_float_tensors(get_index(BRANCHES))]
    assert sorted(found) == ["i.else_branch::b", "i.then_branch::a", "p", "x", "y"]


def test_a_probe_tells_the_shapes_it_was_asked_for() -> None:
    probe = Shapes(SIZES, [TensorId("m"), TensorId("y")])
    assert probe.of(FEEDS) == {TensorId("m"): (3, 4), TensorId("y"): (6, 4)}
    assert probe.of({**FEEDS, "x": np.ones((1, 4), np.float32)})[TensorId("y")] == (2, 4)
    assert Shapes(SIZES, []).of(FEEDS) == {}


def test_of_several_samples_the_first_that_made_a_tensor_counts() -> None:
    samples = [{"c": np.array(c), "x": np.ones((n, 4), np.float32)} for c, n in ((True, 1), (True, 2), (False, 3))]
    found = {str(tensor): shape for tensor, shape in observe_shapes(BRANCHES, samples).items()}
    assert found == {"x": (1, 4), "p": (1, 4), "y": (1, 4), "i.then_branch::a": (1, 4), "i.else_branch::b": (3, 4)}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    real = Session.run
    monkeypatch.setattr(Session, "run", lambda self, *args: counts.append(1) or real(self, *args))
    return counts


def test_a_light_model_remembers_shapes_for_feeds_alike(sessions: list[int]) -> None:
    light, asked = strip_weights(SIZES), [TensorId("m"), TensorId("y")]
    first = Shapes(light, asked).of(FEEDS)
    assert len(sessions) == 1
    # Of another look at the same graph, for other values and fewer tensors.
    assert Shapes(light, asked[:1]).of({**FEEDS, "x": np.zeros((3, 4), np.float32)}) == {asked[0]: first[asked[0]]}
    assert len(sessions) == 1
    assert Shapes(light, asked).of({**FEEDS, "x": np.ones((5, 4), np.float32)})[asked[1]] == (10, 4)
    assert len(sessions) == 2
    assert Shapes(light, [TensorId("b")]).of(FEEDS) == {TensorId("b"): (3, 4)}
    assert len(sessions) == 3


@pytest.mark.parametrize("light", [False, True])
def test_where_values_decide_which_branch_runs_every_sample_is_run(light: bool, sessions: list[int]) -> None:
    branching = strip_weights(BRANCHES) if light else BRANCHES
    shapes = Shapes(branching, [TensorId("a", "i.then_branch"), TensorId("p")])
    x = np.ones((2, 4), np.float32)
    assert set(shapes.of({"c": np.array(True), "x": x})) == {TensorId("a", "i.then_branch"), TensorId("p")}
    assert set(shapes.of({"c": np.array(False), "x": x})) == {TensorId("p")}
    assert len(sessions) == 2
