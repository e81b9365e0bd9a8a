"""Pairs of few bits in every form that is written compute what numerics computes, in ONNX Runtime and in numpy."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxq.annotate import FORMS, annotate_model, check_notes, find_pairs
from onnxq.graph import ensure_opset
from onnxq.numerics import fake_quant
from onnxq.runtime import Session
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec
from tests.annotate import models

ORT_FORMS = ("clip-qdq", "qcdq", "native")


class Quant(OpRun):
    """As QONNX specifies it."""

    op_domain = "qonnx.custom_op.general"

    def _run(self, x, scale, zero, bits, signed=1, narrow=0, rounding_mode="ROUND"):
        assert rounding_mode == "ROUND"
        low = -(2 ** (bits - 1)) + narrow if signed else 0
        high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
        codes = np.clip(np.rint(x / scale + zero), low, high)
        return (((codes - zero) * scale).astype(x.dtype),)


def run(proto: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """The answers of ONNX Runtime with optimizations off and on; of numpy for operators that it lacks."""
    if any(node.op_type == "Quant" for node in proto.graph.node):
        return [ReferenceEvaluator(ensure_opset(proto, 21), new_ops=[Quant]).run(None, {"x": x})[0]]
    return [Session(proto, optimize=optimize).run({"x": x})["y"] for optimize in (False, True)]


@st.composite
def labels(draw: st.DrawFn) -> tuple[QuantSpec, QParams]:
    """A spec of few bits in bytes, with its numbers; even zero points, since QONNX rounds ties behind adding them."""
    bits, signed = draw(st.integers(2, 7)), draw(st.booleans())
    grain = draw(st.sampled_from([PerTensor(), PerChannel(1)]))
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False, granularity=grain)
    shape = () if grain == PerTensor() else (4,)
    zero = 2 * draw(st.integers(-(-spec.qmin // 2), spec.qmax // 2))
    scale = draw(st.floats(2.0**-10, 4, width=32))
    spread = np.linspace(1, 3, 4, dtype=np.float32) if shape else np.float32(1)
    return spec, QParams(np.asarray(scale * spread, np.float32), np.full(shape, zero, np.int32))


def label(spec: QuantSpec, numbers: QParams) -> onnx.ModelProto:
    """A pair in bytes with nothing that bounds it, behind it a weight of the same levels, and its result."""
    codes = np.arange(spec.qmin, spec.qmax + 1).astype(spec.numpy_storage)
    text = f"{models.pair('x', 'xd', names=('q', 'dq'))} [w_dq] wd = DequantizeLinear(w, s0, z0) y = Add(xd, wd)"
    numbers = {"s": np.asarray(numbers.scale), "z": np.asarray(numbers.zero_point, spec.numpy_storage)}
    weight = np.resize(codes, (1, 4, 8, 8))
    return models.model(text, **numbers, w=weight, s0=np.float32(0.5), z0=np.zeros((), spec.numpy_storage))


@settings(max_examples=25, deadline=None)
@given(labels(), st.sampled_from(FORMS), st.sampled_from(ORT_FORMS), st.integers(0, 2**16))
def test_every_form_computes_what_numerics_does(drawn, form, before, seed):
    spec, numbers = drawn
    proto = label(spec, numbers)
    spread = spec.qmax * numbers.scale.max()
    x = (np.random.default_rng(seed).normal(size=(1, 4, 8, 8)) * spread).astype(np.float32)
    weight = np.resize(np.arange(spec.qmin, spec.qmax + 1), x.shape).astype(np.float32) * np.float32(0.5)
    expected = fake_quant(x, numbers, spec) + weight
    # From one form to the other, by way of a third.
    first = annotate_model(proto, given=[("*", spec.bits)], form=before)
    second = annotate_model(first.model, form=form)
    for found in (first, second):
        assert [pair.bits for pair in found.pairs] == [spec.bits, spec.bits]
        assert not check_notes(found.model).disagreements
        for answer in run(found.model, x):
            np.testing.assert_array_equal(answer, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", models.RUNNING)
def test_models_of_all_tools_keep_their_answers(make, form):
    x = np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float32)
    written = annotate_model(make(), form=form)
    assert [pair.bits for pair in written.pairs] == [pair.bits for pair in find_pairs(make())]
    if make is not models.branches or form != "qonnx":
        expected, *_ = run(make(), x)
        differs = np.abs(run(written.model, x)[0] - expected) > (1e-5 if form == "qonnx" else 0)
        # The operator of qonnx runs between float sums in another order, which may cross an edge between two levels.
        assert differs.mean() <= (0.01 if form == "qonnx" else 0)


def test_a_form_written_twice_is_the_same_file():
    for form in ORT_FORMS:
        once = annotate_model(models.two_widths(), form=form).model
        assert annotate_model(once, form=form).model == once


def test_native_takes_the_types_that_onnx_has():
    spec = QuantSpec(bits=2, signed=False, symmetric=False)
    numbers = QParams(np.float32(0.5), np.int32(2))
    found = annotate_model(label(spec, numbers), given=[("x", 2), ("w*", 4)], form="native")
    assert [pair.storage for pair in found.pairs] == ["uint2", "uint4"]
    assert found.model.opset_import[0].version == 25
    onnx.checker.check_model(found.model, full_check=True)


def test_a_narrow_range_stays_one():
    """-7 to 7 of a Clip, not -8: the form holds it where its own type does not."""
    x = np.linspace(-2, 2, 256, dtype=np.float32).reshape(1, 4, 8, 8)
    expected = run(models.qcdq(), x)[0]
    for form in FORMS:
        np.testing.assert_allclose(run(annotate_model(models.qcdq(), form=form).model, x)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "given", "form", "why"),
    [
        (lambda: models.dedicated(), [("*", 8)], "qcdq", "no Clip takes uint16"),
        (lambda: models.sub_byte(), [], "qonnx", "Quant has no blocks"),
        (lambda: models.qcdq(-2, 2), [], "clip-qdq", "its Clip leaves other levels than 3 bits have"),
        (lambda: models.relu6(6), [("c", 4)], "clip-qdq", ""),
        (lambda: models.lone_nodes(), [("*", 4)], "clip-qdq", "of another kind"),
        (lambda: models.two_widths(), [("x", 4)], "clip-qdq", "its zero point is no level of 4 bits"),
    ],
)
def test_a_pair_that_stays_is_named_with_the_reason(make, given, form, why):
    warned = [text for text in annotate_model(make(), given=given, form=form).warnings if "stay as they are" in text]
    assert why in " ".join(warned) if why else not warned
