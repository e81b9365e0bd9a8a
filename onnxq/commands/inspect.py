"""`onnxq inspect` and `onnxq annotate-bits`: the quantize/dequantize pairs of any model, and their bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxq.annotate import (
    BitsCheck,
    Inspection,
    PairInfo,
    annotate_model,
    check_notes,
    inspect_model,
    read_sidecar,
    strip_notes,
    write_sidecar,
)
from onnxq.commands.apply import read_plan
from onnxq.config import Command
from onnxq.errors import ConfigError, VerificationError
from onnxq.files import guard_outputs, write_text
from onnxq.graph import save_model
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report.columns import Text
from onnxq.report.document import ResultFormat, Values, pick_fields
from onnxq.report.sentences import format_precision, make_sums_tables, saturation_summary
from onnxq.report.terminal import (
    RenderableType,
    TextView,
    format_count,
    format_counts,
    format_scale,
    format_warnings,
    make_list,
    make_table,
)
from onnxq.spec import GRAIN_NAMES, Granularity, PerBlock, PerChannel


def inspect(model: ModelSource, *, progress: Progress = silent) -> Inspection:
    """List every quantize/dequantize pair with its site, bits, scheme, granularity and scale, from any tool.

    Raises ModelError for a file that cannot be read.
    """
    with progress("looking for pairs"):
        return inspect_model(model)


def annotate_bits(
    model: ModelSource,
    given: Sequence[tuple[str, int]] = (),
    plan: Plan | str | Path | None = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    strip: bool = False,
    form: str = "",
    sidecar: str | Path | None = None,
    beside: str | Path | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Inspection:
    """Write the number of bits of every pair into the model, keyed by node name.

    given: (pattern, bits), first match wins, over the bits read from the model; plan: take bits from it.
    config, overrides: as for `quantize`, of which the section `output` is used.
    strip: take all notes out. form: rewrite the pairs as clip-qdq, qcdq, native or qonnx. sidecar: also write the notes
    to this file. beside: read them from one.
    Raises ConfigError for a pattern that matches no pair, and for options that exclude each other, ModelError for a
    file that cannot be read.
    """
    if strip:
        _refuse_mixture("strip", "takes all notes out", given=given, plan=plan, form=form, beside=beside)
    with (
        guard_outputs("" if isinstance(model, ModelProto) else model, out, sidecar, force=force),
        open_run(model, config, overrides, Command.ANNOTATE, out=out, force=force) as chosen,
    ):
        options = chosen.output
        with progress("looking for pairs"):
            noted = None if plan is None else read_plan(plan)
            notes = None if beside is None else read_sidecar(beside)
            inspection = strip_notes(model) if strip else annotate_model(
                model, given=given, plan=noted, rename=options.rename, bits_attribute=options.bits_attribute,
                beside=notes, form=form,
            )  # fmt: skip
        if out is not None:
            with progress("writing"):
                save_model(inspection.model, Path(out), external=options.external_data or None, overwrite=force)
            inspection = replace(inspection, output=str(out))
        if sidecar is not None:
            write_text(Path(sidecar), write_sidecar(inspection.model, inspection.pairs), overwrite=force)
    return inspection


def check_bits(model: ModelSource, plan: Plan | str | Path | None = None, *, progress: Progress = silent) -> BitsCheck:
    """Compare the notes of bits with the numbers in the graph and with each other, and list those that disagree.

    plan: compared in the place of the one in the model. Raises ModelError for a file that cannot be read.
    """
    with progress("looking for pairs"):
        return check_notes(model, plan=None if plan is None else read_plan(plan))


def annotate_or_check(
    model: str,
    *,
    check: bool = False,
    plan: str | None = None,
    overrides: Overrides = None,
    progress: Progress = silent,
    force: bool = False,
    **options: Any,
) -> Inspection | BitsCheck:
    """What the command does: `check_bits` with check, which excludes all that writes, else `annotate_bits`."""
    if not check:
        return annotate_bits(model, plan=plan, overrides=overrides, force=force, progress=progress, **options)
    options.pop("config")
    _refuse_mixture("check", "writes nothing", **options, **(overrides or {}))
    return check_bits(model, plan, progress=progress)


def _refuse_mixture(first: str, does: str, **others: object) -> None:
    """Raise ConfigError for options that the first one would pass over."""
    asked = ", ".join(name for name, value in others.items() if value)
    if asked:
        raise ConfigError(f"`{first}=True`", f"{does}, and {asked} would have no effect", "leave one out", code="Q309")


def _make_check_parts(checked: BitsCheck, view: TextView) -> Iterator[RenderableType]:
    faults = checked.disagreements
    if faults:
        columns = ("site", "noted", "found", "why")
        yield from make_list(faults, view, columns, "site noted found why", names=("site",), fold=("noted", "why"))
        yield Text("")
    count = format_count(len(faults), "disagreement")
    yield Text(f"{format_count(checked.pairs, 'pair')}, {checked.noted} with a note of bits: {count}")


def find_disagreement(checked: BitsCheck) -> VerificationError | None:
    """The error that `annotate-bits --check` ends with; None where all notes agree."""
    faults = checked.disagreements
    if not faults:
        return None
    names = ", ".join(fault.site for fault in faults[:3]) + (" …" if len(faults) > 3 else "")
    cause = f"{format_count(len(faults), 'disagreement')} of notes of bits: {names}"
    fix = "`onnxq annotate-bits` writes notes anew, and with `form=…` makes the numbers follow them"
    return VerificationError(checked.source or "the model", cause, fix, code="Q712")


def _describe_pair(pair: PairInfo) -> Values:
    grain = pair.granularity
    values = {"site": str(pair.site), **pick_fields(pair, "scope role ops bits origin")}
    values |= {"type": pair.storage, "scheme": pair.scheme, "granularity": GRAIN_NAMES[type(grain)]}
    if isinstance(grain, (PerChannel, PerBlock)):
        values["axis"] = grain.axis
    if isinstance(grain, PerBlock):
        values["block_size"] = grain.size
    return values | pick_fields(pair, "scales scale_min scale_max quantize dequantize clip")


def _make_parts(inspection: Inspection, view: TextView) -> Iterator[RenderableType]:
    if not inspection.pairs:
        yield Text(f"{inspection.source or 'the model'} holds no quantize/dequantize pair")
    else:
        yield from _list_pairs(inspection.pairs, view)
        yield from (Text(""), Text(_count_widths(inspection)))
    if inspection.float_types is not None:
        yield Text("", *format_precision(inspection.float_types, view.verbose))
    if inspection.operators:
        count = format_count(len(inspection.operators), "operator")
        summary = f"{count} on integers: {_count_operators(inspection)}"
        yield from (Text(""), _make_operators(inspection), Text(""), Text(summary))
    # Models of any tool may hold weights that overflow.
    tables = list(make_sums_tables(inspection.weights, None, view))
    if tables:
        yield from (Text(""), *tables)
    summary = saturation_summary(inspection.weights)
    if summary:
        yield Text(summary, style="yellow")
    if inspection.output:
        yield Text(f"written: {inspection.output}")


def _list_pairs(pairs: Sequence[PairInfo], view: TextView) -> list[RenderableType]:
    columns = ["site", "op", "bits", "scheme", "granularity", "scale", "origin"]

    def make_row(pair: PairInfo) -> Sequence[object]:
        # Scales that the model computes itself have no value in the file.
        scale = "at run time" if math.isnan(pair.scale_min) else format_scale(pair.scale_min, pair.scale_max)
        grain, ops = _format_grain(pair.granularity), ",".join(pair.ops)
        row = (pair.site, ops, pair.bits, pair.scheme, grain, scale, pair.origin)
        return (*row, pair.role, pair.storage, " ".join(pair.nodes)) if view.verbose else row

    if view.verbose:
        columns += ["role", "type", "nodes"]
    fold = ("op", "granularity", "origin", "nodes")
    return make_list(pairs, view, columns, make_row, right=("bits",), names=("site",), fold=fold)


def _format_grain(grain: Granularity) -> str:
    if isinstance(grain, PerBlock):
        return f"block {grain.size}@{grain.axis}"
    return f"channel {grain.axis}" if isinstance(grain, PerChannel) else GRAIN_NAMES[type(grain)]


def _make_operators(inspection: Inspection) -> RenderableType:
    rows = []
    for operator in inspection.operators:
        rows.append((operator.node, operator.op, operator.bits or "?", ", ".join(operator.types)))
    return make_table(("node", "operator", "bits", "types"), rows, names=("node",), fold=("types",))


def _count_operators(inspection: Inspection) -> str:
    counts = Counter(operator.op for operator in inspection.operators)
    return format_counts(dict(sorted(counts.items())))


def _count_widths(inspection: Inspection) -> str:
    widths = Counter(pair.bits for pair in inspection.pairs)
    parts = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(widths.items()))
    return f"{format_count(len(inspection.pairs), 'pair')}: {parts}"


FORMS = {
    "Inspection": ResultFormat[Inspection](
        make_parts=_make_parts,
        list_warnings=lambda inspection: format_warnings(inspection.warnings),
        derive=lambda inspection: {"pairs": [_describe_pair(pair) for pair in inspection.pairs]},
        hidden="model",
    ),
    "BitsCheck": ResultFormat[BitsCheck](
        make_parts=_make_check_parts,
        list_warnings=lambda checked: format_warnings(checked.warnings),
        find_fault=find_disagreement,
    ),
}
