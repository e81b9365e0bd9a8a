"""One function for each command, and the same for Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnxq import annotate
from onnxq.annotate import Inspection
from onnxq.config import Command, Config
from onnxq.files import write_text
from onnxq.graph import save_model
from onnxq.pipeline import apply_plan, quantize_model
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.result import Result
from onnxq.plan import Plan, to_json
from onnxq.progress import Progress, silent

if TYPE_CHECKING:
    from onnxq.interop import Imported, ScaleTable


def quantize(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Result:
    """Quantize an ONNX model and check the result against the float one.

    model: path or ModelProto; never changed. data: a path, an iterable of {input: array}, a dict of
    arrays or a `file.py:function`; None calibrates on seeded synthetic inputs and warns.
    config: preset name, YAML file or Config; None is the preset `ort-int8`. overrides: values on top of it, by the
    names of the command's options or by paths: {"min_sqnr": 30, "weights.bits": 4}; None is not given.
    In Python `metric` may also be a function of a model (see MetricModel) that gives a number, higher is better.
    out: file to write; force: overwrite it.

    Returns a Result with `.model`, `.plan`, `.report` and `.save()`.
    Raises a subclass of OnnxqError for whatever the caller can mend; nothing is written then.
    """
    with open_run(model, config, overrides, Command.QUANTIZE, out=out, force=force) as chosen:
        result = quantize_model.quantize(model, data, chosen, progress=progress)
        with progress("writing"):
            return _write_result(result, chosen, out, force)


def apply(
    model: ModelSource,
    plan: Plan | str | Path,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Result:
    """Carry out a plan on its model, or on the same network exported again.

    data is needed only for sites without numbers; when given, the result is checked on it. The override `new_weights`
    says that the weights were trained further; their scales are computed again. See `quantize` for the rest.
    Raises PlanError when the plan does not fit.
    """
    with open_run(model, config, overrides, Command.APPLY, out=out, force=force) as chosen:
        result = apply_plan.apply(model, plan, data, chosen, progress=progress)
        with progress("writing"):
            return _write_result(result, chosen, out, force)


def make_plan(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Plan:
    """The plan without numbers: site by site the tensors that would be quantized, how, by which rule and why.

    data supplies shapes, which branches run and, for placement "measured", the runs to time; synthetic
    inputs do without it. out: write the plan as JSON. See `quantize` for the rest.
    """
    with open_run(model, config, overrides, Command.PLAN, out=out, force=force) as chosen:
        plan = quantize_model.make_plan(model, data, chosen, progress=progress)
        _write_plan(plan, out, force, progress)
    return plan


def import_calibration(
    cache: str | Path | ScaleTable,
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Imported:
    """Turn a TensorRT INT8 calibration cache into a plan with those very scales, float32 bit for bit.

    cache: the text file of a TensorRT calibrator. model: the ONNX file it was calibrated with. data: samples to
    calibrate the tensors on that the cache has no scale for; the override `allow_missing` leaves their readers float.
    config: None, and a file that names no target, start from `trt-int8`, or the preset of the target in `overrides`.
    out: write the plan as JSON; `onnxq.apply` carries it out. See `quantize` for the rest.

    Returns an Imported with `.plan`, `.matched`, `.unmatched`, `.unused` and `.missing`.
    Raises CalibrationError for a malformed cache, one of another model, and tensors without a scale.
    """
    from onnxq.pipeline import import_cache

    given = import_cache.choose_target(overrides) if config is None else overrides
    with open_run(model, config, given, Command.IMPORT, out=out, force=force, usual=import_cache.USUAL) as chosen:
        found = import_cache.import_calibration(cache, model, data, chosen, progress=progress)
        _write_plan(found.plan, out, force, progress)
    return found


def inspect(model: ModelSource, *, progress: Progress = silent) -> Inspection:
    """List every quantize/dequantize pair with its site, bits, scheme, granularity and scale, from any tool.

    Raises ModelError for a file that cannot be read.
    """
    with progress("looking for pairs"):
        return annotate.inspect_model(model)


def annotate_bits(
    model: ModelSource,
    given: Sequence[tuple[str, int]] = (),
    plan: Plan | str | Path | None = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Inspection:
    """Write the number of bits of every pair into the model, keyed by node name.

    given: (pattern, bits), first match wins, over the bits read from the model; plan: take bits from it.
    config, overrides: as for `quantize`, of which the section `output` is used.
    Raises ConfigError for a pattern that matches no pair, ModelError for a file that cannot be read.
    """
    with open_run(model, config, overrides, Command.ANNOTATE, out=out, force=force) as chosen:
        wanted = chosen.output
        with progress("looking for pairs"):
            known = None if plan is None else apply_plan.read_plan(plan)
            done = annotate.annotate_model(
                model, given=given, plan=known, rename=wanted.rename, bits_attribute=wanted.bits_attribute
            )
        if out is not None:
            with progress("writing"):
                save_model(done.model, Path(out), external=wanted.external_data or None, overwrite=force)
            done = replace(done, output=str(out))
    return done


def _write_plan(plan: Plan, out: str | Path | None, force: bool, progress: Progress = silent) -> None:
    if out:
        with progress("writing"):
            write_text(Path(out), to_json(plan), overwrite=force)


def _write_result(result: Result, config: Config, out: str | Path | None, force: bool) -> Result:
    wanted = config.output
    if wanted.bits_attribute:
        pairs = annotate.find_pairs(result.model)
        model = annotate.write_bits(result.model, pairs, bits_attribute=True)
        warnings = (*result.report.warnings, annotate.BITS_ATTRIBUTE_WARNING)
        result = replace(result, light=model, report=replace(result.report, warnings=warnings))
    result = result.leave_out_notes(wanted.notes)
    if out is not None:
        result = result.save(out, overwrite=force, external=wanted.external_data or None)
    _write_plan(result.plan, wanted.plan, force)
    return result
