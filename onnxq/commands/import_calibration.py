"""`onnxq import-calibration`: another tool's file of scales and its model in, a plan with those scales out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from onnxq.backends import find_target, list_backends
from onnxq.calibrate import calibrate
from onnxq.commands.apply import apply
from onnxq.config import DEFAULT_TARGET, Command, Config, Rule, RuleSet, drop_unset, match_names
from onnxq.errors import CalibrationError, ConfigError, suggest_names
from onnxq.files import AnyPath, guard_outputs
from onnxq.graph import GraphIndex
from onnxq.interop import ScaleTable, make_rules, read_scales, sort_by_name
from onnxq.interop.base import UnmatchedKind, UnusedLine
from onnxq.interop.matching import (
    Imported,
    MatchedSite,
    MissingSite,
    ScaleMatch,
    list_consumers,
    match_scales,
    set_scales,
)
from onnxq.passes import FloatState, RunContext, SampleSets
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, name_file, open_run
from onnxq.pipeline.configuration import name_model
from onnxq.pipeline.finalize import describe_rest, write_plan
from onnxq.pipeline.prepared import load_state, read_data
from onnxq.pipeline.quantize_model import draft_placement
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report import Report, ResultFormat, Text, Values, terminal
from onnxq.sites import Caution, Cautions, JsonObject, Refusal
from onnxq.wording import format_counts, group_by_text, join_names, list_fields

# Tensors that an error names; a cache of another model lacks hundreds.
_SHOWN = 4
_REASON = "reads or writes a tensor that the calibration cache has no scale for"
# Passes that make tensors which neither the model nor TensorRT, fusing it, has.
_MAKES_TENSORS = frozenset({"scalars"})
# Labels of the reasons for unused lines, in the order of the sheet.
_LABELS = {
    UnmatchedKind.FOLDED: "fused away",
    UnmatchedKind.TENSORRT: "TensorRT's own layers",
    UnmatchedKind.UNKNOWN: "not in the model",
}


def import_calibration(
    cache: AnyPath | ScaleTable,
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    kind: str = "",
    force: bool = False,
    progress: Progress = silent,
) -> Imported:
    """Turn another tool's file of scales into a plan with those very scales, float32 bit for bit.

    cache: the file; its formats stand in docs/formats.md. model: the ONNX file it was made with. data: samples to
    calibrate the tensors on that the file has no scale for; the override `allow_missing` leaves their readers float.
    config: None, and a file that names no target, start from the preset of the engine whose file it is, or of the
    target in `overrides`. out: write the plan as JSON; `onnxq.apply` carries it out. kind: name of the file's format;
    "": the one that recognizes it. See `quantize` for the rest.

    Bits are those of the file wherever the target has a kernel; numbers that its types cannot hold as they are keep
    their range, and `.matched` says so.
    Returns an Imported with `.plan`, `.matched`, `.unmatched`, `.unused` and `.missing`.
    Raises CalibrationError for a malformed file, one of another model, and tensors without a scale.
    """
    with guard_outputs(name_file(model), out, force=force):
        scales = cache if isinstance(cache, ScaleTable) else read_scales(cache, kind)
        usual = _find_usual(scales)
        options = _choose_target(overrides, scales, usual) if config is None else overrides
        with open_run(
            model, config, options, Command.IMPORT, out=out, force=force, usual=usual
        ) as chosen:
            imported = _import(scales, model, data, chosen, progress)
            write_plan(imported.plan, out, force, progress)
    return imported


def _find_usual(scales: ScaleTable) -> str:
    """The target where neither the configuration nor an option names one: that of the engine whose file it is."""
    # Files of symmetric int8 alone are for engines that take nothing else.
    backends = tuple(list_backends())
    mine = [b.name for b in backends if any(map(scales.kind.startswith, b.formats))]
    strict = [
        b.name for b in backends if scales.only_int8 and b.formats and not b.usual.zero_points
    ]
    return next(iter((*mine, *strict)), DEFAULT_TARGET)


# The options that both steps take, so that they read the same samples.
_SHARED = ("samples", "seed", "batch", "memory_limit", "ort_library", "provider")


@dataclass(frozen=True, kw_only=True)
class AppliedImport(Imported):
    """An import, and the report of its plan carried out at once; None if it was not."""

    applied: Report | None = None


def import_and_apply(
    cache: str,
    model: str,
    data: str | None,
    config: str | None,
    *,
    overrides: JsonObject,
    out: str | None,
    kind: str | None,
    applied: str | None,
    force: bool,
    progress: Progress,
) -> AppliedImport:
    """Import a file, and carry the plan out. applied: the file for the quantized model; None: it is not made."""
    shared: JsonObject = {"force": force, "progress": progress}
    report = None
    # Inputs and both outputs are checked before anything is written, since the plan is written first.
    with guard_outputs(model, out, applied, force=force):
        imported = import_calibration(
            cache, model, data, config, overrides=overrides, out=out, kind=kind or "", **shared
        )
        if applied is not None:
            settings = {key: overrides[key] for key in _SHARED if key in overrides} | {
                "latency": False
            }
            # A configuration that was not given follows the plan's target.
            config = config or f"{imported.plan.target}-int8"
            report = apply(
                model, imported.plan, data, config, overrides=settings, out=applied, **shared
            ).report
    return AppliedImport(**list_fields(imported), applied=report)


def _choose_target(overrides: Overrides, scales: ScaleTable, usual: str) -> JsonObject:
    """The overrides of a caller without a configuration, with the presets' values that fit the scales of a cache."""
    options = {
        "target": usual,
        **drop_unset(overrides),
    }
    # The default preset is asymmetric uint8, of which scales of int8 say nothing.
    fits = options["target"] != DEFAULT_TARGET or not scales.only_int8
    return (
        {} if fits else {"activations.scheme": "symmetric", "activations.signed": True}
    ) | options


def _import(
    scales: ScaleTable, model: ModelSource, data: object, config: Config, progress: Progress
) -> Imported:
    """Plan the model and give its sites the file's scales."""
    _demand_symmetric(config, scales)
    name = name_model(model)
    ctx = RunContext(config=config, skip=frozenset(config.skip), progress=progress)
    state = load_state(model, ctx)
    trial = _attempt(
        scales, state, read_data(state, data, config, progress=progress), config, name, progress
    )
    # Which sites there are is known once the model is planned; with the file's bits it is planned again.
    if rules := _list_rules(trial, scales, config):
        config = config.add_rules(*rules)
        trial = _attempt(scales, state, trial.samples, config, name, progress)
    notes: Cautions = ()
    # The calibrator saw the tensors of the file; without the pass that makes others it may have scales for more.
    rewrites = sorted(_MAKES_TENSORS.intersection(trial.state.rewrites))
    if rewrites and _lacks_own_tensor(trial):
        state = load_state(model, replace(ctx, skip=ctx.skip.union(rewrites)))
        other = _attempt(scales, state, trial.samples, config, name, progress)
        if len(other.match.missing) < len(trial.match.missing):
            trial = other
            text = f"prepared without {', '.join(rewrites)}, which makes tensors that TensorRT did not have"
            notes = (Caution("W114", text),)
    if trial.match.missing and data is None and not config.data.allow_missing:
        raise _refuse_missing(scales, trial.match)
    absent = tuple(replace(site, done="calibrated on the samples") for site in trial.match.absent)
    if trial.match.missing and data is None:
        trial, absent = _leave_missing_float(trial, config, scales, name, progress)
    match = trial.match
    samples = trial.samples
    plan = calibrate(
        trial.state.model,
        set_scales(trial.plan, match.qparams),
        samples.calibration if data is not None else None,
        batch=config.data.batch,
        memory_limit=config.data.memory_limit,
        progress=progress,
    )
    # Of the samples only if some of the numbers come from them.
    origin = f"{scales.origin} {Path(scales.source).name} ({scales.header})"
    calibrated = data is not None and absent
    return Imported(
        plan=replace(plan, data=f"{origin}; {samples.description}" if calibrated else origin),
        cache=scales.source,
        header=scales.header,
        entries=len(scales.entries) + len(scales.skipped),
        matched=match.matched,
        unmatched=match.unmatched,
        unused=match.unused,
        missing=absent,
        notes=(*describe_rest(trial.state.rest), *notes, *match.notes),
        unit=scales.unit,
    )


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A plan without numbers, of one way to prepare the model, and the cache's scales for it."""

    state: FloatState
    samples: SampleSets
    plan: Plan
    match: ScaleMatch


def _attempt(
    cache: ScaleTable,
    state: FloatState,
    samples: SampleSets,
    config: Config,
    name: str,
    progress: Progress,
) -> _Attempt:
    with progress("planning"):
        drafted = draft_placement(state, samples, config, name, progress=progress)
        plan = drafted.default(attention=config.attention == "quantized")
        return _Attempt(
            state, samples, plan, match_scales(cache, plan, state.before, GraphIndex(state.model))
        )


def _list_rules(trial: _Attempt, scales: ScaleTable, config: Config) -> tuple[Rule, ...]:
    """Rules by which sites get the bits of the file."""
    if scales.only_int8:
        return ()
    engine = find_target(config.target, config.mode)
    index = GraphIndex(trial.state.model)
    return tuple(
        make_rules(trial.plan, trial.match.entries, sort_by_name(scales.entries), engine, index)
    )


def _lacks_own_tensor(trial: _Attempt) -> bool:
    """Preparation made a tensor that lacks a scale: no cache can ever have one for it."""
    before = trial.state.before
    names = {output for node in before.nodes for output in node.outputs} | {
        value.name for value in before.inputs
    }
    return any(site.tensor not in names for site in trial.match.absent)


def _demand_symmetric(config: Config, scales: ScaleTable) -> None:
    """Raise ConfigError unless activations are of a type that the file can have scales of."""
    activations = config.activations
    if config.mode != "static":
        raise ConfigError(
            config.source or "mode",
            "calibrates no activations: there is nothing a calibration cache is for",
            f"choose a static preset, e.g. {_find_usual(scales)}-int8",
            code="Q321",
        )
    kind = (
        activations.bits,
        activations.scheme,
        activations.is_signed,
        activations.storage or "int8",
    )
    if scales.only_int8 and kind != (8, "symmetric", True, "int8"):
        raise ConfigError(
            f"{config.source or 'config'}: activations",
            "a calibration cache holds scales of symmetric int8, and this asks for something else",
            f"write `activations: {{bits: 8, scheme: symmetric, signed: true}}`, or take {_find_usual(scales)}-int8",
            code="Q321",
        )


def _refuse_missing(cache: ScaleTable, match: ScaleMatch) -> CalibrationError:
    names = [
        f"{site.tensor} ({suggest_names(site.tensor, site.nearest)})"
        if site.nearest
        else site.tensor
        for site in match.absent
    ]
    total = len(names) + len(match.matched)
    return CalibrationError(
        cache.source,
        f"has no scale for {len(names)} of {total} tensors to be quantized: {join_names(names, _SHOWN)}",
        "calibrate them with `data=…`, or leave what reads them in float with `allow_missing=True`",
        code="Q507",
    )


def _leave_missing_float(
    trial: _Attempt, config: Config, cache: ScaleTable, name: str, progress: Progress
) -> tuple[_Attempt, tuple[MissingSite, ...]]:
    """The plan with float in place of whatever reads a tensor without a scale, as TensorRT itself does.

    Leaving nodes float can move pairs to other tensors, so it is repeated; every round takes nodes out.
    """
    index = GraphIndex(trial.state.model)
    # Node -> a tensor that it lacks, over all rounds.
    left: dict[str, str] = {}
    absent: dict[str, MissingSite] = {}
    while trial.match.missing:
        readers = list_consumers(trial.match.missing, index)
        if readers.keys() <= left.keys():
            subject = str(trial.match.missing[0].site)
            raise CalibrationError(
                subject,
                "has no scale and cannot be left float",
                "calibrate it with `data=…`",
                code="Q507",
            )
        for report, site in zip(trial.match.absent, trial.match.missing, strict=True):
            nodes = ", ".join(list_consumers((site,), index))
            absent.setdefault(report.site, replace(report, done=f"left float: {nodes}"))
        left |= readers
        changed = config.add_rules(Rule(node=match_names(left), set=RuleSet(float=True)))
        trial = _attempt(cache, trial.state, trial.samples, changed, name, progress)
    refusals = tuple(
        Refusal(node, _REASON, "calibrate it with samples", "no-scale", "R106") for node in left
    )
    # The rule that leaves them float is ours, and gives another reason than the cache.
    others = tuple(refusal for refusal in trial.plan.refusals if refusal.subject not in left)
    floats = tuple(entry for entry in trial.plan.left_float if entry.subject not in left)
    plan = replace(trial.plan, refusals=(*others, *refusals), left_float=floats)
    return replace(trial, plan=plan), tuple(absent.values())


def _make_parts(imported: Imported, view: terminal.TextView) -> terminal.Parts:
    yield Text(f"{PurePath(imported.cache).name}  ({imported.header})", style="bold")
    if view.verbose and imported.matched:
        columns = ("site", "scale", imported.unit, "name in the cache", "through")
        names = ("site", "name in the cache")
        rows = map(_make_match, imported.matched)
        yield terminal.make_table(columns, rows, right=columns[1:3], names=names, fold=("through",))
        yield Text()
    yield terminal.make_sheet(_make_rows(imported, view.verbose))


def _make_rows(imported: Imported, verbose: bool) -> terminal.SheetRows:
    used = len({match.line for match in imported.matched})
    yield "cache", f"{imported.entries} scales, {used} of them used"
    text = f"{len(imported.plan.sites)} sites for {imported.plan.target}"
    counts = format_counts(dict(sorted(imported.plan.by_role().items())))
    yield "plan", f"{text}: {counts}" if counts else text
    lines = [
        f"{site.tensor}: {site.done}" if site.done else site.tensor for site in imported.missing
    ]
    yield "no scale", terminal.join_lines(lines, verbose, _SHOWN)
    for kind, label in _LABELS.items():
        names = [
            _describe_line(line, imported.unit, verbose)
            for line in imported.unmatched
            if line.why is kind
        ]
        if names:
            yield (
                label,
                Text(f"{len(names)}: ").append_text(terminal.join_lines(names, verbose, _SHOWN)),
            )
    changed = [f"{match.site}: {match.kept}" for match in imported.matched if match.kept]
    yield "other type", terminal.join_lines(changed, verbose, _SHOWN)
    yield (
        "not used",
        [
            f"{len(members)} {reason}"
            + (f": {', '.join(line.name for line in members)}" if verbose else "")
            for reason, members in group_by_text(imported.unused, lambda line: line.reason)
        ],
    )


def _make_match(match: MatchedSite) -> Sequence[object]:
    # Most names are the site's own; only others are worth a cell.
    name = match.name if match.name != match.site else ""
    return (
        match.site,
        terminal.format_scale(match.scale, match.scale),
        match.line,
        name,
        match.kept or match.through,
    )


def _describe_line(line: UnusedLine, unit: str, verbose: bool) -> str:
    text = f"{line.name} ({unit} {line.line})"
    if line.nearest:
        return f"{text}, nearest {' or '.join(line.nearest)}"
    return f"{text}: {line.reason}" if verbose else text


def _describe_plan(imported: Imported) -> Values:
    plan = imported.plan
    return {
        "target": plan.target,
        "sites": len(plan.sites),
        "refusals": plan.refusals,
        "left_float": plan.left_float,
        "applied": getattr(imported, "applied", None),
    }


# The plan has its own file.
FORM = ResultFormat[Imported](
    make_parts=_make_parts,
    list_warnings=lambda imported: (*imported.notes, *imported.plan.warnings),
    derive=_describe_plan,
    hidden="plan",
)
