"""`onnxq compare`: what differs between two quantized models, by their pages, files or plans."""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxq.annotate import inspect_model
from onnxq.commands.apply import read_plan
from onnxq.config import drop_unset
from onnxq.errors import ConfigError, VerificationError
from onnxq.graph import ModelSource
from onnxq.pipeline.record import measure_bytes
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report import Parts, ResultFormat, Text, TextView, format_count, make_list, make_table
from onnxq.report.record import Figures, Measured, ReportRecord, read_record
from onnxq.report.terminal import format_figure
from onnxq.sites import Lines, drop_repeats
from onnxq.spec import describe_form, describe_spec
from onnxq.wording import show_as_summary

Compared = ModelSource | Plan | ReportRecord
# Relative difference of scales that is rounding.
_SAME = 1e-4
_CONDITION = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*(-?\d*\.?\d+(?:[eE][+-]?\d+)?)\s*", re.ASCII)
_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True)
class SiteChange:
    """A site in both, or in one alone ("" for the other): its bits and scheme, then its scales."""

    site: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class FigureChange:
    """A figure of both; None where one does not have it."""

    name: str
    before: Measured
    after: Measured


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences of two quantized models. sites: how many both have alike. failed: conditions that hold."""

    before: str
    after: str
    figures: tuple[FigureChange, ...]
    same: int
    sites: tuple[SiteChange, ...]
    failed: Lines


# What a site has in words, and its scales.
_SiteForm = tuple[str, Figures]


@dataclass(frozen=True)
class _Side:
    """A quantized model. sites: what each has, and its scales."""

    name: str
    sites: Mapping[str, _SiteForm]
    figures: Mapping[str, float]


def compare(
    before: Compared,
    after: Compared,
    fail_if: Sequence[str] | str = (),
    *,
    progress: Progress = silent,
) -> Comparison:
    """Compare two quantized models: sites that are new, gone, or of other bits or scales, and error, size and time.

    before, after: pages or JSON of `onnxq report`, models of any tool, or plans. Figures are those of pages; of models
    their size alone. fail_if: conditions on figures of `after`, like "sqnr_db<30" or "bytes>5e6".

    Returns a Comparison; `.failed` has the conditions that hold.
    Raises ConfigError for a condition that cannot be read or names a figure that is not there.
    """
    conditions = []
    for text in [fail_if] if isinstance(fail_if, str) else fail_if:
        match = _CONDITION.fullmatch(text)
        if match is None:
            fix = 'write e.g. "sqnr_db<30"'
            raise ConfigError(f"fail_if={text!r}", "is no condition", fix, code="Q304")
        conditions.append((text, *match.groups()))
    with progress("reading both"):
        old, new = map(_read_side, (before, after))
    failed = []
    for text, name, comparison, bound in conditions:
        if name not in new.figures:
            known = ", ".join(new.figures) or "none"
            raise ConfigError(
                f"fail_if={text!r}",
                f"{new.name} has no such figure",
                f"it has: {known}",
                code="Q304",
            )
        if _COMPARISONS[comparison](new.figures[name], float(bound)):
            failed.append(text)
    # In both, one or the other; those of both alike are only counted.
    changes = tuple(_list_changes(old, new))
    names = drop_repeats([*old.figures, *new.figures])
    return Comparison(
        before=old.name,
        after=new.name,
        figures=tuple(
            FigureChange(name=n, before=old.figures.get(n), after=new.figures.get(n)) for n in names
        ),
        same=len(old.sites.keys() & new.sites.keys())
        - sum(bool(change.before and change.after) for change in changes),
        sites=changes,
        failed=tuple(failed),
    )


def _read_side(subject: Compared) -> _Side:
    """Read one of both."""
    if isinstance(subject, ReportRecord):
        return _describe_record(subject, subject.title)
    if isinstance(subject, onnx.ModelProto):
        return _describe_model(subject, "model")
    if isinstance(subject, Plan):
        return _describe_plan(subject, subject.model or "plan")
    path = Path(subject)
    if path.suffix == ".onnx":
        return _describe_model(path, str(path))
    # A plan and the JSON of a page are told by their keys.
    if (
        path.suffix == ".json"
        and path.is_file()
        and '"topology"' in path.read_text(encoding="utf-8")
    ):
        return _describe_plan(read_plan(path), str(path))
    return _describe_record(read_record(path), str(path))


def _describe_record(record: ReportRecord, name: str) -> _Side:
    figures = {
        "sqnr_db": record.sqnr_db,
        "bytes": float(record.quantized_bytes),
        "sites": float(len(record.sites)),
        **{f"operators_{dtype}": float(count) for dtype, count in record.types.items()},
        "speed": record.speed,
    }
    sites = {
        site.name: (
            describe_form(
                site.bits, site.scheme, site.type, site.granularity, dynamic=not site.scales
            ),
            site.scales,
        )
        for site in record.sites
    }
    return _Side(name, sites, drop_unset(figures))


def _describe_model(model: ModelSource, name: str) -> _Side:
    sites = {
        pair.name: (
            describe_form(
                pair.bits, pair.scheme, pair.storage, pair.granularity.word, dynamic=pair.dynamic
            ),
            pair.scale_range,
        )
        for pair in inspect_model(model).pairs
    }
    return _Side(name, sites, {"bytes": float(measure_bytes(model)), "sites": float(len(sites))})


def _describe_plan(plan: Plan, name: str) -> _Side:
    sites = {}
    for site in plan.sites:
        numbers = site.qparams
        scales = () if numbers is None else (float(numbers.scale.min()), float(numbers.scale.max()))
        sites[site.name] = describe_spec(site.spec), scales
    return _Side(name, sites, {"sites": float(len(sites))})


def _list_changes(old: _Side, new: _Side) -> Iterator[SiteChange]:
    """Sites that are not alike, in the order of the first, then the new ones."""
    for name in drop_repeats([*old.sites, *new.sites]):
        before = old.sites.get(name)
        after = new.sites.get(name)
        if before is None or after is None or not _are_alike(before, after):
            yield SiteChange(site=name, before=_format_site(before), after=_format_site(after))


def _are_alike(before: _SiteForm, after: _SiteForm) -> bool:
    # Sites without numbers, as of a plan that is not calibrated, are compared by their words.
    pairs = zip(before[1], after[1], strict=False)
    return before[0] == after[0] and all(math.isclose(a, b, rel_tol=_SAME) for a, b in pairs)


def _format_site(site: _SiteForm | None) -> str:
    if site is None:
        return ""
    words, scales = site
    return (
        # A single scale is both ends.
        f"{words}, scale {'..'.join(drop_repeats(f'{scale:.4g}' for scale in scales))}"
        if scales
        else words
    )


def find_failed_condition(comparison: Comparison) -> VerificationError | None:
    """The error of the first condition that holds; None without."""
    if not comparison.failed:
        return None
    return VerificationError(
        comparison.after, f"{' and '.join(comparison.failed)} holds", code="Q703"
    )


def _make_parts(comparison: Comparison, view: TextView) -> Parts:
    yield Text(f"{comparison.after} against {comparison.before}", style="bold")
    columns = ("figure", "before", "after")
    rows = [
        (figure.name, format_figure(figure.before, ".10g"), format_figure(figure.after, ".10g"))
        for figure in comparison.figures
    ]
    yield make_table(columns, rows, right=columns[1:])
    yield Text("", f"{format_count(comparison.same, 'site')} alike, {len(comparison.sites)} not")
    if comparison.sites:
        titles = ("site", "before", "after")
        yield from make_list(
            comparison.sites,
            view,
            titles,
            lambda change: (change.site, change.before or "float", change.after or "float"),
            names=titles[:1],
            fold=titles[1:],
        )


FORM = ResultFormat[Comparison](make_parts=_make_parts, find_fault=find_failed_condition)
