"""`onnxq export-calibration`: the scales of a plan, or of a quantized file, as another tool reads them."""

from dataclasses import replace
from pathlib import Path, PurePath

from onnxq.annotate import find_existing, read_model, read_plan_note
from onnxq.commands.apply import read_plan
from onnxq.errors import ModelError, PlanError
from onnxq.files import describe_os_error, guard_outputs, replace_files
from onnxq.graph import GraphIndex, infer_shapes, inline_functions, load_model, name_nodes
from onnxq.interop import find_format
from onnxq.interop.exporting import ExportedScales, list_uncovered, write_scales
from onnxq.pipeline import ModelSource, OutputPath, name_file
from onnxq.plan import Plan, SitePlans
from onnxq.progress import Progress, silent
from onnxq.report import ResultFormat, Text, pick_fields, terminal
from onnxq.sites import Names

# Names that a text lists where there are more.
_SHOWN = 4


def export_calibration(
    source: Plan | ModelSource,
    kind: str,
    *,
    model: ModelSource | None = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> ExportedScales:
    """Write the scales of a plan, or of a quantized model of any tool, in a format that another tool reads.

    kind: a format of docs/formats.md. model: the network that a plan is for, to list its tensors without an entry,
    which the tool that reads the file calibrates itself; a quantized model needs none. out: the file.

    Returns an ExportedScales: each site is written, `.left` out with the reason, or written with a `change`.
    Raises CalibrationError for a format that does not exist, is only read, or holds none of the sites.
    """
    row = find_format(kind)
    path = name_file(source)
    name = path or ("the plan" if isinstance(source, Plan) else "the model")
    with guard_outputs(path, out, force=force):
        with progress("reading the scales"):
            sites, index, scaled = _read_sites(source)
            if model is not None:
                index = GraphIndex(infer_shapes(name_nodes(load_model(model, lazy=True).light)))
        exported = replace(write_scales(sites, row, name), scaled=scaled)
        if index is not None:
            # Left sites count as uncovered, too: the file does not name their tensors.
            entries = {site.tensor for site in exported.written}
            exported = replace(exported, uncovered=list_uncovered(index, entries))
        if out is None:
            return exported
        with progress("writing"), replace_files([Path(out)], overwrite=force) as files:
            files[0].write(exported.content)
        return replace(exported, out=str(out))


def _read_sites(source: Plan | ModelSource) -> tuple[SitePlans, GraphIndex | None, Names]:
    """The sites of a plan, or the pairs of a quantized model, with the network that is left without them.

    Last: the tensors whose channels the plan scales.
    """
    # Plans are JSON, and no ONNX file begins with a brace.
    if isinstance(source, Plan) or (isinstance(source, (str, Path)) and _is_json(Path(source))):
        own = read_plan(source)
        return own.all_sites, None, _list_scaled(own)
    # Pairs in a function have one name however often it is called.
    proto = inline_functions(name_nodes(read_model(source, lazy=True).light))
    existing = find_existing(proto)
    plan = read_plan_note(proto)
    if existing.view is None:
        fix = "quantize it: `onnxq quantize`, or name a plan"
        raise ModelError(
            name_file(source) or "model",
            "has no pair",
            fix,
            code="Q125",
        )
    found = {site.site: site for site in existing.sites}
    if plan is not None:
        # The file's own numbers count, which may be those of a narrower float type; the plan adds what are no pairs.
        found = {site.site: site for site in plan.all_sites if site.complete} | found
    return tuple(found.values()), GraphIndex(infer_shapes(existing.view)), _list_scaled(plan)


def _list_scaled(plan: Plan | None) -> Names:
    return () if plan is None else tuple(str(scaling.tensor) for scaling in plan.scalings)


def _is_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError as error:
        raise PlanError(
            path, describe_os_error(error), "name a plan or a quantized model", code="Q401"
        ) from error


def _make_parts(exported: ExportedScales, view: terminal.TextView) -> terminal.Parts:
    yield Text(f"{PurePath(exported.source).name} -> {exported.out or exported.kind}", style="bold")
    yield terminal.make_sheet(_make_rows(exported, view.verbose))


def _make_rows(exported: ExportedScales, verbose: bool) -> terminal.SheetRows:
    changed = [f"{site.site}: {site.change}" for site in exported.written if site.change]
    left = [f"{site.site}: {site.reason}" for site in exported.left]
    yield (
        "written",
        f"{len(exported.written)} sites, {len(exported.written) - len(changed)} of them to the bit",
    )
    for label, lines in (("changed", changed), ("not in the file", left)):
        yield label, terminal.join_lines(lines, verbose, _SHOWN)
    yield "no entry", terminal.join_lines(exported.uncovered or (), verbose, _SHOWN)


FORM = ResultFormat[ExportedScales](
    make_parts=_make_parts,
    derive=lambda exported: pick_fields(exported, "complete warnings"),
    hidden="content",
)
