"""`onnxq import-weights`: a float export and a quantized checkpoint in, a model with the checkpoint's codes out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import onnx

from onnxq.calibrate import calibrate
from onnxq.commands.apply import make_samples
from onnxq.config import DEFAULT_TARGET, Command, Config, Rule, RuleSet
from onnxq.errors import CalibrationError
from onnxq.graph import get_index
from onnxq.interop import Checkpoint, FoundWeight, InputScale, WeightCodes, match_weights, open_checkpoint
from onnxq.passes.assembly import build_file
from onnxq.passes.base import RunContext
from onnxq.passes.registry import list_rewrites
from onnxq.passes.state import FloatState
from onnxq.passes.time_budget import Timers
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.finalize import Result, finalize_run, write_result
from onnxq.pipeline.prepared import load_state, read_data
from onnxq.pipeline.quantize_model import plan_unrun
from onnxq.plan import Plan, SitePlan
from onnxq.progress import Progress, silent
from onnxq.report.columns import Text
from onnxq.report.document import ResultFormat
from onnxq.report.model import Report
from onnxq.report.terminal import RenderableType, SheetRows, TextView, join_lines, make_sheet, make_table
from onnxq.sites import Caution, Cautions, Names, Role
from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec

# Passes that leave the weights as they are: others scale or join them.
_KEPT = frozenset({"constants", "dead"})
# Names that an error lists.
_SHOWN = 4
# Columns of a block where a checkpoint has one scale for a whole row.
_SIZES = (128, 64, 32, 16)
# Bits beyond which ONNX Runtime's MatMulNBits takes whole zero points only.
_MOST_FLOAT_ZEROS = 4
_FIX = "export the dequantized checkpoint, or skip them with `allow_missing=True`: they stay float"


@dataclass(frozen=True)
class PlacedWeight:
    """A weight of the model that got codes. names: of the checkpoint. by: "values" or "names", which found it."""

    tensor: str
    nodes: Names
    names: Names
    by: str
    form: str


@dataclass(frozen=True)
class SkippedWeight:
    """A weight of the checkpoint that is not in the result, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class ImportedWeights:
    """The model with the weights of a checkpoint, those that were placed, and those that were skipped.

    count: weights of the checkpoint.
    """

    checkpoint: str
    format: str
    count: int
    placed: tuple[PlacedWeight, ...]
    skipped: tuple[SkippedWeight, ...]
    result: Result

    @property
    def model(self) -> onnx.ModelProto:
        """The quantized model."""
        return self.result.model

    @property
    def plan(self) -> Plan:
        """The plan, with all numbers, which `apply` carries out on another export."""
        return self.result.plan

    @property
    def report(self) -> Report:
        """The account of the result and its check."""
        return self.result.report

    @property
    def applied(self) -> Report:
        """The report, which is shown behind the list."""
        return self.result.report


def import_weights(
    model: ModelSource,
    checkpoint: str | Path,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> ImportedWeights:
    """Give a float export the quantized weights of a checkpoint, code for code.

    checkpoint: a folder with safetensors of GPTQ, AWQ or compressed-tensors, or a .gguf file. Weights are found by their
    values, where the model was exported from the dequantized checkpoint, or by their names. data: samples to check the
    result on. config: None suits the checkpoint. The override `emit` writes pairs or MatMulNBits; `allow_missing` skips
    weights that have no place. See `quantize` for the rest.

    Returns an ImportedWeights with `.model`, `.plan`, `.report`, `.placed` and `.skipped`.
    Raises CalibrationError for a checkpoint that cannot be read, and for weights that have no place.
    """
    opened = open_checkpoint(checkpoint)
    options = _choose_form(opened, overrides) if config is None else overrides
    with open_run(model, config, options, Command.IMPORT_WEIGHTS, out=out, force=force) as chosen:
        imported = _import(opened, model, data, chosen, progress)
        with progress("writing"):
            return replace(imported, result=write_result(imported.result, chosen, out, force))


def _choose_form(checkpoint: Checkpoint, overrides: Overrides) -> dict[str, Any]:
    """The overrides of a caller without a configuration, with the mode that the checkpoint's layers compute in."""
    data = [weight.data for weight in checkpoint.weights if weight.data is not None]
    mode = "static" if any(entry.scale is not None for entry in data) else "dynamic" if data else "weight-only"
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    # Codes are not to be changed, whatever they add up to in 16 bits.
    options: dict[str, Any] = {"mode": mode} if mode == "weight-only" else {"mode": mode, "saturation": "allow"}
    if mode == "weight-only" and given.get("target", DEFAULT_TARGET) == DEFAULT_TARGET:
        options |= {"emit": "nbits", "weights.granularity": "block", "weights.block_size": _SIZES[0]}
    return options | given


def _import(
    checkpoint: Checkpoint, model: ModelSource, data: object, config: Config, progress: Progress
) -> ImportedWeights:
    skip = (list_rewrites() - _KEPT) | frozenset(config.skip)
    ctx = RunContext(config=config, skip=skip, timers=Timers(progress), progress=progress)
    with ctx.timers.run("prepare", "preparing the model"):
        state = load_state(model, ctx, whole=config.mode == "weight-only")
    index = get_index(state.model)
    with (
        ctx.timers.run("match", "looking for the weights"),
        progress("reading weights", len(checkpoint.weights)) as task,
    ):
        match = match_weights(checkpoint, index, state.before, task)
    skipped = dict(match.missing)
    with ctx.timers.run("plan", "planning"):
        wanted = {found: spec for found in match.found if (spec := _choose_spec(found, config, skipped)) is not None}
        name = Path(model).name if isinstance(model, (str, Path)) else "model"
        plan = _plan_weights(state, config, name, wanted)
    with ctx.timers.run("codes", "reading codes"):
        plan, placed = _fill_plan(plan, wanted, config, skipped)
    if skipped and not config.data.allow_missing:
        raise _refuse_skipped(checkpoint, skipped)
    origin = f"{checkpoint.format} checkpoint {PurePath(checkpoint.source).name}"
    warnings = (*plan.warnings, *_explain_data(checkpoint, config))
    plan = replace(calibrate(state.model, plan, progress=progress), data=origin, warnings=warnings)
    samples = None if data is None else read_data(state, data, config, progress=progress)
    ctx = make_samples(ctx, state) if samples is None else ctx.add_samples(samples)
    with ctx.timers.run("emit", "making the quantized model"):
        quantized = build_file(state, plan, progress)
    result = finalize_run(ctx, state.add_plan(plan), quantized, source=model)
    lines = tuple(SkippedWeight(*row) for row in skipped.items())
    count = len(checkpoint.weights) + len(checkpoint.refused)
    return ImportedWeights(checkpoint.source, checkpoint.format, count, placed, lines, result)


def _choose_spec(found: FoundWeight, config: Config, skipped: dict[str, str]) -> QuantSpec | None:
    """The spec of a weight's codes; None, with a reason among those skipped, where ONNX cannot hold them."""
    columns, kinds = found.weight.shape[1], {node.op_type for node in found.weight.nodes}
    try:
        codes = found.read()
        if codes.minimum is not None and (
            config.emit != "nbits" or codes.bits > _MOST_FLOAT_ZEROS or kinds != {"MatMul"}
        ):
            cause = (
                f"blocks that begin at floats are for MatMul, in up to {_MOST_FLOAT_ZEROS} bits, with `emit='nbits'`"
            )
            raise CalibrationError(found.sources[0].form, cause)
    except CalibrationError as error:
        skipped.update(dict.fromkeys(found.names, f"{error.subject}: {error.cause}"))
        return None
    size = codes.size if codes.size < columns else 0
    if not size and config.emit == "nbits" and kinds == {"MatMul"}:
        # Any number of blocks has the scale of their row.
        size = next((size for size in _SIZES if columns % size == 0), 0)
    axis, symmetric = found.weight.axis, codes.symmetric
    grain = PerBlock(1 - axis, size) if size else PerChannel(axis)
    # Gemm has no kernel for packed integers.
    storage = f"{'' if symmetric else 'u'}int{4 if codes.bits <= 4 and 'Gemm' not in kinds else 8}"
    return QuantSpec(bits=codes.bits, signed=symmetric, symmetric=symmetric, granularity=grain, storage=storage)


def _plan_weights(state: FloatState, config: Config, name: str, wanted: Mapping[FoundWeight, QuantSpec]) -> Plan:
    """The plan of these weights alone, as the target's rules place them."""
    rules = []
    for found, spec in wanted.items():
        nodes = tuple(f"/^{re.escape(node.name)}$/" for node in found.weight.nodes)
        grain = spec.granularity
        blocks = {"granularity": "block", "block_size": grain.size} if isinstance(grain, PerBlock) else {}
        chosen = RuleSet(
            bits=spec.bits, scheme="symmetric" if spec.symmetric else "asymmetric", signed=spec.signed,
            storage=spec.storage, quantize=True, **({"granularity": "channel"} | blocks),
        )  # fmt: skip
        rules += [Rule(node=nodes, role=Role.WEIGHT, set=chosen), Rule(node=nodes, set=RuleSet(quantize=True))]
    rest = Rule(op="*", set=RuleSet(float=True))
    plan = plan_unrun(state, config.model_copy(update={"rules": (*config.rules, *rules, rest)}), name, None)
    # All other nodes are float because nothing was imported for them.
    nodes = {node.name for found in wanted for node in found.weight.nodes}
    refusals, left = ([row for row in rows if row.subject in nodes] for rows in (plan.refusals, plan.left_float))
    return replace(plan, refusals=tuple(refusals), left_float=tuple(left))


def _fill_plan(
    plan: Plan, wanted: Mapping[FoundWeight, QuantSpec], config: Config, skipped: dict[str, str]
) -> tuple[Plan, tuple[PlacedWeight, ...]]:
    """The plan with the numbers of the checkpoint, and the weights that got them."""
    by_node = {node.name: found for found in wanted for node in found.weight.nodes}
    sites, placed = [], []
    for site in plan.sites:
        readers = [edge.node for edge in site.consumers or ()]
        found = next((by_node[name] for name in readers if name in by_node), None)
        if site.role is not Role.WEIGHT or found is None:
            sites.append(site)
            continue
        if site.spec != wanted[found]:
            continue
        sites.append(_set_codes(site, found.read(), found.weight.axis))
        row = (str(found.weight.tensor), tuple(readers), found.names, found.by, found.sources[0].form)
        placed.append(PlacedWeight(*row))
    done = {name for row in placed for name in row.names}
    reasons = {row.subject: row.reason for row in (*plan.refusals, *plan.left_float)}
    for found in wanted:
        why = [reasons[node.name] for node in found.weight.nodes if node.name in reasons]
        for name in found.names:
            if name not in done:
                skipped[name] = why[0] if why else f"{found.weight.tensor} cannot have its form for {plan.target}"
    if config.mode == "static":
        sites = list(_scale_data(sites, by_node))
    return replace(plan, sites=tuple(sites)), tuple(placed)


def _set_codes(site: SitePlan, codes: WeightCodes, axis: int) -> SitePlan:
    """The site of a weight with these codes, laid out as the weight is."""
    spec, grain = site.spec, site.spec.granularity
    raised = codes.middle if spec.signed else 0
    values = (codes.codes.astype(np.int16) - raised).astype(spec.numpy_storage)
    arrays = [values, codes.scale, codes.zero.astype(np.int32) - raised, codes.minimum]
    if isinstance(grain, PerBlock) and grain.size != codes.size:
        count = values.shape[1] // grain.size
        arrays[1:3] = [np.repeat(array, count, 1) for array in arrays[1:3] if array is not None]
    elif isinstance(grain, PerChannel):
        arrays[1:3] = [array[:, 0] for array in arrays[1:3] if array is not None]
    values, scale, zero, minimum = (
        np.ascontiguousarray(array.T if axis else array) if array is not None else None for array in arrays
    )
    order = None if codes.order is None else codes.order.astype(np.int32)
    qparams = QParams(scale.astype(np.float32), zero, "checkpoint")
    return replace(site, qparams=qparams, values=values, order=order, minimum=minimum)


def _scale_data(sites: Sequence[SitePlan], by_node: Mapping[str, FoundWeight]) -> Iterator[SitePlan]:
    """The sites with the checkpoint's scales of their data."""
    for site in sites:
        if site.role is not Role.ACTIVATION:
            yield site
            continue
        readers = site.consumers or ()
        data = [by_node[edge.node].sources[0].data for edge in readers if edge.node in by_node]
        if len(data) < len(readers) or any(entry is None or entry.scale is None for entry in data):
            subject = f"{site.site}: what reads it is quantized on static data"
            raise CalibrationError(
                subject, "the checkpoint has no scale for it", "give a preset of weights alone", code="Q515"
            )
        if len(set(data)) == 1:
            yield _set_scale(site, data[0])
            continue
        # Layers of one input whose scales differ: each has a pair of its own.
        for edge, entry in zip(readers, data, strict=True):
            tensor = site.quantized_tensor
            yield _set_scale(replace(site, site=edge, tensor=tensor, consumers=(edge,), anchor=""), entry)


def _set_scale(site: SitePlan, data: InputScale | None) -> SitePlan:
    assert data is not None
    raised = 0 if site.spec.signed else 128
    return replace(
        site,
        qparams=QParams(np.asarray(data.scale, np.float32), np.asarray(data.zero + raised, np.int32), "checkpoint"),
    )


def _refuse_skipped(checkpoint: Checkpoint, skipped: Mapping[str, str]) -> CalibrationError:
    names = [f"{name}: {reason}" for name, reason in list(skipped.items())[:_SHOWN]]
    more = f"; and {len(skipped) - _SHOWN} more" if len(skipped) > _SHOWN else ""
    total = len(checkpoint.weights) + len(checkpoint.refused)
    cause = f"{len(skipped)} of {total} weights have no place in the model: {'; '.join(names)}{more}"
    return CalibrationError(checkpoint.source, cause, _FIX, code="Q515")


def _explain_data(checkpoint: Checkpoint, config: Config) -> Cautions:
    """How layers treat their data otherwise than the checkpoint says."""
    data = {weight.data for weight in checkpoint.weights} - {None}
    if not data or (config.mode == "static" and InputScale() not in data):
        return ()
    how = "it stays float here" if config.mode == "weight-only" else "it has one scale a tensor and run here"
    text = f"the checkpoint quantizes the data of its layers to 8 bits, with a scale for each token, and {how}"
    return (Caution("W134", text),)


def _make_parts(imported: ImportedWeights, view: TextView) -> Iterator[RenderableType]:
    yield Text(f"{PurePath(imported.checkpoint).name}  ({imported.format})", style="bold")
    if view.verbose and imported.placed:
        columns = ("weight", "of the checkpoint", "found by", "form")
        rows = [(row.tensor, ", ".join(row.names), row.by, row.form) for row in imported.placed]
        yield make_table(columns, rows, names=columns[:2], fold=("form",))
        yield Text("")
    yield make_sheet(_make_rows(imported, view.verbose))


def _make_rows(imported: ImportedWeights, verbose: bool) -> SheetRows:
    by = [row.by for row in imported.placed]
    used = {name for row in imported.placed for name in row.names}
    yield "checkpoint", f"{imported.count} quantized weights, {len(used)} of them used"
    yield "placed", f"{len(by)} weights: {by.count('values')} found by values, {by.count('names')} by names"
    forms = dict.fromkeys(row.form for row in imported.placed)
    yield (
        "forms",
        join_lines(
            [f"{sum(row.form == form for row in imported.placed)} in {form}" for form in forms], verbose, _SHOWN
        ),
    )
    if imported.skipped:
        yield "skipped", join_lines([f"{row.name}: {row.reason}" for row in imported.skipped], verbose, _SHOWN)


FORMS = {
    "ImportedWeights": ResultFormat[ImportedWeights](
        make_parts=_make_parts, derive=lambda imported: {"applied": imported.report}, hidden="result"
    )
}
