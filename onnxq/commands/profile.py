"""`onnxq profile`: the cost of each quantized site, node and segment of a model at its outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from onnxq.commands.apply import read_plan
from onnxq.config import Command, Config
from onnxq.data import load_data
from onnxq.errors import ConfigError
from onnxq.evaluation.sensitivity import KINDS, GroupCost, Profile, measure_sensitivity
from onnxq.files import AnyPath
from onnxq.passes.base import RunContext
from onnxq.pipeline import Configuration, ModelSource, Overrides, load_both, name_file, open_run
from onnxq.pipeline.configuration import open_crew
from onnxq.pipeline.quantize_model import quantize
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report import ResultFormat, Text, terminal, warn_synthetic
from onnxq.sites import Caution
from onnxq.workers import use_threads

# Rows of a table without `verbose`.
_SHOWN = 12
_TITLES = {
    "node": "nodes, each with all it reads",
    "segment": "segments of neighbouring nodes",
    "site": "sites",
}


def profile_model(
    model: ModelSource,
    quantized: ModelSource | None = None,
    data: object = None,
    config: Configuration = None,
    *,
    plan: Plan | AnyPath | None = None,
    overrides: Overrides = None,
    progress: Progress = silent,
) -> Profile:
    """Switch quantized sites on and off, group by group, and measure the outputs against the float model's.

    quantized: a Q/DQ model made from `model`, by any tool; or plan: with its numbers. With neither, `model` is
    quantized as `quantize` would with this configuration. data, config, overrides: as for `quantize`; `samples`: how
    many to measure on. `by`: of "site", "node" (all that a node reads quantized) and "segment" (neighbouring nodes).

    Returns a Profile; `.groups` has the SQNR with each group alone quantized, and with all but it.
    Raises a subclass of OnnxqError for models that do not belong together, or data that does not fit.
    """
    if quantized is not None and plan is not None:
        raise ConfigError(
            "plan", "a plan and a quantized model were given", "give one of them", code="Q317"
        )
    # Where the model is quantized first, its time says nothing of the cost of its sites.
    with open_run(
        model, config, {**(overrides or {}), "verify.latency": False}, Command.PROFILE
    ) as chosen:
        if quantized is None and plan is None:
            quantized = quantize(model, data, chosen, progress=progress).model
            origin = f"quantized as {chosen.source or chosen.target} says"
        else:
            origin = str(plan if quantized is None else quantized)
        with progress("reading the models"):
            ctx = RunContext(config=Config(runtime=chosen.runtime), progress=progress)
            state, proto = load_both(
                model, ctx, quantized, None if plan is None else read_plan(plan)
            )
        samples = load_data(data, state.before.inputs, chosen.data, state.named, progress=progress)
        dataset = samples.take(chosen.profile.samples, chosen.data.seed)
        with use_threads(chosen.scale.threads), open_crew(chosen.scale, model) as crew:
            profile = measure_sensitivity(
                state.model,
                proto,
                dataset,
                kinds=chosen.profile.by or KINDS,
                threads=chosen.verify.threads,
                crew=crew,
                progress=progress,
            )
    return replace(
        profile,
        source=name_file(model),
        # A model given as an object would print its whole text.
        quantized=origin if len(origin) < 500 else "",
        data=dataset.describe(),
        synthetic=dataset.synthetic,
    )


def _make_parts(profile: Profile, view: terminal.TextView) -> terminal.Parts:
    yield _make_title(profile)
    yield terminal.make_sheet(_make_rows(profile))
    for kind in KINDS:
        costs = profile.of(kind)
        if costs:
            yield from (Text(), Text(_TITLES[kind], style="bold"))
            columns = ("name", "op", "pairs", "isolated", "left out", "gain")
            yield from terminal.make_list(
                costs,
                view,
                columns,
                _make_cost_row,
                usual=_SHOWN,
                right=columns[2:],
                names=columns[:1],
            )
    if profile.joint:
        yield from (Text(), Text("the loudest nodes left in float together", style="bold"))
        rows = [
            (len(cost.nodes), terminal.format_decibel(cost.sqnr_db), cost.rule)
            for cost in profile.joint
        ]
        yield terminal.make_table(
            ("nodes", "SQNR", "rule"), rows, right=("nodes", "SQNR"), fold=("rule",)
        )
    if profile.prefixes:
        yield from (Text(), Text("prefixes: quantized from the start up to a node", style="bold"))
        titles = ("node", "SQNR")
        yield from terminal.make_list(
            profile.prefixes,
            view,
            titles,
            lambda prefix: (prefix.node, terminal.format_decibel(prefix.sqnr_db)),
            right=titles[1:],
            names=titles[:1],
        )


def _make_title(profile: Profile) -> Text:
    text = terminal.make_title(profile.source)
    return text.join_facts([profile.quantized]) if profile.quantized else text


def _make_rows(profile: Profile) -> terminal.SheetRows:
    count = terminal.format_count(profile.samples, "sample")
    yield "all", f"{terminal.format_decibel(profile.sqnr_db)} with everything quantized, {count}"
    yield "data", profile.data
    if len(profile.outputs) > 1:
        rows = [
            (output.name + output.part, terminal.format_decibel(output.sqnr_db))
            for output in profile.outputs
        ]
        yield (
            "outputs",
            terminal.make_table(("output", "SQNR"), rows, right=("SQNR",), names=("output",)),
        )
    if profile.choices:
        yield "choices", terminal.Group(*terminal.list_choices(profile.choices))
    legend = "isolated: only it is quantized; left out: all but it; gain: what leaving it float would bring back"
    yield "read", legend


def _make_cost_row(cost: GroupCost) -> Sequence[object]:
    # A segment may hold many operators: three of them are enough to recognise it.
    ops = "/".join((*cost.ops[:3], *(["…"] if len(cost.ops) > 3 else [])))
    return (
        cost.name,
        ops,
        len(cost.sites),
        terminal.format_decibel(cost.isolated_db),
        terminal.format_decibel(cost.leave_one_out_db),
        terminal.format_figure(cost.gain_db, "+.2f", " dB") or "n/a",
    )


def _list_warnings(profile: Profile) -> Iterator[Caution]:
    yield from profile.warnings
    if profile.synthetic:
        yield warn_synthetic("costs were measured")


FORM = ResultFormat[Profile](make_parts=_make_parts, list_warnings=_list_warnings)
