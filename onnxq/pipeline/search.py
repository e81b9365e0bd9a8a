"""A search carried out: limits of the configuration in, the finished model that keeps them out."""

import csv
import io
import math
from dataclasses import dataclass, fields, replace
from typing import Any

from onnxq.backends import load_config
from onnxq.calibrate.contents import note_contents
from onnxq.config import Config, change_fields, write_config
from onnxq.errors import ConfigError
from onnxq.evaluation.accumulator import db_to_noise
from onnxq.evaluation.metric import AccuracyRequest
from onnxq.graph import ModelSource
from onnxq.passes import EqualizeContext, build_file
from onnxq.passes.mixed_precision.precisions import list_precisions
from onnxq.passes.mixed_precision.promotion import NAME as PROMOTION
from onnxq.pipeline.finalize import Result, finalize_run
from onnxq.pipeline.precision_search import Limits, PrecisionSearch, open_timer
from onnxq.pipeline.quantize_model import open_context, prepare_run
from onnxq.progress import Progress
from onnxq.report import Report
from onnxq.report.record import FrontPoint, FrontPoints, make_axes
from onnxq.report.terminal import format_bytes
from onnxq.wording import show_as_summary


@show_as_summary
@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """The result of a search. result: the model that was taken. rules: the configuration that makes it, as YAML.

    front: all models that were measured, from small to large. met: the one taken keeps what was asked for.
    """

    result: Result
    front: FrontPoints
    asked: str
    met: bool
    rules: str

    @property
    def report(self) -> Report:
        """The account of the model that was taken."""
        return self.result.report

    # Shown behind the search itself.
    applied = report

    def to_csv(self) -> str:
        """The front as a table, with a head."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        names = [field.name for field in fields(FrontPoint)]
        writer.writerow(names)
        for point in self.front:
            # A figure that there is none of, None, is written as an empty cell.
            figures = (getattr(point, name) for name in names if name != "precisions")
            writer.writerow([point.describe(), *figures])
        return text.getvalue()

    def plot(self, axes: Any = None) -> Any:
        """Draw the front: SQNR over bytes, or over ms where times were limited; needs matplotlib.

        axes: of matplotlib, to draw on; None makes a figure. Returns the axes.
        """
        axes = axes or make_axes(7, 4)
        # Where times were asked for, every model has one.
        timed = all(point.latency_ms is not None for point in self.front)
        places = [
            (point.latency_ms if timed else point.bytes / 1e6, point.sqnr_db)
            for point in self.front
        ]
        for point, (x, y) in zip(self.front, places, strict=True):
            axes.plot(
                x,
                y,
                "o" if point.holds else "x",
                color="C3" if point.taken else "C0",
                gid=point.describe(),
            )
        axes.set_xlabel("ms" if timed else "MB")
        axes.set_ylabel("SQNR of the worst output, dB")
        axes.set_title(self.asked)
        return axes


def search_precisions(
    model: ModelSource, data: object, config: Config, *, progress: Progress
) -> SearchResult:
    """Search, and finish the model that is best; see `onnxq.search`."""
    # Each operator's precision is given by rules here, so that nothing else may choose bits, or leave any float.
    inner = change_fields(
        config,
        weight_bits_budget=None,
        activation_bits=(),
        skip=(*config.skip, PROMOTION),
        placement="rules",
    )
    with open_context(model, data, inner, progress) as ctx:
        ctx, state, obstacle = prepare_run(model, data, ctx, measuring=True)
        if not isinstance(ctx, EqualizeContext) or obstacle is not None:
            fix = "give samples and the library of its operators, or quantize it without a search"
            cause = "a search runs the model, which cannot be run"
            raise ConfigError("model", cause, fix, code="Q308")
        request = ctx.request
        limits = _read_limits(config, request)
        # A request for an accuracy switches promotion on again, which would leave operators float
        # here.
        ctx = replace(ctx, skip=frozenset(inner.skip))
        search = PrecisionSearch(ctx, state, list_precisions(inner), limits)
        if search.timed:
            # Before minutes are spent.
            open_timer(config)
        with ctx.timers.run("search", "searching"):
            search.measure_all()
        taken = search.choose_point()
        # The accuracy was asked of the search, and is judged by it.
        ctx = replace(ctx, config=taken.config, request=AccuracyRequest(), journal=[])
        placed = replace(taken.state, plan=note_contents(taken.state.plan, state.model))
        result = finalize_run(ctx, placed, build_file(placed, placed.plan, progress), source=model)
        most = config.search
        size = "" if most.max_size is None else f"at most {format_bytes(most.max_size)}"
        latency = "" if most.max_latency is None else f"at most {most.max_latency:g} ms"
        return SearchResult(
            result=result,
            front=search.list_front(taken),
            asked=", ".join(filter(None, (size, latency, request.describe()))),
            met=taken.keeps_limits(limits),
            rules=write_config(taken.config, load_config(target=config.target)),
        )


def _read_limits(config: Config, request: AccuracyRequest) -> Limits:
    search = config.search
    if search.max_size is None and search.max_latency is None and not request.asked:
        fix = "give `max_size=…`, `max_latency=…`, `min_sqnr=…` or `metric=…`"
        raise ConfigError("search", "without a limit the float model is best", fix, code="Q308")
    return Limits(
        size=search.max_size or math.inf,
        time=search.max_latency or math.inf,
        noise=math.inf if request.min_sqnr is None else db_to_noise(request.min_sqnr),
        metric=-math.inf if request.metric is None else request.max_drop.least(request.float_value),
    )
