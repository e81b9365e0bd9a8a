"""A plan is judged once, as the file answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from onnxq.calibrate import calibrate
from onnxq.config import Config, TensorConfig, load_config
from onnxq.evaluation.compare import ModelErrors
from onnxq.passes import judging
from onnxq.passes.assembly.model import build_quantized
from onnxq.passes.judging import Evaluator, ignore_rounding
from onnxq.pipeline.prepared import load_state
from onnxq.pipeline.quantize_model import draft_placement
from onnxq.pipeline.samples import read_data
from onnxq.plan import Plan
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.evaluation.test_float_outputs import model
from tests.pipeline.models import EVERYTHING, images, residual


def feeds(count: int = 12) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((count, 16)).astype(np.float32)}


def test_a_plan_is_judged_once_and_as_the_file_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("ort-int8")
    prepared = load_state(model())
    inputs = read_data(prepared, feeds(), config)
    plan = calibrate(prepared.model, draft_placement(prepared, inputs, config, "").default(), inputs.calibration)
    held = inputs.validation
    judge = Evaluator(held)
    found = judge.measure(prepared, plan)
    sessions = (Session(prepared.model, optimize=False), Session(build_quantized(prepared, plan), optimize=False))
    errors = ModelErrors()
    for sample in held.samples():
        errors.update(sample, *(session.run(sample) for session in sessions))
    assert found == errors.results()
    monkeypatch.setattr(judging, "write_pairs", None)
    assert judge.measure(prepared, plan) is found


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
    plan = planned(load_config("ort-int4-weights"), model(), feeds())
    assert plan.sites
    assert ignore_rounding(plan) is plan


def planned(config: Config, proto: onnx.ModelProto, samples: dict[str, np.ndarray]) -> Plan:
    prepared = load_state(proto)
    return draft_placement(prepared, read_data(prepared, samples, config), config, "").default()
