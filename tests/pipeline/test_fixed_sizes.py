"""Sizes of inputs that a file fixes, as asked for or as the samples have them."""

import json
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.errors import ConfigError, DataError, ModelError
from onnxq.graph import name_nodes
from onnxq.plan import from_json, to_json
from tests.data.text.kit import make_decoder
from tests.passes.kit import Array, parse

TEXT = """g (float[batch,4,time] x, float[batch,4,time] other) => (float[batch,8,time] y) {
    a = Add(x, other) b = Concat <axis=1> (a, x) s = Shape(b) c = Reshape(b, s) y = Neg(c) }"""


def model(text: str = TEXT) -> onnx.ModelProto:
    return name_nodes(parse(text))


def make_samples(*sizes: tuple[int, int]) -> list[dict[str, Array]]:
    """A sample for each batch and time."""
    rng = np.random.default_rng(0)
    shapes = [(batch, 4, time) for batch, time in sizes]
    return [{name: rng.standard_normal(shape).astype(np.float32) for name in ("x", "other")} for shape in shapes]


SAMPLES = make_samples(*[(2, 6)] * 6)
# Not compiled for the NPU, which takes longer than all else here.
QUICK = {"latency": False, "verify.emulated": 0}


def quantize(target: str = "qnn", samples: Any = SAMPLES, fix: tuple[str, ...] = (), text: str = TEXT) -> onnxq.Result:
    overrides = {**QUICK, "effort": "fast", "fix": list(fix)}
    return onnxq.quantize(model(text), samples, f"{target}-int8", overrides=overrides)


def list_shapes(proto: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    values = (*proto.graph.input, *proto.graph.output)
    return {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


@pytest.mark.parametrize(
    ("fix", "batch"),
    [((), 1), (("batch=2",), 2), (("batch=2", "time=6"), 2), (("x=2x4x6",), 2), (("time=6",), 1)],
    ids=["by samples", "by a symbol", "by symbols", "by an input", "by a symbol and samples"],
)
def test_a_target_that_takes_whole_graphs_has_every_size(fix: tuple[str, ...], batch: int) -> None:
    """Samples are rows of batches where nobody says how many are one."""
    result = quantize(fix=fix)
    assert list_shapes(result.model) == {"x": (batch, 4, 6), "other": (batch, 4, 6), "y": (batch, 8, 6)}
    assert result.plan.sizes == {"x": (batch, 4, 6), "other": (batch, 4, 6)}
    # Shapes that are known leave no Shape behind.
    assert "Shape" not in {node.op_type for node in result.model.graph.node}


def test_sizes_are_in_the_plan_and_applying_it_fixes_them() -> None:
    result = quantize()
    text = to_json(result.plan)
    assert json.loads(text)["sizes"] == {"x": [1, 4, 6], "other": [1, 4, 6]}
    assert from_json(text).sizes == result.plan.sizes
    again = onnxq.apply(model(), from_json(text), overrides=QUICK)
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("target", ["ort", "trt"])
def test_other_targets_fix_what_they_are_asked_to(target: str) -> None:
    assert list_shapes(quantize(target).model)["x"] == ("batch", 4, "time")
    result = quantize(target, fix=("batch=2",))
    assert list_shapes(result.model) == {"x": (2, 4, "time"), "other": (2, 4, "time"), "y": (2, 8, "time")}
    again = onnxq.apply(model(), from_json(to_json(result.plan)), overrides=QUICK)
    assert list_shapes(again.model) == list_shapes(result.model)


def test_a_model_whose_sizes_are_fixed_stays_as_it_is() -> None:
    text = TEXT.replace("batch", "1").replace("time", "6")
    result = quantize(samples=make_samples(*[(1, 6)] * 6), text=text)
    assert result.plan.sizes == {}
    assert not [line for line in result.report.accounts if line.startswith("sizes")]


@pytest.mark.parametrize(
    ("fix", "samples", "words"),
    [
        ((), make_samples((2, 6), (2, 5)), ("x is 1x4xtime", "`fix=time=…`")),
        (("x=2x?x6",), SAMPLES, ("'x=2x?x6' names no input",)),
        (("batch=0",), SAMPLES, ("'batch=0' names no input",)),
        (("batsch=2",), SAMPLES, ("'batsch=2' names no input", "'batch'")),
        (("z=2x4x6",), SAMPLES, ("'z=2x4x6' names no input", "INPUT=1x3x224x224")),
        (("x",), SAMPLES, ("'x' names no input",)),
        (("x=2x4",), SAMPLES, ("2x4 does not fit x, batchx4xtime", "a size for each axis")),
        (("x=2x5x6",), SAMPLES, ("2x5x6 does not fit x, batchx4xtime",)),
    ],
    ids=["samples differ", "no number", "nothing", "symbol", "input", "no size", "few axes", "a fixed size"],
)
def test_sizes_that_cannot_be_fixed_are_named(fix: tuple[str, ...], samples: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        quantize(samples=samples, fix=fix)
    message = f"{caught.value} {caught.value.fix}"
    assert caught.value.code == "Q315"
    assert not [word for word in words if word not in message], message


def test_an_axis_without_a_name_is_fixed_by_its_input() -> None:
    text = "g (float[?,4] x, float[?,4] other) => (float[?,4] y) { y = Add(x, other) }"
    samples = [{name: value[0].T for name, value in one.items()} for one in make_samples((1, 3), (1, 5))]
    with pytest.raises(ConfigError, match="x is") as caught:
        quantize(samples=samples, text=text)
    assert "`fix=x=…x4`" in caught.value.fix


def test_samples_that_do_not_have_the_sizes_are_named() -> None:
    with pytest.raises(onnxq.OnnxqError, match="x"):
        quantize(fix=("time=7",))


def test_texts_for_a_decoder_with_caches_ask_for_its_sizes() -> None:
    overrides = {"sequence_length": 8, "samples": 4}
    with pytest.raises(ConfigError, match=r"input_ids is 1xT, and qnn compiles a graph for sizes that are fixed"):
        onnxq.quantize(make_decoder(), "self-generated", "qnn-int8", overrides=overrides)


def test_a_plan_without_samples_needs_its_sizes() -> None:
    with pytest.raises(ConfigError, match="fixed"):
        onnxq.make_plan(model(), config="qnn-int8")
    plan = onnxq.make_plan(model(), config="qnn-int8", overrides={"fix": ["batch=1", "time=3"]})
    assert plan.sizes == {"x": (1, 4, 3), "other": (1, 4, 3)}


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_sizes_come_from_samples_of_narrow_inputs_too(kind: str) -> None:
    text = f"""g ({kind}[batch,4,time] x, float[batch,4,time] other) => (float[batch,4,time] y) {{
        wide = Cast<to=1>(x) a = Add(wide, other) y = Neg(a) }}"""
    samples = [
        {**sample, "x": sample["x"].astype(np.float16 if kind == "float16" else np.float32)} for sample in SAMPLES
    ]
    assert quantize(samples=samples, text=text).plan.sizes == {"x": (1, 4, 6), "other": (1, 4, 6)}


def test_an_input_of_unknown_rank_has_no_sizes() -> None:
    proto = model("g (float[batch,4,time] x, float other) => (float[batch,4,time] y) { a = Add(x, other) y = Neg(a) }")
    proto.graph.input[1].type.tensor_type.ClearField("shape")
    result = onnxq.quantize(proto, SAMPLES, "qnn-int8", overrides={**QUICK, "effort": "fast"})
    assert result.plan.sizes == {"x": (2, 4, 6)}


def test_a_sample_of_more_axes_than_its_input_is_named() -> None:
    text = "g (float[batch,4,time] x, float other) => (float[batch,4,time] y) { a = Add(x, other) y = Neg(a) }"
    with pytest.raises(DataError, match=r"input 'other': its shape \[2, 4, 6\] has 3 dimensions"):
        quantize(text=text)


def test_a_branch_that_other_sizes_are_for_is_told_as_such() -> None:
    """As silero_vad has one for each sampling rate."""
    text = (
        "g (float[1,T,8] x, bool long) => (float[M,8] y) { [if] y = If(long) <"
        " then_branch = a () => (float[M,8] p) { [p] p = Squeeze(x, zero) },"
        " else_branch = b () => (float[M,8] q) { [q] q = Squeeze(x, one) }> }"
    )
    proto = parse(text, zero=np.array([0]), one=np.array([1]))
    samples = [{"x": np.ones((1, 4, 8), np.float32), "long": np.array(True)}] * 4
    with pytest.raises(ModelError, match="with the branch alone that they are for"):
        onnxq.quantize(proto, samples, "qnn-int8", overrides=QUICK)
