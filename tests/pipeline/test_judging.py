"""What stages share: the float model runs once a sample, a plan is judged once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from onnxq.calibrate import calibrate
from onnxq.config import Config, QuantWish, load_config
from onnxq.data import load_data
from onnxq.evaluation.compare import compare
from onnxq.graph import GraphIndex
from onnxq.pipeline import judging
from onnxq.pipeline.inputs import read_data
from onnxq.pipeline.judging import Recorded, before_rounding, plan_errors, recorded
from onnxq.pipeline.prepared import load
from onnxq.pipeline.realise import realise
from onnxq.pipeline.run import look
from onnxq.plan import Plan
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.pipeline.models import EVERYTHING, images, residual


def model() -> onnx.ModelProto:
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        main (float[N, 16] x) => (float[N, 8] y) { m = MatMul(x, w) y = Relu(m) }"""
    )
    weight = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return proto


def feeds(count: int = 12) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((count, 16)).astype(np.float32)}


def test_the_float_model_runs_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = load(model())
    data = load_data(feeds(5), GraphIndex(prepared.proto).inputs)
    runs = []
    real = Session.run
    monkeypatch.setattr(Session, "run", lambda self, *args: runs.append(1) or real(self, *args))
    begun = recorded(prepared.proto, data)
    first = [begun.run(sample)["y"] for sample in list(data.samples())[:2]]
    again = recorded(prepared.proto, data)
    whole = [again.run(sample)["y"] for sample in data.samples()]
    assert len(runs) == 5
    assert all((a == b).all() for a, b in zip(first, whole, strict=False))
    # Beyond the limit outputs are computed again: memory does not grow with the samples.
    monkeypatch.setattr(judging, "_MOST_BYTES", 70)
    bounded = Recorded(prepared.proto)
    for _ in range(2):
        bounded.rewound()
        got = [bounded.run(sample)["y"] for sample in data.samples()]
        assert all((a == b).all() for a, b in zip(got, whole, strict=True))
    assert len(runs) == 5 + 5 + 3


def test_a_plan_is_judged_once_and_as_the_file_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("ort-int8")
    prepared = load(model())
    inputs = read_data(prepared, feeds(), config)
    plan = calibrate(prepared.proto, look(prepared, inputs, config, "").default(), inputs.calibration)
    held = inputs.trial
    found = plan_errors(prepared, plan, held)
    sessions = (Session(prepared.proto, optimize=False), Session(realise(prepared, plan), optimize=False))
    assert found == compare({"": sessions}, held.samples())[""]
    monkeypatch.setattr(judging, "paired", None)
    assert plan_errors(prepared, plan, held) is found


@pytest.mark.parametrize(("bits", "kept"), [(4, {Role.ACTIVATION}), (6, {Role.ACTIVATION}), (8, None)])
def test_weights_of_few_bits_do_not_count_before_they_are_rounded(bits: int, kept: set[Role] | None) -> None:
    plan = planned(
        EVERYTHING.model_copy(update={"weights": QuantWish(bits=bits, granularity="channel")}), residual(), images()
    )
    judged = before_rounding(plan)
    if kept is None:
        assert any(site.sum_orders for site in plan.sites)
        assert judged.sites == tuple(replace(site, sum_orders=()) for site in plan.sites)
        allowed = planned(EVERYTHING.model_copy(update={"saturation": "allow"}), residual(), images())
        assert before_rounding(allowed) is allowed
    else:
        assert (
            {Role.WEIGHT, Role.BIAS} < {site.role for site in plan.sites} > {site.role for site in judged.sites} == kept
        )


def test_weights_alone_are_what_is_judged() -> None:
    plan = planned(load_config("ort-int4-weights"), model(), feeds())
    assert plan.sites
    assert before_rounding(plan) is plan


def planned(config: Config, proto: onnx.ModelProto, samples: dict[str, np.ndarray]) -> Plan:
    prepared = load(proto)
    return look(prepared, read_data(prepared, samples, config), config, "").default()
