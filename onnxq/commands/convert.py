"""`onnxq convert`: a quantized file of any tool, for another engine, with its own numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onnxq.config import Command
from onnxq.errors import ConfigError
from onnxq.graph import attach_weights, save_model
from onnxq.graph.light import measure_size
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.finalize import Result, write_result
from onnxq.pipeline.retarget import Kept, MovedSite, read_quantized, retarget
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report.columns import Text
from onnxq.report.document import ResultFormat
from onnxq.report.model import Report
from onnxq.report.terminal import (
    RenderableType,
    SheetRows,
    TextView,
    format_count,
    format_decibel,
    make_sheet,
    make_table,
)
from onnxq.wording import abbreviate, show_html

FLOAT = "float"


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """A converted file. result: the model, with its account. sites: where the numbers of each come from.

    agreement_db: the SQNR of its worst output against the file that it came from, on so many samples.
    """

    __repr__ = abbreviate
    _repr_html_ = show_html

    result: Result
    to: str
    sites: tuple[MovedSite, ...] = ()
    agreement_db: float | None = None
    samples: int = 0

    @property
    def report(self) -> Report:
        """The account of the file."""
        return self.result.report

    @property
    def applied(self) -> Report | None:
        """The account, where there is more than a float model."""
        return self.report if self.sites else None


def convert(
    model: ModelSource,
    to: str,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Make a file with Q/DQ pairs, of any tool, fit another engine, without its float original.

    to: a target, or "float" for the model without pairs, whose weights stay as they were rounded. data: samples for
    ranges that the file does not have; without it their operators are left float. config: by default the preset of the
    target, as `trt-int8`; see `quantize` for the rest.

    Returns a Conversion with `.result` and, for each site, how its numbers came about.
    Raises ModelError for a file without pairs, ConfigError for a target that does not exist.
    """
    with open_run(
        model, config or (None if to == FLOAT else f"{to}-int8"), overrides, Command.CONVERT, out=out, force=force
    ) as chosen:
        if to == FLOAT:
            return _write_float(model, out, force, progress)
        # A file of several engines names them all.
        if chosen.target != to:
            cause = f"the configuration is for {chosen.target!r}"
            raise ConfigError(f"to={to!r}", cause, "name a preset of this target, or no configuration", code="Q312")
        done = retarget(model, data, chosen, progress=progress)
        with progress("writing"):
            result = write_result(done.result, chosen, out, force)
        return Conversion(result=result, to=to, sites=done.sites, agreement_db=done.agreement_db, samples=done.samples)


def _write_float(model: ModelSource, out: str | Path | None, force: bool, progress: Progress) -> Conversion:
    # Nothing is planned or run: the pairs are taken out, and that is all.
    with progress("reading the quantized model"):
        floats = read_quantized(model).floats
    name = str(model) if isinstance(model, (str, Path)) else ""
    report = Report(source=name, target=FLOAT, output_bytes=measure_size(floats))
    # It has no pairs, and so a plan without sites.
    result = Result(floats, Plan(target=FLOAT, model=name, topology="", weights=""), report)
    if out is not None:
        save_model(attach_weights(floats), Path(out), overwrite=force)
        result = replace(result, report=replace(report, output=str(out)))
    return Conversion(result=result, to=FLOAT)


def _make_parts(done: Conversion, view: TextView) -> Iterator[RenderableType]:
    yield Text(f"{done.report.source or 'model'} -> {done.report.output or done.to}", style="bold")
    yield make_sheet(_make_rows(done))
    if view.verbose and done.sites:
        columns = ("site", "role", "numbers", "error")
        rows = [
            (s.site, s.role, s.how.value, "" if s.error_db is None else format_decibel(s.error_db)) for s in done.sites
        ]
        yield make_table(columns, rows, right=columns[3:], names=columns[:1])
    yield Text("")


def _make_rows(done: Conversion) -> SheetRows:
    counts = Counter(site.how for site in done.sites)
    yield "numbers", tuple(f"{count} {kind.value}" for kind, count in counts.items())
    # Those that a person may want to look at, one by one.
    rounded = [site for site in done.sites if site.how is Kept.ROUNDED]
    yield "rounded anew", tuple(f"{site.site}: {format_decibel(site.error_db or 0.0)}" for site in rounded)
    if done.agreement_db is not None:
        count = format_count(done.samples, "sample")
        yield "answers", f"{format_decibel(done.agreement_db)} against the file that it came from, on {count}"


FORMS = {
    "Conversion": ResultFormat[Conversion](
        make_parts=_make_parts, derive=lambda done: {"applied": done.applied}, hidden="result"
    )
}
