"""The variants of a model, as frozen values, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

from rich.console import RenderableType

from onnxq.backends import find_reference
from onnxq.errors import VerificationError
from onnxq.report.columns import Text
from onnxq.report.document import SCHEMA, to_json
from onnxq.report.model import warn_synthetic
from onnxq.report.terminal import (
    View,
    format_bytes,
    format_decibel,
    format_milliseconds,
    format_shapes,
    format_threads,
    format_warning,
    make_sheet,
    make_table,
    show_result,
)
from onnxq.runtime import CPU_KINDS, Latency
from onnxq.sites import Caution
from onnxq.wording import abbreviate

# The name under which hubs know the float model.
FLOAT = "fp32"


class State(Enum):
    """Whether a variant was made. Lost: it was, and its answers are far from the float model's."""

    MADE = "made"
    LOST = "answers lost"
    NO_SAMPLES = "no samples"
    NOTHING = "nothing quantized"
    FAILED = "failed"


_REASONS = {
    State.NO_SAMPLES: "its ranges come from samples, and none were given",
    State.NOTHING: "nothing was quantized: the model has no operators for it, or none that gain by it",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant. dtype: its name in transformers.js. file: where it was written; "" if it was not.

    preset, settings: `onnxq.quantize` makes the same file by them, with the options of all variants. reason: of a
    failure. size_bytes: with external data; 0 if it was not made, so that nothing below is known. sqnr_db: of the worst
    output, as the file says and as ONNX Runtime runs it; checked: on so many samples. metric: None if none was given.
    same_as: another variant whose file has the same bytes.
    """

    __repr__ = abbreviate

    dtype: str
    state: State = State.MADE
    file: str = ""
    preset: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    size_bytes: int = 0
    sqnr_db: tuple[float, float] = (math.nan, math.nan)
    latency: Latency | None = None
    checked: int = 0
    metric: float | None = None
    same_as: str = ""
    warnings: tuple[Caution, ...] = ()

    @property
    def worst_db(self) -> float:
        """The lower of both SQNRs; nan where there is none."""
        return min((one for one in self.sqnr_db if not math.isnan(one)), default=math.nan)


@dataclass(frozen=True, kw_only=True)
class Variants:
    """A model and its variants.

    source: its path, "" for one in memory. original: the float model itself. variants: in the order of the table.
    metric: its name, "" for none. checked: samples that the SQNR is of; data: all of them, in words; synthetic: they
    were made up. config: the file or preset that was given; options: the options on top of it. cpu: the kind of CPU
    that the times are of; shapes: of the inputs timed. versions: of the packages that made the files.
    """

    __repr__ = abbreviate

    source: str
    original: Variant
    variants: tuple[Variant, ...]
    metric: str = ""
    checked: int = 0
    data: str = ""
    synthetic: bool = False
    seed: int = 0
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    cpu: str = ""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> tuple[Variant, ...]:
        """Those that were made and whose answers are not lost."""
        return tuple(one for one in self.variants if one.state is State.MADE)

    def speedup(self, one: Variant) -> float | None:
        """The float model's time over that of a variant; None where nothing was timed."""
        original = self.original.latency
        return None if original is None or one.latency is None else one.latency.speedup(original)


def variants_json(found: Variants, error: Mapping[str, Any] | None = None) -> str:
    """Convert the variants to one strict JSON document, keyed by dtype: how each was made, and its figures."""
    return to_json(
        {
            "schema": SCHEMA,
            "error": error,
            # Names alone: the folder goes to others, who have the files elsewhere.
            "source": PurePath(found.source).name,
            "versions": found.versions,
            "config": found.config,
            "options": found.options,
            "seed": found.seed,
            "data": found.data,
            "synthetic": found.synthetic,
            "checked": found.checked,
            "metric": found.metric,
            "cpu": found.cpu,
            "shapes": found.shapes,
            "variants": {one.dtype: _describe_variant(found, one) for one in (found.original, *found.variants)},
        }
    )


def _describe_variant(found: Variants, one: Variant) -> dict[str, Any]:
    latency = one.latency
    return {
        "state": one.state,
        "reason": _explain_state(one),
        "file": PurePath(one.file).name,
        "preset": one.preset,
        "settings": one.settings,
        "size_bytes": one.size_bytes,
        "sqnr_db": None
        if math.isnan(one.worst_db)
        else {"file": one.sqnr_db[0], find_reference().name: one.sqnr_db[1]},
        "latency": None if latency is None else {"median_ms": latency.median_ms, "threads": latency.threads},
        "speedup": found.speedup(one),
        "metric": one.metric,
        "same_as": one.same_as,
        "warnings": one.warnings,
    }


def _explain_state(one: Variant) -> str:
    return one.reason or _REASONS.get(one.state, "")


def show_variants(found: Variants, view: View = View(), *, error: Mapping[str, Any] | None = None) -> None:
    """Print the table of the variants. error: what the command fails with."""
    show_result(view, lambda: variants_json(found, error), _make_parts(found), _make_warnings(found))


def find_no_variant(found: Variants) -> VerificationError | None:
    """The error of a run without one usable variant; None with one."""
    if found.usable:
        return None
    reasons = "; ".join(f"{one.dtype}: {_explain_state(one) or one.state.value}" for one in found.variants)
    return VerificationError("variants", f"none can be used: {reasons}", "see the causes", code="Q711")


def _make_parts(found: Variants) -> Iterator[RenderableType]:
    columns = ["variant", "file", "size", "smaller"]
    timed = found.original.latency is not None
    columns += [*(("latency", "faster") if timed else ()), "SQNR", *((found.metric,) if found.metric else ())]
    title = Text(PurePath(found.source).name or "model", style="bold")
    if found.original.file:
        title.join_text(f" -> {PurePath(found.original.file).parent}")
    yield title.join_text(f"  ({', '.join(_list_facts(found))})", style="dim")
    rows = [_make_row(found, one) for one in (found.original, *found.variants)]
    yield make_table((*columns, ""), rows, right=columns[2:], names=("file",), fold=("",))
    yield Text("")
    yield make_sheet(_make_lines(found))


def _list_facts(found: Variants) -> Iterator[str]:
    latency = found.original.latency
    if latency is not None:
        yield f"{CPU_KINDS.get(found.cpu, found.cpu)}, {format_threads(latency.threads)}"
        yield format_shapes(found.shapes)
    yield f"SQNR on {found.checked} sample{'' if found.checked == 1 else 's'}"


def _make_row(found: Variants, one: Variant) -> tuple[str, ...]:
    made = one.size_bytes > 0
    cells = [one.dtype, PurePath(one.file).name, format_bytes(one.size_bytes) if made else ""]
    cells.append(f"{found.original.size_bytes / one.size_bytes:.1f}×" if made else "")
    if found.original.latency is not None:
        ratio = found.speedup(one)
        cells.append("" if one.latency is None else format_milliseconds(one.latency.median_ms))
        cells.append("" if ratio is None else f"{ratio:.2f}×")
    cells.append(format_decibel(one.worst_db) if made and one is not found.original else "")
    if found.metric:
        cells.append("" if one.metric is None else f"{one.metric:.4g}")
    left_out = " (left out)" if one.state is State.LOST and not one.file else ""
    twin = f"the same file as {one.same_as}" if one.same_as else ""
    return (*cells, twin if one.state is State.MADE else one.state.value.upper() + left_out)


def _make_lines(found: Variants) -> Iterator[tuple[str, RenderableType]]:
    for one in found.variants:
        if one.state is not State.MADE and _explain_state(one):
            yield "left out", Text(f"{one.dtype}: {_explain_state(one)}")
    yield "data", Text(found.data)


def _make_warnings(found: Variants) -> Iterator[RenderableType]:
    for one in found.variants:
        for warning in one.warnings:
            yield format_warning(Caution(warning.code, f"{one.dtype}: {warning}"))
    if found.synthetic:
        yield format_warning(warn_synthetic("the variants were checked"))
