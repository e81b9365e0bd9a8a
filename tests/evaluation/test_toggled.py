"""Switches: everything on is the quantized model to the bit, everything off the float one, whatever made the file."""

from __future__ import annotations

import mmap

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

import onnxq
from onnxq.config import Config, Rule, TensorConfig, load_config
from onnxq.evaluation import toggled
from onnxq.evaluation.accumulator import measure_error
from onnxq.evaluation.toggled import toggle_model
from onnxq.graph import name_nodes, stored
from onnxq.passes.base import RunContext
from onnxq.pipeline.prepared import load_state
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.engines.diff.models import chain, pairs, samples
from tests.pipeline.models import EVERYTHING, images, residual
from tests.pipeline.test_traps import branches

FEEDS = {"x": images(1, seed=9)["x"]}


def outputs(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return Session(proto, optimize=False).run(feeds)


def close(a: dict[str, np.ndarray], b: dict[str, np.ndarray], least: float = 100.0) -> bool:
    """But for the order of sums: ORT packs weights that are constants, and not those that are fed."""
    return a.keys() == b.keys() and all(measure_error(a[name], b[name]).sqnr_db > least for name in a)


@pytest.fixture(scope="module")
def made() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    result = onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False})
    return load_state(residual()).model, result.model


def test_all_on_and_all_off(made: tuple[onnx.ModelProto, onnx.ModelProto]) -> None:
    plain, quantized = made
    board = toggle_model(plain, quantized)
    assert board.fixed == ()
    assert close(board.run(FEEDS, board.switches), outputs(quantized, FEEDS), 50.0)
    assert close(board.run(FEEDS, ()), outputs(plain, FEEDS))
    roles = [one.role for one in board.switches]
    assert roles.count(Role.WEIGHT) == roles.count(Role.BIAS) == 4
    assert {one.site for one in board.switches} >= {"w0", "w1", "w2", "w3", "x"}


def test_values_of_a_large_model_lie_in_a_file(
    made: tuple[onnx.ModelProto, onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = toggle_model(*made)
    monkeypatch.setattr(toggled, "is_large_model", lambda _: True)
    monkeypatch.setattr(stored, "_WORTH_SPOOLING", 1)
    large = toggle_model(*made)
    constants = [value for value in large.board.on.values() if value.ndim]
    assert len(constants) == 8
    assert all(isinstance(value.base.base.obj, mmap.mmap) for value in constants)
    for board in (large, usual):
        assert board.board.large == (board is large)
    some = [[one for one in board.switches if one.role is Role.WEIGHT] for board in (large, usual)]
    # Twice: pages that were let go of come back.
    for _ in range(2):
        for mine, other in ((large.switches, usual.switches), ((), ()), some):
            found, wanted = large.run(FEEDS, mine), usual.run(FEEDS, other)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@settings(max_examples=20, deadline=None)
@given(chosen=st.sets(st.integers(0, 12)))
def test_each_switch_does_what_leaving_it_out_of_the_file_does(chosen: set[int]) -> None:
    """The emitter with some sites only is the independent witness."""
    from onnxq.passes.assembly.model import build_quantized

    prepared, result = _witness()
    board = toggle_model(prepared.model, result.model)
    sites = [site for k, site in enumerate(result.plan.sites) if k in chosen]
    names = {str(site.site) for site in sites}
    left = build_quantized(prepared, result.plan.with_sites(tuple(sites)))
    on = [one for one in board.switches if one.site in names]
    assert len(on) == len(sites)
    # One rounding of a pair flipped by the last bit of a sum is 60 dB.
    assert close(board.run(FEEDS, on), outputs(left, FEEDS), 50.0)


_CACHE: list[tuple] = []


def _witness() -> tuple:
    if not _CACHE:
        # Without int32 biases, which cannot be told apart from their weights.
        config = EVERYTHING.model_copy(update={"bias": "float"})
        _CACHE.append(
            (load_state(residual()), onnxq.quantize(residual(), images(), config, overrides={"latency": False}))
        )
    return _CACHE[0]


def test_corrected_biases_are_switched_with_their_node() -> None:
    config = Config(
        rules=(Rule(op="*", set={"quantize": True}),),  # type: ignore[arg-type]
        effort="balanced",
        bias="float",
        skip=("cross_layer_equalization", "smoothquant"),
        weights=TensorConfig(granularity="channel", bits=4, narrow_range=True),
    )
    result = onnxq.quantize(residual(), images(24), config, overrides={"latency": False})
    assert result.plan.biases
    plain = load_state(residual()).model
    board = toggle_model(plain, result.model)
    assert close(board.run(FEEDS, board.switches), outputs(result.model, FEEDS), 50.0)
    assert close(board.run(FEEDS, ()), outputs(plain, FEEDS))
    corrected = {reader for one in board.switches if one.role is Role.BIAS for reader in one.readers}
    assert corrected == {bias.edge.node for bias in result.plan.biases}


def test_inside_branches() -> None:
    data = [{"x": s[None], "flag": np.array(k % 2 == 0)} for k, s in enumerate(images()["x"])]
    result = onnxq.quantize(branches(), data, EVERYTHING, overrides={"latency": False})
    plain = load_state(branches()).model
    board = toggle_model(plain, result.model)
    assert board.fixed == ()
    for flag in (True, False):
        feeds = {**FEEDS, "flag": np.array(flag)}
        assert close(board.run(feeds, board.switches), outputs(result.model, feeds), 50.0)
        assert close(board.run(feeds, ()), outputs(plain, feeds))
    inner = [one for one in board.switches if one.site.startswith("If.then_branch::")]
    assert inner
    # A branch that does not run costs nothing.
    feeds = {**FEEDS, "flag": np.array(False)}
    assert close(board.run(feeds, inner), outputs(plain, feeds))


@pytest.mark.parametrize("preset", ["ort-int4-weights", "ort-int8-weights", "trt-int8", "ort-uint16-activations"])
def test_other_kinds_of_pairs(preset: str) -> None:
    data = [{"x": part} for part in np.split(samples(48)["x"], 12)]
    config = load_config(preset).model_copy(update={"rules": EVERYTHING.rules, "effort": "fast"})
    result = onnxq.quantize(chain(), data, config, overrides={"latency": False})
    plain = load_state(chain(), RunContext(config=Config(target=result.plan.target))).model
    board = toggle_model(plain, result.model)
    feeds = {"x": samples(4, seed=3)["x"]}
    assert board.switches
    assert close(board.run(feeds, board.switches), outputs(result.model, feeds), 50.0)
    assert close(board.run(feeds, ()), outputs(plain, feeds))


def test_pairs_made_by_hand_without_notes() -> None:
    quantized = pairs(chain())
    board = toggle_model(name_nodes(chain()), quantized)
    feeds = {"x": samples(4, seed=3)["x"]}
    assert len(board.switches) == 6
    assert close(board.run(feeds, board.switches), outputs(quantized, feeds), 50.0)
    assert close(board.run(feeds, ()), outputs(chain(), feeds))


class _Reader(CalibrationDataReader):
    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self._left = iter([{"x": row[None]} for row in data["x"]])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def test_another_tools_file(tmp_path) -> None:
    proto = name_nodes(residual())
    onnx.save(proto, tmp_path / "m.onnx")
    quantize_static(str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx"), _Reader(images()), quant_format=QuantFormat.QDQ)
    quantized = onnx.load(tmp_path / "q.onnx")
    board = toggle_model(proto, quantized)
    assert board.fixed == ()
    assert close(board.run(FEEDS, board.switches), outputs(quantized, FEEDS), 50.0)
    assert close(board.run(FEEDS, ()), outputs(proto, FEEDS))


def test_weights_that_the_float_model_does_not_know_stay_on_and_are_named() -> None:
    proto = chain()
    for node in proto.graph.node:
        node.name = f"other_{node.name}"
    quantized = pairs(chain())
    board = toggle_model(proto, quantized)
    assert {refusal.subject for refusal in board.fixed} == {"w0", "w1", "w2"}
    feeds = {"x": samples(4, seed=3)["x"]}
    assert close(board.run(feeds, board.switches), outputs(quantized, feeds), 50.0)


def test_integers_between_a_quantize_and_a_dequantize_node_stay_on() -> None:
    scale, zero = numpy_helper.from_array(np.float32(0.1), "s"), numpy_helper.from_array(np.uint8(0), "z")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
        helper.make_node("Reshape", ["q", "shape"], ["r"], name="r"),
        helper.make_node("DequantizeLinear", ["r", "s", "z"], ["y"], name="dq"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    shape = numpy_helper.from_array(np.array([2, 3]), "shape")
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], [scale, zero, shape])
    proto = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    board = toggle_model(proto, proto)
    feeds = {"x": np.ones((2, 3), np.float32)}
    assert not board.switches
    assert len(board.fixed) == 2
    assert close(board.run(feeds, ()), outputs(proto, feeds))
