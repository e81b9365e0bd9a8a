"""The accuracy that a person asks for: a metric of their own from `file.py:function`, and the drop that is allowed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from onnxq.arrays import ArrayDict, RunValues
from onnxq.config import Config
from onnxq.data.scripts import find_function, guard_user_code
from onnxq.errors import ConfigError, DataError
from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, save_model
from onnxq.plan import Plan
from onnxq.runtime import Feeds, Session


class MetricModel:
    """The argument of a metric function: one model, to run in whichever way suits the function.

    model(feeds) -> {output name: array}; model.path: an ONNX file; model.session: an onnxruntime.InferenceSession.
    It lives as long as the call.
    """

    def __init__(self, proto: ModelLike, folder: Path, *, optimize: bool, threads: int) -> None:
        self._proto = proto
        self._folder = folder
        self._optimize = optimize
        self._threads = threads

    @cached_property
    def path(self) -> str:
        """The model as a file, written when it is first asked for."""
        target = self._folder / "model.onnx"
        # Not before: most functions call the model, and writing a large one takes seconds.
        save_model(self._proto, target)
        return str(target)

    @cached_property
    def _session(self) -> Session:
        return Session(self._proto, optimize=self._optimize, threads=self._threads)

    @property
    def session(self) -> Any:
        """An onnxruntime.InferenceSession."""
        return self._session.native

    def __call__(self, feeds: RunValues | Feeds) -> ArrayDict:
        """All outputs by name for one dictionary of inputs."""
        return self._session.run(feeds)


@dataclass(frozen=True)
class Drop:
    """The allowed drop of a metric: absolute, or relative to the float model's ("1%")."""

    amount: float
    relative: bool = False

    def least(self, before: float) -> float:
        """The smallest value that is still good enough."""
        # Of the absolute value: negated losses are below 0.
        return before - (abs(before) * self.amount if self.relative else self.amount)

    def __str__(self) -> str:
        return f"{100 * self.amount:g}%" if self.relative else f"{self.amount:g}"


def parse_drop(value: float | str) -> Drop:
    """0.01 or "0.01": absolute; "1%": relative to float. Raises ConfigError for anything else, and below 0."""
    text = str(value).strip()
    try:
        amount = float(text.removesuffix("%"))
    except ValueError:
        amount = math.nan
    # NaN compares false, so that it is refused as well.
    if not amount >= 0 or math.isinf(amount):
        raise ConfigError(
            f"max_drop: {text!r}",
            "is no drop",
            "write 0.01 (absolute) or 1% (of the float model's)",
            code="Q308",
        )
    return Drop(amount / 100, True) if text.endswith("%") else Drop(amount)


@dataclass(frozen=True, eq=False)
class Metric:
    """A function of a MetricModel that gives a number, higher is better."""

    name: str
    function: Callable[[MetricModel], float]

    def __call__(self, proto: ModelLike, *, optimize: bool = True, threads: int = 1) -> float:
        """The metric of one model. Raises DataError when the function raises or gives no finite number."""
        with ScratchFolder() as folder, guard_user_code(self.name):
            value: Any = self.function(
                MetricModel(proto, folder, optimize=optimize, threads=threads)
            )
        try:
            # float() would take True for 1, and the text "0.9" for a number.
            found = math.nan if isinstance(value, (bool, str)) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            raise DataError(
                self.name,
                f"gave {str(value)[:60]}",
                "return a finite number, higher is better",
                code="Q219",
            )
        return found


def load_metric(source: str | Callable[[Any], float]) -> Metric:
    """`file.py:function`, or a function. The file is run, so only ever one the person named.

    Raises ConfigError for another form, DataError for a file that does not run or lacks the function.
    """
    if not isinstance(source, str):
        return Metric(getattr(source, "__name__", "metric"), source)
    # From the right: a path on Windows has a colon of its own.
    path, parted, name = source.rpartition(":")
    if not parted or not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(
            f"metric: {source!r}",
            "is not file.py:function",
            "write e.g. evaluate.py:accuracy",
            code="Q308",
        )
    return Metric(source, find_function(Path(path), name))


FLOAT = "float"
UINT16 = "uint16"


@dataclass(frozen=True, eq=False)
class AccuracyRequest:
    """min_sqnr in dB for every output, or a metric and its allowed drop; neither: only lost outputs are mended.

    float_value: the metric of the float model. to: the type that operators are promoted to, "float" or "uint16".
    """

    min_sqnr: float | None = None
    metric: Metric | None = None
    max_drop: Drop = Drop(0.0)
    to: str = FLOAT
    float_value: float = math.nan

    @property
    def asked(self) -> bool:
        """True when somebody asked for something."""
        return self.min_sqnr is not None or self.metric is not None

    @property
    def unit(self) -> str:
        """The unit of its figures: "dB", or the metric's name."""
        return "dB" if self.metric is None else self.metric.name

    def describe(self) -> str:
        """The request in words; "" where there is none."""
        if self.metric is not None:
            return f"{self.metric.name} at most {self.max_drop} below float"
        return "" if self.min_sqnr is None else f"at least {self.min_sqnr:g} dB at every output"


def make_request(config: Config, data: object) -> AccuracyRequest:
    """The request for accuracy. Raises ConfigError for wishes that do not go together, or without samples."""
    accuracy = config.accuracy
    if accuracy.metric is None and accuracy.max_drop is not None:
        fix = "give `metric=…`, a file.py:function, as well"
        raise ConfigError("max_drop", "says nothing without a metric", fix, code="Q308")
    if accuracy.metric is not None and accuracy.min_sqnr is not None:
        cause = "and a metric were given: promotion goes by one figure"
        raise ConfigError("min_sqnr", cause, "give one of them", code="Q308")
    if data is None and (accuracy.metric is not None or accuracy.min_sqnr is not None):
        cause = "no samples were given: made-up inputs say nothing of accuracy"
        raise ConfigError("data", cause, "pass `data=…`", code="Q319")
    metric = None if accuracy.metric is None else load_metric(accuracy.metric)
    drop = parse_drop(0.0 if accuracy.max_drop is None else accuracy.max_drop)
    return AccuracyRequest(accuracy.min_sqnr, metric, drop, accuracy.promote_to)


def has_whole_bytes(plan: Plan) -> bool:
    """True when nothing has fewer than 8 bits: who asks for fewer knows the cost."""
    return all(site.spec.bits >= 8 for site in plan.sites)
