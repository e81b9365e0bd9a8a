"""A plan is judged once, as the file answers."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxq.backends import load_config
from onnxq.calibrate import calibrate
from onnxq.config import Config, DataConfig, TensorConfig
from onnxq.data import Dataset, load_data
from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import GraphIndex, attach_weights
from onnxq.passes import judging
from onnxq.passes.assembly import build_quantized, write_pairs
from onnxq.passes.judging import Evaluator, SampleSets, ignore_rounding
from onnxq.pipeline.prepared import load_state, read_data
from onnxq.pipeline.quantize_model import draft_placement
from onnxq.plan import Plan
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.evaluation.test_compare import product
from tests.passes.kit import parse
from tests.pipeline.models import EVERYTHING, images, residual


def feeds(count: int = 12) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((count, 16)).astype(np.float32)}


def test_a_plan_is_judged_once_and_as_the_file_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = load_state(product())
    inputs = read_data(prepared, feeds(), EVERYTHING)
    plan = calibrate(prepared.model, draft_placement(prepared, inputs, EVERYTHING, "").default(), inputs.calibration)
    assert plan.sites
    held = inputs.validation
    judge = Evaluator(held)
    found = judge.measure(prepared, plan)
    sessions = (Session(prepared.model, optimize=False), Session(build_quantized(prepared, plan), optimize=False))
    errors = ModelErrors()
    for sample in held.samples():
        errors.update(sample, *(session.run(sample) for session in sessions))
    # Trials have their weights as constants, which ONNX Runtime packs and adds up in another order.
    assert [output.sqnr_db for output in found] == pytest.approx(
        [output.sqnr_db for output in errors.results()], abs=0.01
    )
    monkeypatch.setattr(judging, "write_pairs", None)
    assert repr(judge.measure(prepared, plan)) == repr(found)


BODY = parse(
    """main (float[N, 6] x, bool c) => (float[N, 4] y) {
      [if] b = If <then_branch = t () => (float[N, 4] p) { [m] p = MatMul(x, w) },
                   else_branch = e () => (float[N, 4] q) { [n] q = MatMul(x, w) }>(c)
      [gemm] g = Gemm(b, v, bias) [add] y = Add(g, b) }""",
    w=np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32),
    v=np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32),
    bias=np.random.default_rng(2).standard_normal((1, 4)).astype(np.float32),
)
SWITCHED = {"x": np.random.default_rng(3).standard_normal((8, 6)).astype(np.float32), "c": np.arange(8) % 2 == 0}
FOLDED = {
    "bytes, biases": (residual(), images(), EVERYTHING),
    "unbounded sums": (residual(), images(), EVERYTHING.model_copy(update={"saturation": "allow"})),
    "blocks of four bits": (product(), feeds(), load_config("ort-int4-weights")),
    "bodies": (BODY, SWITCHED, EVERYTHING),
}


@pytest.mark.parametrize("name", list(FOLDED))
def test_folded_constants_are_the_floats_that_their_integers_stand_for(name: str) -> None:
    """ONNX Runtime makes the same bits of the integers; in the bodies of an If they are read as well."""
    proto, data, config = FOLDED[name]
    prepared = load_state(proto)
    inputs = read_data(prepared, data, config)
    plan = calibrate(prepared.model, draft_placement(prepared, inputs, config, "").default(), inputs.calibration)
    pairs, folded = (attach_weights(write_pairs(prepared, plan, fold_constants=fold)) for fold in (False, True))
    floats = {tensor.name: numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
    names = [f"{site.name}/dequantized" for site in plan.sites if site.role.is_constant and not site.site.scope]
    pairs.graph.output.extend(onnx.helper.make_tensor_value_info(each, 1, None) for each in names)
    sample = next(iter(inputs.validation.samples()))
    wanted = Session(pairs, optimize=False).run(sample)
    for each in names:
        np.testing.assert_array_equal(wanted[each].ravel().view(np.uint32), floats[each].ravel().view(np.uint32))
    for key, value in Session(folded, optimize=False).run(sample).items():
        np.testing.assert_allclose(value, wanted[key], rtol=1e-4, atol=1e-4)
    assert any(site.role is Role.WEIGHT for site in plan.sites)
    index = GraphIndex(folded)
    pairs_left = [node for node in index.nodes if node.op_type == "DequantizeLinear"]
    assert not any(index.has_constant(node, 0) for node in pairs_left)
    assert not folded.metadata_props


@pytest.mark.parametrize(("bits", "kept"), [(4, {Role.ACTIVATION}), (6, {Role.ACTIVATION}), (8, None)])
def test_weights_of_few_bits_do_not_count_before_they_are_rounded(bits: int, kept: set[Role] | None) -> None:
    plan = planned(
        EVERYTHING.model_copy(update={"weights": TensorConfig(bits=bits, granularity="channel")}), residual(), images()
    )
    judged = ignore_rounding(plan)
    if kept is None:
        assert any(site.sum_orders for site in plan.sites)
        assert judged.sites == tuple(replace(site, sum_orders=()) for site in plan.sites)
        allowed = planned(EVERYTHING.model_copy(update={"saturation": "allow"}), residual(), images())
        assert ignore_rounding(allowed) is allowed
    else:
        assert (
            {Role.WEIGHT, Role.BIAS} < {site.role for site in plan.sites} > {site.role for site in judged.sites} == kept
        )


def test_weights_alone_are_what_is_judged() -> None:
    plan = planned(load_config("ort-int4-weights"), product(), feeds())
    assert plan.sites
    assert ignore_rounding(plan) is plan


def planned(config: Config, proto: onnx.ModelProto, samples: dict[str, np.ndarray]) -> Plan:
    prepared = load_state(proto)
    return draft_placement(prepared, read_data(prepared, samples, config), config, "").default()


# ---- Which samples judge, and which equalized models are compared on.


def dataset(numbers: range) -> Dataset:
    """One sample for each number."""
    inputs = GraphIndex(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu(x) }")).inputs
    return load_data({"x": np.array([[[k, k]] for k in numbers], np.float32)}, inputs, DataConfig())


def numbers(held: Dataset) -> list[int]:
    return [int(sample["x"].ravel()[0]) for sample in held.samples()]


def samples(count: int, seed: int = 0) -> SampleSets:
    """So many for calibration, and four more held back."""
    first, second = dataset(range(count + 4)).split(4, keep=range(count))
    return SampleSets(first, first, second, second, "", {}, "", synthetic=False, seed=seed)


@pytest.mark.parametrize(
    ("count", "judges", "trial"), [pytest.param(20, 12, 8, id="some of many"), pytest.param(3, 7, 7, id="all of few")]
)
def test_sets_of_judges_are_some_of_the_calibration_and_all_held_back(count, judges, trial):
    one, validation = samples(count), range(count, count + 4)
    assert numbers(one.judge.samples) == list(validation)
    for found, wanted in ((one.judges.samples, judges), (one.equalizing, trial)):
        held = numbers(found)
        assert len(held) == len(set(held)) == wanted
        assert held[-4:] == list(validation)
        assert set(held[:-4]) <= set(range(count))


def test_the_choice_is_that_of_the_seed_and_made_once():
    one, same = samples(20, 7), samples(20, 7)
    assert one.judges is one.judges
    assert numbers(one.judges.samples) == numbers(same.judges.samples)
    others = [numbers(samples(20, seed).judges.samples) for seed in range(5)]
    assert len({tuple(found) for found in others}) > 1
