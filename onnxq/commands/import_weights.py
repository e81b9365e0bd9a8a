"""`onnxq import-weights`: a float export and a quantized checkpoint in, a model with the checkpoint's codes out."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import onnx

from onnxq.arrays import as_float32, as_int32
from onnxq.calibrate import calibrate
from onnxq.commands.apply import make_samples
from onnxq.config import DEFAULT_TARGET, Command, Config, Rule, drop_unset, match_names
from onnxq.errors import CalibrationError
from onnxq.files import AnyPath, guard_outputs
from onnxq.graph import compute_structural_ids
from onnxq.interop import FoundWeight, match_weights
from onnxq.interop.checkpoints import Checkpoint, InputScale, WeightCodes, open_checkpoint
from onnxq.passes import FloatState, RunContext, Timers, build_file
from onnxq.passes.equalization.passes import SCALINGS, TOKEN_SCALES, write_factors
from onnxq.passes.registry import list_rewrites
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, open_run
from onnxq.pipeline.configuration import name_model
from onnxq.pipeline.finalize import Result, finalize_run, write_result
from onnxq.pipeline.prepared import load_state, read_data
from onnxq.pipeline.quantize_model import plan_unrun
from onnxq.plan import Plan, SitePlan
from onnxq.plan.forms import spec_dict
from onnxq.progress import Progress, silent
from onnxq.report import Report, ResultFormat, Text, terminal
from onnxq.sites import Causes, Caution, JsonObject, Names, Role
from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec, make_granularity, name_int
from onnxq.wording import join_names, show_as_summary

# Passes that leave weights as they are.
_KEPT = frozenset({"constants", "dead"})
# Names that an error lists.
_SHOWN = 4
# Columns of a block where a checkpoint has one scale for a whole row, and pairs in blocks become operators.
_SIZES = (128, 64, 32, 16)
# The most bits for which ONNX Runtime's MatMulNBits has float zero points.
_MOST_BITS = 4
_NO_FLOATS = (
    "its blocks begin at floats, which a MatMul alone may "
    f"have, up to {_MOST_BITS} bits and with `emit='nbits'`"
)
_ORIGIN = "checkpoint"


@dataclass(frozen=True)
class PlacedWeight:
    """A weight of the model that got codes. names: of the checkpoint's weights. by: what found it, values or names."""

    tensor: str
    nodes: Names
    names: Names
    by: str
    form: str


@dataclass(frozen=True)
class SkippedWeight:
    """A weight of the checkpoint without codes in the result. exact: the model has its values, in float."""

    name: str
    reason: str
    exact: bool = False


@show_as_summary
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
        """The plan, with all numbers; `apply` carries it out on another export."""
        return self.result.plan

    @property
    def report(self) -> Report:
        """The account of the result and its check."""
        return self.result.report

    # It is shown behind the list.
    applied = report


def import_weights(
    model: ModelSource,
    checkpoint: AnyPath,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> ImportedWeights:
    """Give a float export the quantized weights of a checkpoint, code for code.

    checkpoint: a folder with safetensors of GPTQ, AWQ or compressed-tensors, or a .gguf file. Its weights are found by
    their values, where the model was exported from the dequantized checkpoint, or by their names. data: samples to
    check the result on. config: None suits the checkpoint. The override `emit` writes pairs or MatMulNBits,
    `allow_missing` skips weights that have no place. See `quantize` for the rest.

    Returns an ImportedWeights with `.model`, `.plan`, `.report`, `.placed`, `.skipped` and `.result`.
    Raises CalibrationError for a checkpoint that cannot be read, and for weights that have no place.
    """
    with guard_outputs("", out, force=force):
        # Inside the guard, because its files are inputs, too; before the configuration, which follows its form.
        opened = open_checkpoint(checkpoint)
        options = _choose_form(opened, overrides) if config is None else overrides
        with open_run(
            model, config, options, Command.IMPORT_WEIGHTS, out=out, force=force
        ) as chosen:
            imported = _import(opened, model, data, chosen, progress)
            result = write_result(imported.result, chosen, out, force, progress)
            return replace(imported, result=result)


def _choose_form(checkpoint: Checkpoint, overrides: Overrides) -> JsonObject:
    """The overrides of a caller without a configuration, with what suits the checkpoint."""
    # What a caller asks for goes before what suits.
    given = drop_unset(overrides)
    data = {weight.data for weight in checkpoint.weights} - {None}
    # Products on integers have one scale a column: weights in blocks leave the data float.
    whole = all(weight.size == weight.shape[1] for weight in checkpoint.weights)
    mode = "weight-only"
    if data and whole:
        mode = "dynamic" if InputScale() in data else "static"
    mode = given.setdefault("mode", mode)
    if mode != "weight-only":
        # Codes are not to be changed, whatever they add up to in 16 bits.
        return {"saturation": "allow"} | given
    if given.get("target", DEFAULT_TARGET) != DEFAULT_TARGET:
        return given
    return {
        "emit": "nbits",
        "weights.granularity": "block",
        "weights.block_size": _SIZES[0],
    } | given


def _import(
    checkpoint: Checkpoint, model: ModelSource, data: object, config: Config, progress: Progress
) -> ImportedWeights:
    skip = (list_rewrites() - _KEPT).union(config.skip)
    ctx = RunContext(config=config, skip=skip, timers=Timers(progress), progress=progress)
    with ctx.timers.run("prepare", "preparing the model"):
        state = load_state(model, ctx, whole=config.mode == "weight-only")
    with progress("looking for the weights", len(checkpoint.weights)) as task:
        match = match_weights(checkpoint, state.index, state.before, task)
    state = _scale_tokens(state, match.found, config)
    # Those that the model does not have at all; and those that it has in float, and goes on having so: values that were
    # found are the checkpoint's own, so that answers are as exact as with codes.
    missing = dict(match.missing)
    floats = dict[str, str]()
    wanted = {}
    with ctx.timers.run("codes", "reading codes"):
        for found in match.found:
            try:
                codes = found.read()
                wanted[found] = _choose_spec(found, codes, config), codes
            except CalibrationError as error:
                reasons = floats if found.by == "values" else missing
                reasons |= dict.fromkeys(found.names, error.fault)
    with ctx.timers.run("plan", "planning"):
        name = name_model(model)
        plan, placed = _fill_plan(_plan_weights(state, config, name, wanted), wanted)
    # A weight of the network may hold several of the checkpoint: query, key and value in one product.
    done = {name for row in placed for name in row.names}
    for found in wanted:
        reasons = floats if found.by == "values" else missing
        reasons |= dict.fromkeys({*found.names} - done, _explain_float(plan, found))
    skipped = [SkippedWeight(*row) for row in missing.items()]
    if (skipped or not placed) and not config.data.allow_missing:
        raise _refuse(checkpoint, missing or floats)
    skipped += [
        SkippedWeight(name, reason, True) for name, reason in floats.items() if name not in done
    ]
    plan = calibrate(
        state.model, replace(plan, warnings=(*plan.warnings, *_explain_data(checkpoint, config)))
    )
    origin = f"{checkpoint.format} checkpoint {PurePath(checkpoint.source).name}"
    plan = replace(plan, scalings=SCALINGS.find(state) or (), data=origin)
    with ctx.timers.run("emit", "making the quantized model"):
        quantized = build_file(state, plan, progress)
    if data is None:
        ctx = make_samples(ctx, state)
    else:
        ctx = ctx.add_samples(read_data(state, data, config, progress=progress))
    result = finalize_run(ctx, state.add_plan(plan), quantized, source=model)
    count = len(checkpoint.weights) + len(checkpoint.refused)
    return ImportedWeights(
        checkpoint.source, checkpoint.format, count, placed, tuple(skipped), result
    )


def _scale_tokens(state: FloatState, found: Iterable[FoundWeight], config: Config) -> FloatState:
    """The state with the inputs of layers divided by their tokens' scales, where the checkpoint has such."""
    if config.mode != "static":
        return state
    # Once for a tensor, whichever of its layers the checkpoint says it of: all of them read the same tokens.
    steps = {
        tensor: as_float32([source.data.steps])
        for match in found
        for source in match.sources
        if source.data is not None and source.data.steps
        for node in match.weight.nodes
        if (tensor := state.index.find_input(node)) is not None
    }
    return (
        write_factors(compute_structural_ids(state.model), state, TOKEN_SCALES, steps)
        if steps
        else state
    )


def _choose_spec(found: FoundWeight, codes: WeightCodes, config: Config) -> QuantSpec:
    """The spec of a weight's codes. Raises CalibrationError where ONNX cannot hold them."""
    weight = found.weight
    nbits = config.emit == "nbits"
    alone = weight.ops == {"MatMul"}
    if codes.minimum is not None and not (nbits and alone and codes.bits <= _MOST_BITS):
        raise CalibrationError(found.sources[0].form, _NO_FLOATS, code="Q515")
    if codes.order is not None and config.mode != "weight-only":
        raise CalibrationError(
            found.sources[0].form, "groups in another order are for data in float", code="Q515"
        )
    columns = weight.shape[1]
    # Any number of blocks has the scale of their row.
    whole = next((size for size in _SIZES if nbits and alone and columns % size == 0), 0)
    size = codes.size if codes.size < columns else whole
    # Gemm reads no packed integers.
    packed = codes.bits <= 4 and "Gemm" not in weight.ops
    return QuantSpec(
        bits=codes.bits,
        signed=codes.symmetric,
        symmetric=codes.symmetric,
        granularity=make_granularity(1 - weight.axis if size else weight.axis, size),
        storage=name_int(4 if packed else 8, signed=codes.symmetric),
    )


def _plan_weights(
    state: FloatState,
    config: Config,
    name: str,
    wanted: Mapping[FoundWeight, tuple[QuantSpec, WeightCodes]],
) -> Plan:
    """The plan of these weights alone, as the target's rules place them."""
    rules = []
    for found, (spec, _) in wanted.items():
        nodes = match_names(node.name for node in found.weight.nodes)
        words = spec_dict(spec)
        form: JsonObject = {
            key: words[key]
            for key in ("bits", "scheme", "granularity", "block_size")
            if key in words
        }
        form |= {"signed": spec.signed, "storage": spec.storage, "quantize": True}
        # The second is for the data of the same nodes, where the mode quantizes data.
        rules += [
            {"node": nodes, "role": "weight", "set": form},
            {"node": nodes, "set": {"quantize": True}},
        ]
    rules.append({"op": "*", "set": {"float": True}})
    own = (*config.rules, *map(Rule.model_validate, rules))
    plan = plan_unrun(state, config.model_copy(update={"rules": own}), name, None)
    # All other nodes are float because the checkpoint has nothing for them, which is no refusal and no choice.
    readers = {node.name for found in wanted for node in found.weight.nodes}
    refusals = tuple(row for row in plan.refusals if row.subject in readers)
    return replace(
        plan,
        refusals=refusals,
        left_float=tuple(row for row in plan.left_float if row.subject in readers),
    )


def _fill_plan(
    plan: Plan, wanted: Mapping[FoundWeight, tuple[QuantSpec, WeightCodes]]
) -> tuple[Plan, tuple[PlacedWeight, ...]]:
    """The plan with the numbers of the checkpoint, and the weights that got them."""
    by_node = {node.name: found for found in wanted for node in found.weight.nodes}
    sites = list[SitePlan]()
    placed = []
    for site in plan.sites:
        readers = tuple(edge.node for edge in site.named_consumers)
        found = [by_node[name] for name in readers if name in by_node]
        if site.role is Role.ACTIVATION and not site.spec.dynamic:
            sites += _scale_data(site, found)
        elif not site.role.is_weight:
            sites.append(site)
        for match in [
            match for match in found if site.role.is_weight and site.spec == wanted[match][0]
        ][:1]:
            sites.append(_set_codes(site, wanted[match][1], match.weight.axis))
            placed.append(
                PlacedWeight(
                    str(match.weight.tensor), readers, match.names, match.by, match.sources[0].form
                )
            )
    return plan.with_sites(sites), tuple(placed)


def _set_codes(site: SitePlan, codes: WeightCodes, axis: int) -> SitePlan:
    """The site of a weight with these codes, laid out as the weight is."""
    spec = site.spec
    grain = site.spec.granularity
    # Checkpoints store codes from 0 on; signed types lie around it.
    raised = codes.middle if spec.signed else 0
    stored = (codes.codes.astype(np.int16) - raised).astype(spec.numpy_storage)
    arrays: list[Any] = [codes.scale, as_int32(codes.zero) - raised, stored, codes.minimum]
    if isinstance(grain, PerBlock) and codes.size > grain.size:
        arrays[:2] = (np.repeat(array, stored.shape[1] // grain.size, 1) for array in arrays[:2])
    elif isinstance(grain, PerChannel):
        arrays[:2] = (array[:, 0] for array in arrays[:2])
    laid: list[Any] = [
        None if a is None else np.ascontiguousarray(a.T if axis else a) for a in arrays
    ]
    numbers = QParams(laid[0], laid[1], _ORIGIN, minimum=laid[3], order=codes.order)
    return replace(site, qparams=numbers, values=laid[2])


def _scale_data(site: SitePlan, found: list[FoundWeight]) -> Iterator[SitePlan]:
    """The site with the checkpoint's scale; one at each reader where those of one tensor have others."""
    readers = site.named_consumers
    data = [match.sources[0].data for match in found]
    scales = {entry for entry in data if entry is not None and entry.scale is not None}
    if len(data) < len(readers) or {*data} != scales:
        cause = "is read by layers on static data, and the checkpoint has no scale for it"
        raise CalibrationError(site.name, cause, "write `mode: weight-only`", code="Q515")
    raised = 0 if site.spec.signed else 128
    for entry, edge in zip(data, readers, strict=False):
        assert entry is not None
        numbers = QParams(
            np.asarray(entry.scale, np.float32), as_int32(entry.zero + raised), _ORIGIN
        )
        own = replace(site, qparams=numbers)
        if len(scales) == 1:
            yield own
            return
        yield replace(own, site=edge, tensor=site.quantized_tensor, consumers=(edge,), anchor="")


def _explain_float(plan: Plan, found: FoundWeight) -> str:
    """Why the plan has no site for a weight that it was asked for."""
    nodes = {node.name for node in found.weight.nodes}
    reasons = (row.reason for row in plan.unquantized if row.subject in nodes)
    return next(reasons, f"{plan.target} has no place for the form of {found.weight.tensor}")


def _refuse(checkpoint: Checkpoint, skipped: Causes) -> CalibrationError:
    names = [f"{name}: {reason}" for name, reason in skipped.items()]
    count = len(checkpoint.weights) + len(checkpoint.refused)
    cause = (
        f"{len(skipped)} of {count} weights have no place in the model: {join_names(names, _SHOWN)}"
    )
    fix = "export the dequantized checkpoint, or leave them as they are in the model with `allow_missing=True`"
    return CalibrationError(checkpoint.source, cause, fix, code="Q515")


def _explain_data(checkpoint: Checkpoint, config: Config) -> Iterator[Caution]:
    """How layers treat their data otherwise than the checkpoint says."""
    data = {weight.data for weight in checkpoint.weights} - {None}
    if data and config.mode != "static":
        how = (
            "it stays float here"
            if config.mode == "weight-only"
            else "it has one scale a tensor and run here"
        )
        yield Caution(
            "W139", f"the checkpoint quantizes the data of its layers to 8 bits, and {how}"
        )


def _make_parts(imported: ImportedWeights, view: terminal.TextView) -> terminal.Parts:
    yield Text(f"{PurePath(imported.checkpoint).name}  ({imported.format})", style="bold")
    if view.verbose and imported.placed:
        columns = ("weight", "of the checkpoint", "found by", "form")
        rows = [(row.tensor, ", ".join(row.names), row.by, row.form) for row in imported.placed]
        yield terminal.make_table(columns, rows, names=columns[:2], fold=columns[3:])
        yield Text()
    yield terminal.make_sheet(_make_rows(imported, view.verbose))


def _make_rows(imported: ImportedWeights, verbose: bool) -> terminal.SheetRows:
    used = {name for row in imported.placed for name in row.names}
    by = Counter(row.by for row in imported.placed)
    forms = Counter(row.form for row in imported.placed)
    yield "checkpoint", f"{imported.count} quantized weights, {len(used)} of them used"
    yield (
        "placed",
        f"{len(imported.placed)} weights: {by['values']} found by values, {by['names']} by names",
    )
    yield (
        "forms",
        terminal.join_lines(
            [f"{count} in {form}" for form, count in forms.items()], verbose, _SHOWN
        ),
    )
    for exact, label in ((False, "skipped"), (True, "in float")):
        lines = [f"{row.name}: {row.reason}" for row in imported.skipped if row.exact is exact]
        yield label, terminal.join_lines(lines, verbose, _SHOWN)


FORM = ResultFormat[ImportedWeights](
    make_parts=_make_parts,
    derive=lambda imported: {"applied": imported.report},
    hidden="result",
)
