"""The variants of a model, and their text and JSON."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath

from onnxq.arrays import InputShapes
from onnxq.backends import find_reference
from onnxq.errors import VerificationError
from onnxq.report import ResultFormat, Text, Values, pick_fields, terminal, warn_synthetic
from onnxq.runtime import CPU_KINDS, Latency
from onnxq.sites import Caution, Cautions, Names, Settings, drop_repeats
from onnxq.wording import show_as_summary

# The name under which hubs know the float model.
FLOAT = "fp32"


class VariantState(Enum):
    """Whether a variant was made. Lost: it was, and its answers are far from the float model's."""

    MADE = "made"
    LOST = "answers lost"
    NO_SAMPLES = "no samples"
    NOTHING = "nothing quantized"
    FAILED = "failed"


_REASONS = {
    VariantState.NO_SAMPLES: "its ranges come from samples, and none were given",
    VariantState.NOTHING: "nothing was quantized: the model has no operators for it, or none that gain by it",
}


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant. dtype: its name in transformers.js. file: where it was written; "" if it was not.

    preset, settings: `onnxq.quantize` makes the same file by them, with the options of all variants. reason: of a
    failure. size_bytes: with external data; 0 if it was not made, so that nothing below is known. sqnr_db: of the worst
    output, as the file says and as ONNX Runtime runs it; checked: on so many samples. metric: None if none was given.
    same_as: another variant whose file has the same bytes. lacking: by device, operators that it has no kernel for.
    """

    dtype: str
    state: VariantState = VariantState.MADE
    file: str = ""
    preset: str = ""
    settings: Settings = field(default_factory=dict)
    reason: str = ""
    size_bytes: int = 0
    sqnr_db: tuple[float, float] = (math.nan, math.nan)
    latency: Latency | None = None
    checked: int = 0
    metric: float | None = None
    same_as: str = ""
    lacking: Mapping[str, Names] = field(default_factory=dict)
    warnings: Cautions = ()

    @property
    def worst_db(self) -> float:
        """The lower of both SQNRs; nan where there is none."""
        return min((figure for figure in self.sqnr_db if not math.isnan(figure)), default=math.nan)


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Variants:
    """A model and its variants.

    source: its path, "" for one in memory. original: the float model itself. variants: in the order of the table.
    metric: its name, "" for none. checked: samples that the SQNR is of; data: all of them, in words; synthetic: they
    were made up. config: the file or preset that was given; options: the options on top of it. cpu: the kind of CPU
    that the times are of; shapes: of the inputs timed. versions: of the packages that made the files.
    """

    source: str
    original: Variant
    variants: tuple[Variant, ...]
    metric: str
    checked: int
    data: str
    synthetic: bool
    seed: int
    config: str = ""
    options: Settings = field(default_factory=dict)
    cpu: str
    shapes: InputShapes
    versions: Mapping[str, str]

    @property
    def usable(self) -> tuple[Variant, ...]:
        """Those that were made and whose answers are not lost."""
        return tuple(variant for variant in self.variants if variant.state is VariantState.MADE)

    def speedup(self, one: Variant) -> float | None:
        """The float model's time over that of a variant; None where nothing was timed."""
        original = self.original.latency
        return None if original is None or one.latency is None else one.latency.speedup(original)


def _describe_variants(result: Variants) -> Values:
    """Values of the JSON: how each was made, and its figures, keyed by dtype."""
    files = (result.original, *result.variants)
    return {
        # Names alone: the folder goes to others, who have the files elsewhere.
        "source": PurePath(result.source).name,
        "variants": {variant.dtype: _describe_variant(result, variant) for variant in files},
    }


def _describe_variant(result: Variants, variant: Variant) -> Values:
    values = pick_fields(
        variant, "state preset settings size_bytes metric same_as lacking warnings"
    ) | {
        "reason": _explain_state(variant),
        "file": PurePath(variant.file).name,
        "sqnr_db": None,
        "latency": None,
        "speedup": result.speedup(variant),
    }
    if not math.isnan(variant.worst_db):
        values["sqnr_db"] = {"file": variant.sqnr_db[0], find_reference().name: variant.sqnr_db[1]}
    if variant.latency is not None:
        values["latency"] = pick_fields(variant.latency, "median_ms threads")
    return values


def _explain_state(variant: Variant) -> str:
    return variant.reason or _REASONS.get(variant.state, "")


def find_no_variant(result: Variants) -> VerificationError | None:
    """The error of a run without one usable variant; None with one."""
    if result.usable:
        return None
    reasons = "; ".join(
        f"{file.dtype}: {_explain_state(file) or file.state.value}" for file in result.variants
    )
    return VerificationError(
        "variants", f"none can be used: {reasons}", "see the causes", code="Q711"
    )


def _make_parts(result: Variants, view: terminal.TextView) -> terminal.Parts:
    columns = ["variant", "file", "size", "smaller"]
    if result.original.latency is not None:
        columns += ["latency", "faster"]
    columns += ["SQNR", result.metric] if result.metric else ["SQNR"]
    title = terminal.make_title(result.source)
    if result.original.file:
        title.join_text(f" -> {PurePath(result.original.file).parent}")
    yield title.join_facts(_list_facts(result))
    rows = [_make_row(result, variant) for variant in (result.original, *result.variants)]
    yield terminal.make_table((*columns, ""), rows, right=columns[2:], names=("file",), fold=("",))
    yield Text()
    yield terminal.make_sheet(_make_lines(result))


def _list_facts(result: Variants) -> Iterator[str]:
    latency = result.original.latency
    if latency is not None:
        yield f"{CPU_KINDS.get(result.cpu, result.cpu)}, {terminal.format_threads(latency.threads)}"
        yield terminal.format_shapes(result.shapes)
    yield f"SQNR on {terminal.format_count(result.checked, 'sample')}"


def _make_row(result: Variants, variant: Variant) -> list[str]:
    size = variant.size_bytes
    original = result.original
    sizes = (
        [terminal.format_bytes(size), f"{original.size_bytes / size:.1f}×"] if size else ["", ""]
    )
    cells = [variant.dtype, PurePath(variant.file).name, *sizes]
    if original.latency is not None:
        cells.append(
            ""
            if variant.latency is None
            else terminal.format_milliseconds(variant.latency.median_ms)
        )
        cells.append(terminal.format_figure(result.speedup(variant), ".2f", "×"))
    cells.append(
        terminal.format_decibel(variant.worst_db) if size and variant is not original else ""
    )
    if result.metric:
        cells.append(terminal.format_figure(variant.metric, ".4g"))
    note = variant.state.value.upper()
    if variant.state is VariantState.MADE:
        note = f"the same file as {variant.same_as}" if variant.same_as else ""
    elif variant.state is VariantState.LOST and not variant.file:
        note += " (left out)"
    return [*cells, note]


def _make_lines(result: Variants) -> terminal.SheetRows:
    for variant in result.variants:
        if variant.state is not VariantState.MADE and _explain_state(variant):
            yield "left out", f"{variant.dtype}: {_explain_state(variant)}"
    for device in drop_repeats(device for variant in result.variants for device in variant.lacking):
        groups = defaultdict(list)
        for variant in result.variants:
            if variant.lacking.get(device):
                groups[variant.lacking[device]].append(variant.dtype)
        for names, dtypes in groups.items():
            yield f"no {device}", f"kernel in {', '.join(dtypes)}: {', '.join(names)}"
    yield "data", result.data


def _list_warnings(result: Variants) -> Iterator[Caution]:
    for variant in result.variants:
        for warning in variant.warnings:
            yield Caution(warning.code, f"{variant.dtype}: {warning}")
    if result.synthetic:
        yield warn_synthetic("the variants were checked")


FORM = ResultFormat[Variants](
    make_parts=_make_parts,
    list_warnings=_list_warnings,
    derive=_describe_variants,
    hidden="original",
    find_fault=find_no_variant,
)
