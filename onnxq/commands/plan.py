"""`onnxq plan`: the tensors that would be quantized, how, by which rule and why; and the nodes that stay float."""

from onnxq.config import Command
from onnxq.pipeline import ModelSource, quantize_model
from onnxq.pipeline.configuration import Configuration, OutputPath, Overrides, open_run
from onnxq.pipeline.finalize import warn_unmeasured_cpu, write_plan
from onnxq.plan import Plan, to_json
from onnxq.progress import Progress, silent
from onnxq.report import ErrorValues, ResultFormat, Text, sentences, terminal

# Names of a list without `verbose`.
_NAMED = 4


def make_plan(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Plan:
    """The plan without numbers: site by site the tensors that would be quantized, how, by which rule and why.

    data supplies shapes, which branches run and, for placement "measured", the runs to time; synthetic
    inputs do without it. out: write the plan as JSON. See `quantize` for the rest.
    """
    with open_run(model, config, overrides, Command.PLAN, out=out, force=force) as chosen:
        plan = quantize_model.make_plan(model, data, chosen, progress=progress)
        write_plan(plan, out, force, progress)
    return plan


def _make_parts(plan: Plan, view: terminal.TextView) -> terminal.Parts:
    # The columns are fields of SiteLine; before calibration there are no scales.
    columns = ["site", "role", "spec", "rule"]
    if plan.sites and plan.calibrated:
        columns.insert(3, "scale")
    if view.verbose:
        columns.append("reason")
    if plan.sites:
        lines = list(map(sentences.make_site_line, plan.sites))
        yield from terminal.make_list(
            lines,
            view,
            columns,
            " ".join(columns),
            names=("site",),
            fold=("spec", "rule", "reason"),
        )
        yield Text()
    yield terminal.make_sheet(_make_rows(plan, view.verbose))


def _make_rows(plan: Plan, verbose: bool) -> terminal.SheetRows:
    text = f"{len(plan.sites)} sites for {plan.target}"
    if plan.sites:
        state = "with numbers" if plan.calibrated else "without numbers: calibration adds them"
        text += f": {sentences.format_roles(tuple(plan.by_role().items()))} ({state})"
    yield "plan", text
    if plan.existing:
        yield "existing", f"{len(plan.existing)} pairs that the model came with are kept"
    yield "prepare", ", ".join(plan.prepare)
    if plan.placement is not None:
        details = [sentences.placement_text(plan)]
        if plan.placement.cpu:
            details.append(f"cpu {plan.placement.cpu}")
        details += [
            f"{name} {ratio:.2f} times as fast as float"
            for name, ratio in plan.placement.speedups.items()
        ]
        yield "placement", ", ".join(details)
    for label, names in (("guarded", plan.float_nodes), ("kept", plan.kept)):
        yield label, terminal.join_lines(names, verbose, _NAMED, ", ")
    yield "refused", sentences.format_reasons(plan.refusals, verbose)
    yield "left float", sentences.format_reasons(plan.left_float, verbose)
    yield "float types", sentences.format_precision(plan.precision, verbose)
    yield "data", plan.data


class _PlanForm(ResultFormat[Plan]):
    """The JSON is the plan itself, as `apply` reads it."""

    def write_json(self, result: Plan, error: ErrorValues = None) -> str:
        return to_json(result)


FORM = _PlanForm(
    make_parts=_make_parts,
    # The machine that shows a plan is no part of it: another may carry it out.
    list_warnings=lambda plan: (*plan.warnings, *warn_unmeasured_cpu(plan)),
)
