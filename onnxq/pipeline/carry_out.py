"""`onnxq apply`: carry out a plan on its model, or on the same network exported again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx

from onnxq.calibrate import calibrate
from onnxq.config import Config
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, fingerprint, holding
from onnxq.pipeline.finish import finish
from onnxq.pipeline.inputs import read_data
from onnxq.pipeline.prepared import load
from onnxq.pipeline.realise import realise
from onnxq.pipeline.result import Result
from onnxq.pipeline.run import DEFAULT_OPTIONS, Options, configured
from onnxq.pipeline.scaled import rescaled
from onnxq.pipeline.stages import Stages
from onnxq.plan import Plan, from_json
from onnxq.planner import rebase
from onnxq.report import Progress, silent


def read_plan(plan: Plan | str | Path) -> Plan:
    """A Plan, or the JSON file one was written to."""
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            path, error.strerror or str(error), "write one with `onnxq plan`, or with `plan_out=…`", code="Q401"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(
            path, "is not a text file", "write one with `onnxq plan`, or with `plan_out=…`", code="Q401"
        ) from error
    return from_json(text, source=path)


@holding()
def apply(
    model: str | Path | onnx.ModelProto,
    plan: Plan | str | Path,
    data: object = None,
    *,
    new_weights: bool = False,
    config: Config | str | Path | None = None,
    options: Options = DEFAULT_OPTIONS,
    progress: Progress = silent,
) -> Result:
    """Carry out a plan: the same model and plan give the same bytes anywhere.

    data: needed only when the plan has activation sites without numbers; then they are calibrated. When
    given, the result is also checked against the float model.
    Raises PlanError when the plan does not fit this model or lacks numbers and no data is given.
    """
    stages = Stages()
    found = read_plan(plan)
    wished = configured(config, None, options)
    with stages.run("prepare"):
        prepared = load(model, only=found.prepare, target=found.target)
        prepared = rescaled(prepared, found.scalings)
        index = GraphIndex(prepared.proto)
        found = rebase(found, index, fingerprint(prepared.proto), new_weights=new_weights)
        inputs = None if data is None else read_data(prepared, data, wished)
    missing = [site for site in found.sites if site.qparams is None]
    if missing:
        needs = [site for site in missing if str(site.role) in ("activation", "output")]
        if needs and inputs is None:
            raise PlanError(
                str(needs[0].site), "the plan has no scale for it", "pass `data=…` to calibrate it", code="Q405"
            )
        with stages.run("calibrate"):
            found = calibrate(
                prepared.proto,
                found,
                None if inputs is None else inputs.calibration,
                batch=wished.data.batch,
                memory_limit=options.memory_limit,
                progress=progress,
            )
    if inputs is not None and missing:
        found = replace(found, data=inputs.description)
    with stages.run("emit"):
        quantized = realise(prepared, found)
    return finish(prepared, found, quantized, inputs, wished, stages, source=model)
