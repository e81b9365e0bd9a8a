"""Switches: everything on is the quantized model to the bit, everything off the float one, whatever made the file."""

import mmap
from collections.abc import Callable
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.quantization import QuantFormat, quantize_static

import onnxq
from onnxq.backends import load_config
from onnxq.config import Config, TensorConfig
from onnxq.errors import ModelError
from onnxq.evaluation import toggled, trials
from onnxq.evaluation.accumulator import measure_error
from onnxq.evaluation.toggled import toggle_model
from onnxq.graph import name_nodes, storage
from onnxq.numerics.machine import map_in_threads
from onnxq.passes.assembly import build_quantized
from onnxq.passes.base import RunContext
from onnxq.pipeline.prepared import load_state
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.engines.diff.models import chain, pairs, samples
from tests.graph.kit import model
from tests.passes.kit import parse
from tests.pipeline import models
from tests.pipeline.models import EVERYTHING, Reader, images, residual
from tests.pipeline.test_traps import branches

FEEDS = {"x": images(1, seed=9)["x"]}


def outputs(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return Session(proto, optimize=False).run(feeds)


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], least: float = 100.0) -> bool:
    """But for the order of sums: ORT packs weights that are constants, and not those that are fed."""
    return a.keys() == b.keys() and all(measure_error(a[name], b[name]).sqnr_db > least for name in a)


class Case(NamedTuple):
    """A float model, its quantized one, and inputs of both."""

    plain: onnx.ModelProto
    quantized: onnx.ModelProto
    feeds: dict[str, np.ndarray] = FEEDS


LINES = {"x": samples(4, seed=3)["x"]}
TEXT = "g (float[4,32] x) => (float[4,32] y) { h = Gemm <transB=1>(x, w) y = MatMul(h, v) }"
GEMM = parse(TEXT, w=samples(32)["x"], v=samples(32, seed=1)["x"])


@cache
def quantize(**update: Any) -> onnxq.Result:
    return models.quantize(residual(), images(), EVERYTHING.model_copy(update=update))


def prepare(proto: onnx.ModelProto, target: str = "ort") -> onnx.ModelProto:
    return load_state(proto, RunContext(config=Config(target=target))).model


def by_preset(preset: str, proto: onnx.ModelProto) -> Case:
    data = [{"x": part} for part in np.split(samples(48)["x"], 12)]
    config = load_config(preset).model_copy(update={"rules": EVERYTHING.rules, "effort": "fast"})
    result = models.quantize(proto, data, config)
    return Case(prepare(proto, result.plan.target), result.model, LINES)


def branching(flag: bool) -> Case:
    data = [{"x": s[None], "flag": np.array(k % 2 == 0)} for k, s in enumerate(images()["x"])]
    result = models.quantize(branches(), data)
    return Case(prepare(branches()), result.model, {**FEEDS, "flag": np.array(flag)})


def by_onnxruntime() -> Case:
    with TemporaryDirectory() as folder:
        float_path, path = f"{folder}/m.onnx", f"{folder}/q.onnx"
        onnx.save(name_nodes(residual()), float_path)
        quantize_static(float_path, path, Reader(images()["x"]), quant_format=QuantFormat.QDQ)
        return Case(name_nodes(residual()), onnx.load(path))


PRESETS = ("ort-int4-weights", "ort-int8-weights", "trt-int8", "ort-uint16-activations")
CASES: dict[str, Callable[[], Case]] = {
    "our own": lambda: Case(prepare(residual()), quantize().model),
    "a branch that runs": lambda: branching(True),
    "a branch that does not": lambda: branching(False),
    **{preset: partial(by_preset, preset, chain()) for preset in PRESETS},
    "a Gemm that becomes a MatMul": lambda: by_preset("ort-int4-weights", GEMM),
    "pairs made by hand, without notes": lambda: Case(name_nodes(chain()), pairs(chain()), LINES),
    "another tool's": by_onnxruntime,
}


@pytest.mark.recent_ort
@pytest.mark.parametrize("name", CASES)
def test_everything_on_is_the_quantized_model_and_everything_off_the_float_one(name: str) -> None:
    plain, quantized, feeds = CASES[name]()
    board = toggle_model(plain, quantized)
    assert board.fixed == ()
    assert board.switches
    assert close(board.run(feeds, board.switches), outputs(quantized, feeds), 50.0)
    assert close(board.run(feeds, ()), outputs(plain, feeds))
    # So do boards on which all switches but one are constants.
    first, everything = board.switches[0].feed, frozenset(one.feed for one in board.switches)
    for some in (frozenset(), everything - {first}):
        fixed = board.board.fix_switches([some, some | {first}])
        assert len(fixed.off) < max(len(board.switches), 2) or "branch" in name
        assert close(fixed.run(feeds, some | {first}), board.board.run(feeds, some | {first}), 50.0)
    inner = [one for one in board.switches if one.site.startswith("If.then_branch::")]
    assert bool(inner) == ("branch" in name)
    if name == "a branch that does not":
        # It costs nothing.
        assert close(board.run(feeds, inner), outputs(plain, feeds))
    if name == "our own":
        roles = [one.role for one in board.switches]
        assert roles.count(Role.WEIGHT) == roles.count(Role.BIAS) == 4
        assert {one.site for one in board.switches} >= {"w0", "w1", "w2", "w3", "x"}


def test_values_of_a_large_model_lie_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    models = prepare(residual()), quantize().model
    usual = toggle_model(*models)
    monkeypatch.setattr(toggled, "is_large_model", lambda _: True)
    monkeypatch.setattr(storage, "_WORTH_SPOOLING", 1)
    large = toggle_model(*models)
    constants = [value for value in large.board.on.values() if value.ndim]
    assert [isinstance(value.base.base.obj, mmap.mmap) for value in constants] == [True] * 8
    assert (large.board.large, usual.board.large) == (True, False)
    some = [[one for one in board.switches if one.role is Role.WEIGHT] for board in (large, usual)]
    # Twice: pages that were let go of come back.
    for _ in range(2):
        for mine, other in ((large.switches, usual.switches), ((), ()), some):
            found, wanted = large.run(FEEDS, mine), usual.run(FEEDS, other)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_board_opens_its_session_once_and_only_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large parts of a trial have boards of their own, and none of the whole is opened for them."""
    opened = Mock(side_effect=trials.Session)
    monkeypatch.setattr(trials, "Session", opened)
    board = toggle_model(prepare(residual()), quantize().model)
    everything = frozenset(switch.feed for switch in board.switches)
    boards = [board.board.fix_switches([everything]), board.board] * 8
    assert opened.call_count == 1
    list(map_in_threads(lambda each: each.run(FEEDS, everything), boards, threads=4))
    assert opened.call_count == 2
    opened.side_effect = ModelError("loop", "has constants")
    with pytest.raises(ModelError):
        board.board.fix_switches([everything])


@settings(max_examples=20, deadline=None)
@given(chosen=st.sets(st.integers(0, 12)))
def test_each_switch_does_what_leaving_it_out_of_the_file_does(chosen: set[int]) -> None:
    """The emitter with some sites only is the independent witness."""
    # Without int32 biases, which cannot be told apart from their weights.
    prepared, result = load_state(residual()), quantize(bias="float")
    board = toggle_model(prepared.model, result.model)
    sites = [site for k, site in enumerate(result.plan.sites) if k in chosen]
    names = {str(site.site) for site in sites}
    left = build_quantized(prepared, result.plan.with_sites(tuple(sites)))
    on = [one for one in board.switches if one.site in names]
    assert len(on) == len(sites)
    # One rounding of a pair flipped by the last bit of a sum is 60 dB.
    assert close(board.run(FEEDS, on), outputs(left, FEEDS), 50.0)


def test_corrected_biases_are_switched_with_their_node() -> None:
    result = quantize(
        effort="balanced",
        bias="float",
        skip=("cross_layer_equalization", "smoothquant"),
        weights=TensorConfig(granularity="channel", bits=4, narrow_range=True),
    )
    plain = prepare(residual())
    board = toggle_model(plain, result.model)
    assert close(board.run(FEEDS, board.switches), outputs(result.model, FEEDS), 50.0)
    assert close(board.run(FEEDS, ()), outputs(plain, FEEDS))
    corrected = {reader for one in board.switches if one.role is Role.BIAS for reader in one.readers}
    assert corrected == {bias.edge.node for bias in result.plan.biases} != set()


def test_weights_that_the_float_model_does_not_know_stay_on_and_are_named() -> None:
    proto = chain()
    for node in proto.graph.node:
        node.name = f"other_{node.name}"
    quantized = pairs(chain())
    board = toggle_model(proto, quantized)
    assert {refusal.subject for refusal in board.fixed} == {"w0", "w1", "w2"}
    assert close(board.run(LINES, board.switches), outputs(quantized, LINES), 50.0)


def test_a_pair_serves_the_operators_behind_the_next_pair() -> None:
    """Files for the NPU turn 8 bits into 16 so: the float model has none of these nodes, and rules name operators."""
    plain = parse("g (float[2,3] x) => (float[2,3] y) { m = Neg(x) y = Sigmoid(m) }")
    text = """g (float[2,3] x) => (float[2,3] y) {
        m = Neg(x) a = QuantizeLinear(m, s, z) b = DequantizeLinear(a, s, z)
        c = QuantizeLinear(b, t, u) d = DequantizeLinear(c, t, u) y = Sigmoid(d) }"""
    board = toggle_model(plain, parse(text, 21, s=0.1, z=np.uint8(128), t=0.001, u=np.uint16(32768)))
    assert [(one.readers, one.ops) for one in board.switches] == [(("y/Sigmoid",), ("Sigmoid",))] * 2


def test_integers_between_a_quantize_and_a_dequantize_node_stay_on() -> None:
    text = """g (float[2,3] x) => (float[2,3] y) {
        q = QuantizeLinear(x, s, z) r = Reshape(q, shape) y = DequantizeLinear(r, s, z) }"""
    proto = parse(text, s=0.1, z=np.uint8(0), shape=np.array([2, 3]))
    board = toggle_model(proto, proto)
    feeds = {"x": np.ones((2, 3), np.float32)}
    assert (board.switches, len(board.fixed)) == ((), 2)
    assert close(board.run(feeds, ()), outputs(proto, feeds))


def test_a_single_number_of_a_branch_keeps_its_rank() -> None:
    text = """g (float[2] x, bool flag) => (float y) {{ y = If (flag) <
        then_branch = most () => (float a) {{ m = ReduceMax <keepdims=0>(x) {read} a = Add(m, number) }},
        else_branch = least () => (float b) {{ b = ReduceMin <keepdims=0>(x) }}> }}"""
    plain = model(text.format(read=""), 17, number=np.array(0.3, np.float32))
    stored = {"codes": np.array(1, np.uint8), "scale": np.array(0.25, np.float32)}
    quantized = model(text.format(read="number = DequantizeLinear(codes, scale)"), 17, **stored)
    board = toggle_model(name_nodes(plain), name_nodes(quantized))
    feeds = {"x": np.arange(2, dtype=np.float32), "flag": np.array(True)}
    results = [board.run(feeds, on)["y"] for on in (board.switches, ())]
    assert [(result.shape, result.item()) for result in results] == [((), 1.25), ((), pytest.approx(1.3))]
