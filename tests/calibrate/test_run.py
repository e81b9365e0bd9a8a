"""The numbers a plan gets: from samples, from weights, derived, shared, given, or none with a reason."""

from dataclasses import replace

import numpy as np
import onnx
import pytest

from onnxq.calibrate import calibrate
from onnxq.data import load_data
from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.graph import GraphIndex
from onnxq.numerics import qparams_from_range, weight_qparams
from onnxq.plan import SitePlan
from onnxq.sites import Edge, Role, TensorId
from onnxq.spec import ObserverSpec, PerChannel, QParams, QuantSpec
from tests.calibrate.kit import EXACT, U8, dataset, integers, model, plan, scale_of, site

W = QuantSpec(granularity=PerChannel(0))
B = QuantSpec(bits=32, granularity=PerChannel(0))
WEIGHT = np.random.default_rng(1).standard_normal((3, 2, 3, 3)).astype(np.float32)
WEIGHT[1] = 0
CONV = model(
    """g (float[N,2,5,5] x) => (float[N,3,3,3] y) <float[3] b = {0.5, 1e9, -2.0}> {
        [conv] c = Conv(x, w, b) [act] y = Relu(c) }""",
    w=WEIGHT,
)
IMAGES = np.random.default_rng(2).standard_normal((6, 2, 5, 5)).astype(np.float32)


def conv_plan() -> object:
    x, w = TensorId("x"), TensorId("w")
    return plan(
        site(x),
        site(w, role=Role.WEIGHT, spec=W),
        site("b", role=Role.BIAS, spec=B, derived=(x, w)),
        site("y", role=Role.OUTPUT, bound=(0.0, None)),
    )


def test_ranges_are_those_of_all_samples() -> None:
    rows = integers(7)
    a = rows * np.array([1, -2, 3], np.float32)[:, None]
    found = calibrate(EXACT, plan(site("x"), site("a")), dataset(EXACT, rows))
    for one, values in zip(found.sites, (rows, a), strict=True):
        assert one.qparams.scale == scale_of(values.min(), values.max())
        assert one.qparams.zero_point == np.clip(np.rint(-values.min() / one.qparams.scale), 0, 255)
        assert one.qparams.origin == "minmax over 7 samples"
    assert found.refusals == ()


def test_a_bound_and_the_observer_of_the_site_are_kept_to() -> None:
    rows = integers(7)
    wide = site("y", bound=(0.0, 20.0))
    clipped = site("a", ObserverSpec("percentile", (("percentile", 90.0),)))
    found = calibrate(EXACT, plan(wide, clipped), dataset(EXACT, rows))
    bounded, percentile = (one.qparams for one in found.sites)
    assert bounded.zero_point == 0
    assert np.float32(255) * bounded.scale <= 20
    a = rows * np.array([1, -2, 3], np.float32)[:, None]
    assert percentile.scale < scale_of(a.min(), a.max())
    assert percentile.origin.startswith("percentile")


def test_weights_and_biases_follow_their_kin() -> None:
    x, w, b, _ = (one.qparams for one in calibrate(CONV, conv_plan(), dataset(CONV, IMAGES)).sites)
    plain = weight_qparams(WEIGHT, W)
    np.testing.assert_array_equal(w.scale[[0, 2]], plain.scale[[0, 2]])
    # Channel 1 is dead with a huge bias: its scale is raised until the bias fits into an int32.
    assert w.scale[1] > plain.scale[1]
    assert 1e9 / (x.scale * w.scale[1]) <= 2**29 * 1.001
    np.testing.assert_array_equal(b.scale, x.scale * w.scale)
    assert (b.zero_point == 0).all()
    assert (np.abs(np.array([0.5, 1e9, -2.0]) / b.scale) < 2**31).all()


def test_weights_need_no_samples_and_activations_do() -> None:
    assert calibrate(CONV, plan(site("w", role=Role.WEIGHT, spec=W))).calibrated
    with pytest.raises(PlanError, match="no samples"):
        calibrate(CONV, conv_plan())


def test_given_numbers_stay_and_are_passed_on() -> None:
    given = QParams(np.float32(0.25), np.int32(3), "plan file")
    rows = integers(3)
    shared = plan(site("a", qparams=given, group="g"), site("b", group="g"), site("x"))
    found = calibrate(EXACT, shared, dataset(EXACT, rows))
    assert found.sites[0].qparams == given
    assert found.sites[1].qparams == given
    assert found.sites[2].qparams.scale == scale_of(rows.min(), rows.max())
    assert calibrate(EXACT, found) == found


def test_a_group_has_the_range_of_all_its_members() -> None:
    rows = integers(5)
    a = rows * np.array([1, -2, 3], np.float32)[:, None]
    found = calibrate(EXACT, plan(site("x", group="g"), site("a", group="g")), dataset(EXACT, rows))
    first, second = (one.qparams for one in found.sites)
    assert first == second
    assert first.scale == scale_of(min(rows.min(), a.min()), max(rows.max(), a.max()))
    with pytest.raises(PlanError, match="another spec"):
        calibrate(EXACT, plan(site("x", group="g"), site("a", group="g", spec=QuantSpec())), dataset(EXACT, rows))


def test_an_edge_is_the_tensor_it_reads() -> None:
    found = calibrate(EXACT, plan(site(Edge("skip", 1)), site("x")), dataset(EXACT, integers(4)))
    assert found.sites[0].qparams == found.sites[1].qparams


def test_an_activation_site_on_a_constant_needs_no_run() -> None:
    assert calibrate(EXACT, plan(site("w"))).sites[0].qparams.scale == scale_of(-2, 3)


DERIVED = {"role": Role.BIAS, "spec": B, "derived": (TensorId("x"), TensorId("w"))}


def given(*scale: float) -> QParams:
    array = np.asarray(scale[0] if len(scale) == 1 else scale, np.float32)
    return QParams(array, np.zeros(array.shape, np.int32))


WEIGHT_SITE = site("w", role=Role.WEIGHT, spec=W)
MISFITS = [site("x", qparams=given(0.1)), replace(WEIGHT_SITE, qparams=given(0.1, 0.2)), site("b", **DERIVED)]


@pytest.mark.parametrize(
    ("wrong", "subject", "code", "told"),
    [
        ([site("nothing")], "nothing", "Q404", "no such tensor"),
        ([site(Edge("conv", 7))], "conv/in7", "Q404", "not connected"),
        ([site(Edge("act", 1))], "act/in1", "Q404", "not connected"),
        ([site("x", role=Role.WEIGHT, spec=W)], "x", "Q404", "not a constant"),
        ([site("x", spec=QuantSpec(granularity=PerChannel(0)))], "x", "Q403", "one scale per tensor"),
        ([site("w", role=Role.BIAS, spec=B)], "w", "Q403", "derives from"),
        (MISFITS, "b", "Q407", "do not fit"),
    ],
)
def test_sites_that_do_not_fit_the_model(wrong: list[SitePlan], subject: str, code: str, told: str) -> None:
    with pytest.raises(PlanError, match=told) as caught:
        calibrate(CONV, plan(*wrong), dataset(CONV, IMAGES))
    assert (caught.value.subject, caught.value.code) == (subject, code)


@pytest.mark.parametrize(
    ("observer", "code", "subject"),
    [
        (ObserverSpec("percentil"), "Q310", "w: weight observer 'percentil'"),
        (ObserverSpec("mse", (("bins", 3),)), "Q311", "w: weight observer 'mse'"),
    ],
)
def test_a_wrong_setting_is_named_beside_the_site(observer: ObserverSpec, code: str, subject: str) -> None:
    with pytest.raises(ConfigError) as caught:
        calibrate(CONV, plan(replace(WEIGHT_SITE, observer=observer)))
    assert (caught.value.code, caught.value.subject) == (code, subject)


def test_nan_in_a_weight_names_it() -> None:
    broken = onnx.ModelProto.FromString(CONV.SerializeToString())
    bad = WEIGHT.copy()
    bad[0, 0, 0, 0] = np.nan
    broken.graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(bad, "w"))
    with pytest.raises(CalibrationError) as raised:
        calibrate(broken, plan(WEIGHT_SITE))
    assert (raised.value.code, raised.value.subject) == ("Q503", "w")


def test_a_constant_of_nan_which_marks_what_is_absent_has_no_range() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { [less] b = Less(x, c) [act] r = Relu(x) [choice] y = Where(b, c, r) }"
    net = model(text, c=np.full(4, np.nan, np.float32))
    done = calibrate(net, plan(site("r"), site("c")), dataset(net, np.ones((3, 4), np.float32)))
    assert [one.qparams is not None for one in done.sites] == [True, False]
    assert [(one.subject, one.code) for one in done.refusals] == [("c", "R106")]
    assert "NaN" in done.refusals[0].reason


EXP = model("g (float[N,4] x) => (float[N,4] y) { [exp] e = Exp(x) [act] y = Relu(e) }")
LOG = model("g (float[N,4] x) => (float[N,4] y) { [log] l = Log(x) [act] y = Relu(l) }")


@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse", "entropy", "aciq", "moving_average"])
@pytest.mark.parametrize("batch", [1, 4])
def test_minus_inf_leaves_no_range_and_inf_and_nan_name_tensor_and_sample(observer: str, batch: int) -> None:
    rows = np.full((7, 4), 2, np.float32)
    rows[5, 1] = 0
    done = calibrate(LOG, plan(site("x"), site("l", observer)), dataset(LOG, rows), batch=batch)
    assert [one.qparams is not None for one in done.sites] == [True, False]
    (refusal,) = done.refusals
    assert (refusal.subject, refusal.code) == ("l", "R106")
    assert "holds -inf" in refusal.reason
    with pytest.raises(CalibrationError) as raised:
        calibrate(EXP, plan(site("e", observer)), dataset(EXP, 100 * rows), batch=batch)
    assert raised.value.subject == "e"
    assert "data, sample 0" in raised.value.cause
    assert "inf among" in raised.value.cause
    # The mask of sample 4 is no fault, in the batch of one that is.
    rows[4:6, 1] = 0, -1
    with pytest.raises(CalibrationError, match=r"(?s)1 NaN.*sample 5"):
        calibrate(LOG, plan(site("l", observer)), dataset(LOG, rows), batch=batch)


BRANCHES = model(
    """g (bool deep, float[N,1,4] x) => (float[N,1,4] y) <float[1,1,1] w = {2}, float[1] b = {1}> {
        [choose] y = If (deep) <
            then_branch = t () => (float[N,1,4] yt) { [conv_t] ct = Conv(x, w, b) [act_t] yt = Relu(ct) },
            else_branch = e () => (float[N,1,4] ye) {
                [conv_e] ce = Conv(x, w, b)
                [inner] ye = If (deep) <
                    then_branch = et () => (float[N,1,4] yet) { [never] n = Neg(ce) [act_n] yet = Relu(n) },
                    else_branch = ee () => (float[N,1,4] yee) { [always] yee = Relu(ce) }>
            }>
    }"""
)


def test_a_branch_that_never_ran_has_no_numbers_and_says_so() -> None:
    rows = np.arange(-8, 8, dtype=np.float32).reshape(4, 1, 4)
    data = {"deep": np.zeros(4, bool), "x": rows[:, None]}
    then, other = "choose.then_branch", "choose.else_branch"
    weight = Edge("conv_t", 1, then)
    sites = plan(
        site(TensorId("ct", then)),
        site(TensorId("ce", other)),
        site(TensorId("n", f"{other}/inner.then_branch")),
        site(TensorId("yee", f"{other}/inner.else_branch")),
        site(weight, role=Role.WEIGHT, spec=W),
        site(Edge("conv_t", 2, then), role=Role.BIAS, spec=B, derived=(TensorId("ct", then), weight)),
    )
    found = calibrate(BRANCHES, sites, load_data(data, GraphIndex(BRANCHES).inputs))
    unrun, ran, deeper, inner, kept, bias = (one.qparams for one in found.sites)
    assert (unrun, deeper, bias) == (None, None, None)
    assert kept is not None
    assert ran == qparams_from_range(-15, 15, U8, origin="minmax over 4 samples")
    assert inner == qparams_from_range(0, 15, U8, origin="minmax over 4 samples")
    assert [refusal.subject for refusal in found.refusals] == [str(sites.sites[0].site), str(sites.sites[2].site)]
    assert all("never ran" in refusal.reason for refusal in found.refusals)


def test_tensors_of_loops_are_seen_or_refused() -> None:
    loop = model(
        """g (int64 trips, bool c, float[3] x) => (float[3] y) {
            [yes_node] yes = Constant <value = bool {1}> ()
            [loop] y = Loop (trips, yes, x) <
                body = b (int64 i, bool c_in, float[3] v) => (bool c_out, float[3] v_out) {
                    [go] c_out = Identity(c_in) [double] d = Add(v, v)
                    [choose] v_out = If (c) <
                        then_branch = t () => (float[3] a) { [n] k = Neg(d) [r] a = Relu(k) },
                        else_branch = e () => (float[3] z) { [i] z = Identity(d) }>
                }>
        }"""
    )
    inside = TensorId("k", "loop.body/choose.then_branch")
    sites = plan(site(TensorId("d", "loop.body")), site(inside))
    feed = {"trips": np.array(3), "c": np.array(False), "x": np.array([1, 2, 3], np.float32)}
    found = calibrate(loop, sites, dataset(loop, [feed]))
    assert found.sites[0].qparams == qparams_from_range(0, 24, U8, origin="minmax")
    assert found.sites[1].qparams is None
    assert [(r.subject, "some iterations" in r.reason) for r in found.refusals] == [(str(inside), True)]


def test_half_precision_tensors_are_measured_as_they_are() -> None:
    half = model("g (float16[N,4] x) => (float16[N,4] y) { [add] y = Add(x, x) }")
    rows = np.array([[-1, 0, 1, 1000], [2, 3, 4, 5]], np.float16)
    found = calibrate(half, plan(site("y")), dataset(half, rows))
    assert found.sites[0].qparams == qparams_from_range(-2, 2000, U8, origin="minmax over 2 samples")
