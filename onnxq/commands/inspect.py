"""`onnxq inspect` and `onnxq annotate-bits`: the quantize/dequantize pairs of any model, and their bits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onnxq.annotate import check_notes, inspect_model, read_sidecar, write_sidecar
from onnxq.annotate.annotate import annotate_model, strip_notes
from onnxq.annotate.bits import Inspection, PairInfo
from onnxq.commands.apply import read_plan
from onnxq.config import Command
from onnxq.errors import ConfigError, VerificationError
from onnxq.files import AnyPath, guard_outputs, write_text
from onnxq.graph import save_model
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, name_file, open_run
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report import Parts, RenderableType, Text, TextView, format_count, make_list, make_table
from onnxq.report.document import ResultFormat, Values, pick_fields
from onnxq.report.sentences import format_precision, make_sums_tables, saturation_summary
from onnxq.report.terminal import format_scale
from onnxq.spec import Granularity, PerBlock, PerChannel
from onnxq.wording import format_counts, join_names


def inspect(model: ModelSource, *, progress: Progress = silent) -> Inspection:
    """List every quantize/dequantize pair with its site, bits, scheme, granularity and scale, from any tool.

    Raises ModelError for a file that cannot be read.
    """
    with progress("looking for pairs"):
        return inspect_model(model)


def annotate_bits(
    model: ModelSource,
    given: Sequence[tuple[str, int]] = (),
    plan: Plan | AnyPath | None = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    check: bool = False,
    strip: bool = False,
    emit: str | None = None,
    sidecar: OutputPath = None,
    beside: AnyPath | None = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Inspection:
    """Write the number of bits of every pair into the model, keyed by node name.

    given: (pattern, bits), first match wins, over the bits read from the model; plan: take bits from it.
    config, overrides: as for `quantize`, of which the section `output` is used.
    check: write nothing, and compare the notes with the graph: `disagreements` of the result. strip: take all notes
    out. emit: rewrite the pairs as clip-qdq, qcdq, native or qonnx. sidecar: also write the notes to this file. beside:
    read them from one.
    Raises ConfigError for a pattern that matches no pair, and for options that exclude each other, ModelError for a
    file that cannot be read.
    """
    written = {"given": given, "emit": emit, "beside": beside}
    if check:
        _refuse_mixture("check", "writes nothing", **written, out=out, sidecar=sidecar, strip=strip)
    elif strip:
        _refuse_mixture("strip", "takes all notes out", **written, plan=plan)
    with (
        guard_outputs(name_file(model), out, sidecar, force=force),
        open_run(model, config, overrides, Command.ANNOTATE, out=out, force=force) as chosen,
    ):
        options = chosen.output
        noted = None if plan is None else read_plan(plan)
        notes = None if beside is None else read_sidecar(beside)
        with progress("looking for pairs"):
            if check or strip:
                inspection = check_notes(model, plan=noted) if check else strip_notes(model)
            else:
                inspection = annotate_model(
                    model,
                    given=given,
                    plan=noted,
                    rename=options.rename,
                    bits_attribute=options.bits_attribute,
                    beside=notes,
                    form=emit or "",
                )
        if out is not None:
            with progress("writing"):
                external = options.external_data or None
                save_model(inspection.model, Path(out), external=external, overwrite=force)
            inspection = replace(inspection, output=str(out))
        if sidecar is not None:
            text = write_sidecar(inspection.model, inspection.pairs)
            write_text(Path(sidecar), text, overwrite=force)
    return inspection


def _refuse_mixture(first: str, does: str, **others: object) -> None:
    """Raise ConfigError for options that the first one passes over."""
    asked = ", ".join(name for name, value in others.items() if value)
    if asked:
        raise ConfigError(
            f"`{first}=True`",
            f"{does}, and {asked} would have no effect",
            "leave one out",
            code="Q309",
        )


def find_disagreement(inspection: Inspection) -> VerificationError | None:
    """The error of notes that disagree with the file; None where all agree, or were not compared."""
    sites = [fault.site for fault in inspection.disagreements]
    if not sites:
        return None
    names = join_names(sites, 3)
    fix = "`onnxq annotate-bits` writes notes anew, and with `emit=…` makes the numbers follow them"
    cause = f"{format_count(len(sites), 'note')} of bits disagree with the file: {names}"
    return VerificationError(inspection.source or "the model", cause, fix, code="Q713")


def _describe_pair(pair: PairInfo) -> Values:
    grain = pair.granularity
    return {
        "site": pair.name,
        **pick_fields(pair, "scope role ops bits origin"),
        "type": pair.storage,
        "scheme": pair.scheme,
        "granularity": grain.word,
        **grain.attributes,
        **pick_fields(pair, "scales scale_min scale_max quantize dequantize clip"),
    }


def _make_parts(inspection: Inspection, view: TextView) -> Parts:
    if not inspection.pairs:
        yield Text(f"{inspection.source or 'the model'} holds no quantize/dequantize pair")
    else:
        yield from _list_pairs(inspection.pairs, view)
        yield from (Text(), Text(_count_widths(inspection)))
    if inspection.float_types is not None:
        yield Text("", *format_precision(inspection.float_types, view.verbose))
    if inspection.operators:
        count = format_count(len(inspection.operators), "operator")
        counts = Counter(sorted(operator.op for operator in inspection.operators))
        summary = f"{count} on integers: {format_counts(counts)}"
        yield from (Text(), _make_operators(inspection), Text(), Text(summary))
    # Models of any tool may hold weights that overflow.
    tables = list(make_sums_tables(inspection.weights, None, view))
    if tables:
        yield from (Text(), *tables)
    summary = saturation_summary(inspection.weights)
    if summary:
        yield Text(summary, style="yellow")
    columns = ("site", "noted", "found", "why")
    if inspection.disagreements:
        table = make_list(
            inspection.disagreements,
            view,
            columns,
            " ".join(columns),
            names=("site",),
            fold=columns[1:],
        )
        yield from (Text(), *table)
    if inspection.output:
        yield Text(f"written: {inspection.output}")


def _list_pairs(pairs: Sequence[PairInfo], view: TextView) -> list[RenderableType]:
    columns = ["site", "op", "bits", "scheme", "granularity", "scale", "origin"]

    def make_row(pair: PairInfo) -> Sequence[object]:
        # Scales that the model computes itself have no value in the file.
        scale = format_scale(*pair.scale_range) if pair.scale_range else "at run time"
        grain = _format_grain(pair.granularity)
        row = (pair.site, ",".join(pair.ops), pair.bits, pair.scheme, grain, scale, pair.origin)
        return (*row, pair.role, pair.storage, " ".join(pair.nodes)) if view.verbose else row

    if view.verbose:
        columns += ["role", "type", "nodes"]
    fold = ("op", "granularity", "origin", "nodes")
    return make_list(pairs, view, columns, make_row, right=("bits",), names=("site",), fold=fold)


def _format_grain(grain: Granularity) -> str:
    if isinstance(grain, PerBlock):
        return f"block {grain.size}@{grain.axis}"
    return f"channel {grain.axis}" if isinstance(grain, PerChannel) else grain.word


def _make_operators(inspection: Inspection) -> RenderableType:
    rows = [
        (operator.node, operator.op, operator.bits or "?", ", ".join(operator.types))
        for operator in inspection.operators
    ]
    return make_table(("node", "operator", "bits", "types"), rows, names=("node",), fold=("types",))


def _count_widths(inspection: Inspection) -> str:
    widths = Counter(pair.bits for pair in inspection.pairs)
    parts = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(widths.items()))
    return f"{format_count(len(inspection.pairs), 'pair')}: {parts}"


FORM = ResultFormat[Inspection](
    make_parts=_make_parts,
    derive=lambda inspection: {"pairs": [_describe_pair(pair) for pair in inspection.pairs]},
    hidden="model",
    find_fault=find_disagreement,
)
