"""One function for each command, and the same for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from onnxq import annotate
from onnxq.annotate import Inspection
from onnxq.config import Config
from onnxq.files import guard_outputs, write_text
from onnxq.graph import save_model
from onnxq.graph.save import check_data_name, name_data_file
from onnxq.pipeline import apply_plan, quantize_model
from onnxq.pipeline.quantize_model import Options
from onnxq.pipeline.result import Result
from onnxq.plan import Plan, to_json
from onnxq.progress import Progress, silent

if TYPE_CHECKING:
    from onnxq.interop import Imported

ModelSource = str | Path | onnx.ModelProto
Libraries = Sequence[str | Path] | str | Path
Configuration = Config | str | Path | None


def quantize(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    target: str | None = None,
    placement: str | None = None,
    cpu: str | None = None,
    effort: str | None = None,
    samples: int | None = None,
    seed: int | None = None,
    batch: int | None = None,
    memory_limit: int | None = None,
    holdout: int | None = None,
    threads: int | None = None,
    latency: bool | None = None,
    min_sqnr: float | None = None,
    metric: str | Callable[[Any], float] | None = None,
    max_drop: float | str | None = None,
    promote_to: str | None = None,
    weight_bits_budget: float | None = None,
    budget: float | None = None,
    ort_library: Libraries = (),
    plugin: Libraries = (),
    provider: str | None = None,
    out: str | Path | None = None,
    plan_out: str | Path | None = None,
    force: bool = False,
    external_data: bool = False,
    bits_attribute: bool = False,
    progress: Progress = silent,
) -> Result:
    """Quantize an ONNX model and check the result against the float one.

    model: path or ModelProto; never changed. data: a path, an iterable of {input: array}, a dict of
    arrays or a `file.py:function`; None calibrates on seeded synthetic inputs and warns.
    config: preset name, YAML file or Config; the options named here override it, None leaves it as it is.
    cpu: the kind of CPU that target ort places for, "vnni" or "avx2"; "any" makes one graph for both.
    memory_limit: bytes of tapped tensors kept of one run. holdout: samples kept back for the check, threads: of that
    (0: all). min_sqnr: dB that every output shall keep; or metric: `file.py:function` or a function of a model (see
    MetricModel) that gives a number, higher is better, and max_drop: its allowed drop, 0.01 or "1%" of float's. The
    costliest parts are promoted to `promote_to`, "float" or "uint16", until it holds; `.report.promotion.met` says so.
    weight_bits_budget: bits that weights may have on average; those get more than the configuration's that need them.
    budget: seconds of wall-clock time; passes get less or are left out, and `.report.accounts` says which. ort_library,
    plugin: shared libraries with custom operators of ONNX Runtime, with plugins of TensorRT. provider: execution
    provider for calibration and checks, "cuda" …; times are the CPU's. out, plan_out: files; `force` overwrites them.

    Returns a Result with `.model`, `.plan`, `.report` and `.save()`.
    Raises a subclass of OnnxqError for whatever the caller can mend; nothing is written then.
    """
    options = Options(
        samples=samples, seed=seed, batch=batch, memory_limit=memory_limit, placement=placement, cpu=cpu,
        effort=effort, holdout=holdout, threads=threads, latency=latency, min_sqnr=min_sqnr, metric=metric,
        max_drop=max_drop, promote_to=promote_to, weight_bits_budget=weight_bits_budget, budget=budget,
        ort_library=ort_library, plugin=plugin, provider=provider,
    )  # fmt: skip
    with _outputs(model, *_model_files(out, external_data), plan_out, force=force):
        result = quantize_model.quantize(model, data, config, target=target, options=options, progress=progress)
        with progress("writing"):
            return _write_result(result, out, plan_out, force, external_data, bits_attribute)


def apply(
    model: ModelSource,
    plan: Plan | str | Path,
    data: object = None,
    config: Configuration = None,
    *,
    new_weights: bool = False,
    samples: int | None = None,
    seed: int | None = None,
    batch: int | None = None,
    memory_limit: int | None = None,
    holdout: int | None = None,
    threads: int | None = None,
    latency: bool | None = None,
    ort_library: Libraries = (),
    provider: str | None = None,
    out: str | Path | None = None,
    plan_out: str | Path | None = None,
    force: bool = False,
    external_data: bool = False,
    bits_attribute: bool = False,
    progress: Progress = silent,
) -> Result:
    """Carry out a plan on its model, or on the same network exported again.

    data is needed only for sites without numbers; when given, the result is checked on it.
    new_weights: the weights were trained further; their scales are computed again. ort_library, provider: as for
    `quantize`.
    Raises PlanError when the plan does not fit; see `quantize` for the rest.
    """
    options = Options(
        samples=samples,
        seed=seed,
        batch=batch,
        memory_limit=memory_limit,
        holdout=holdout,
        threads=threads,
        latency=latency,
        ort_library=ort_library,
        provider=provider,
    )
    with _outputs(model, *_model_files(out, external_data), plan_out, force=force):
        result = apply_plan.apply(
            model, plan, data, new_weights=new_weights, config=config, options=options, progress=progress
        )
        with progress("writing"):
            return _write_result(result, out, plan_out, force, external_data, bits_attribute)


def make_plan(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    target: str | None = None,
    placement: str | None = None,
    cpu: str | None = None,
    samples: int | None = None,
    seed: int | None = None,
    ort_library: Libraries = (),
    plugin: Libraries = (),
    provider: str | None = None,
    plan_out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Plan:
    """The plan without numbers: site by site the tensors that would be quantized, how, by which rule and why.

    data supplies shapes, which branches run and, for placement "measured", the runs to time; synthetic
    inputs do without it. ort_library, plugin, provider: as for `quantize`. plan_out: write it as JSON.
    """
    options = Options(
        samples=samples, seed=seed, placement=placement, cpu=cpu, ort_library=ort_library, plugin=plugin,
        provider=provider,
    )  # fmt: skip
    with _outputs(model, plan_out, force=force):
        plan = quantize_model.make_plan(model, data, config, target=target, options=options, progress=progress)
        if plan_out is not None:
            with progress("writing"):
                write_text(Path(plan_out), to_json(plan), overwrite=force)
    return plan


def import_calibration(
    cache: str | Path,
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    target: str | None = None,
    allow_missing: bool = False,
    samples: int | None = None,
    seed: int | None = None,
    batch: int | None = None,
    memory_limit: int | None = None,
    ort_library: Libraries = (),
    provider: str | None = None,
    plan_out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Imported:
    """Turn a TensorRT INT8 calibration cache into a plan with those very scales, float32 bit for bit.

    cache: the text file of a TensorRT calibrator. model: the ONNX file it was calibrated with. target: "trt" unless the
    configuration says otherwise. data: samples to calibrate the tensors on that the cache has no scale for;
    allow_missing: without samples, leave the readers of such tensors float. ort_library, provider: as for
    `quantize`.
    plan_out: write the plan as JSON; `onnxq.apply` carries it out.

    Returns an Imported with `.plan`, `.matched`, `.unmatched`, `.unused` and `.missing`.
    Raises CalibrationError for a malformed cache, one of another model, and tensors without a scale.
    """
    options = Options(
        samples=samples, seed=seed, batch=batch, memory_limit=memory_limit, ort_library=ort_library, provider=provider
    )  # fmt: skip

    from onnxq.pipeline import import_cache

    with _outputs(model, plan_out, force=force):
        found = import_cache.import_calibration(
            cache, model, data, config, target=target, allow_missing=allow_missing, options=options, progress=progress
        )
        if plan_out is not None:
            with progress("writing"):
                write_text(Path(plan_out), to_json(found.plan), overwrite=force)
    return found


def inspect(model: ModelSource, *, progress: Progress = silent) -> Inspection:
    """List every quantize/dequantize pair with its site, bits, scheme, granularity and scale, from any tool.

    Raises ModelError for a file that cannot be read.
    """
    with progress("looking for pairs"):
        return annotate.inspect_model(model)


def annotate_bits(
    model: ModelSource,
    *,
    given: Sequence[tuple[str, int]] = (),
    plan: Plan | str | Path | None = None,
    rename: bool = False,
    bits_attribute: bool = False,
    out: str | Path | None = None,
    force: bool = False,
    external_data: bool = False,
    progress: Progress = silent,
) -> Inspection:
    """Write the number of bits of every pair into the model, keyed by node name.

    given: (pattern, bits), first match wins, over the bits read from the model; plan: take bits from it.
    bits_attribute: also the plain attribute `bits` (Sparsebit's form), which onnx.checker and ORT refuse.
    Raises ConfigError for a pattern that matches no pair, ModelError for a file that cannot be read.
    """
    with _outputs(model, *_model_files(out, external_data), force=force):
        with progress("looking for pairs"):
            known = None if plan is None else apply_plan.read_plan(plan)
            done = annotate.annotate_model(model, given=given, plan=known, rename=rename, bits_attribute=bits_attribute)
        if out is not None:
            with progress("writing"):
                save_model(done.model, Path(out), external=external_data or None, overwrite=force)
            done = replace(done, output=str(out))
    return done


def _outputs(model: ModelSource, *outputs: str | Path | None, force: bool) -> AbstractContextManager[None]:
    """Refuse before the work begins outputs that could not be written after it, and every output that is an input."""
    return guard_outputs("" if isinstance(model, onnx.ModelProto) else model, *outputs, force=force)


def _model_files(out: str | Path | None, external_data: bool) -> tuple[str | Path | None, ...]:
    """The files that one model is written to."""
    if not external_data or out is None:
        return (out,)
    check_data_name(Path(out))
    return (out, name_data_file(out))


def _write_result(
    result: Result,
    out: str | Path | None,
    plan_out: str | Path | None,
    force: bool,
    external_data: bool,
    bits_attribute: bool,
) -> Result:
    if bits_attribute:
        pairs = annotate.find_pairs(result.model)
        model = annotate.write_bits(result.model, pairs, bits_attribute=True)
        warnings = (*result.report.warnings, annotate.BITS_ATTRIBUTE_WARNING)
        result = replace(result, model=model, report=replace(result.report, warnings=warnings))
    if out is not None:
        result = result.save(out, overwrite=force, external=external_data or None)
    if plan_out is not None:
        write_text(Path(plan_out), result.plan_json(), overwrite=force)
    return result
