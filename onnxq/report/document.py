"""Results as one strict JSON document or as text: the one writer of both."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from rich.console import RenderableType

from onnxq.errors import OnnxqError, dump_json, replace_surrogates
from onnxq.report.columns import Text
from onnxq.report.model import Grade, LatencyRatio, RunFigure, find_worst_figure, make_verdict
from onnxq.report.terminal import TextView, format_warning, print_result
from onnxq.sites import Caution
from onnxq.wording import list_fields, translate_text

R = TypeVar("R")
# Values of a JSON document, and those of the error in it.
Values = dict[str, Any]
ErrorValues = Mapping[str, Any] | None
# Version of the JSON that commands print; raised when a key changes its meaning or goes.
SCHEMA = 1
# Values that stand beside the fields of a class.
_DERIVED: dict[type, str] = {LatencyRatio: "ratio"}


def to_json(value: Any) -> str:
    """Convert a report value to strict JSON: inf becomes "inf" or "-inf", nan null, other objects their text."""
    return dump_json(_to_plain(value)) + "\n"


def describe_verdict(figures: Sequence[RunFigure], grade: Grade | None = None) -> Values:
    """The verdict on outputs. grade: in the place of theirs."""
    return {"grade": (grade or make_verdict(figures)[0]).name, "worst": find_worst_figure(figures)}


def pick_fields(value: Any, names: str) -> Values:
    """The attributes of a value, by their names in one text."""
    return {name: getattr(value, name) for name in names.split()}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _to_plain(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, Caution):  # before str, of which it is a subclass
        return {"code": value.code, "text": _to_plain(str(value))}
    if isinstance(value, str):
        return replace_surrogates(translate_text(value))
    if value is None or isinstance(value, (bool, int)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _to_plain(list_fields(value) | pick_fields(value, _DERIVED.get(type(value), "")))
    if isinstance(value, Mapping):
        return {replace_surrogates(str(key)): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    # numpy's scalars have `item`; anything else is shown as its text.
    return _to_plain(value.item()) if hasattr(value, "item") else str(value)


@dataclass(frozen=True, eq=False)
class ResultFormat(Generic[R]):
    """The text of a command's result, and the JSON made of the result's fields.

    make_parts: of the text. list_warnings: shown behind it, and wherever the text is not; by default the result's own.
    derive: JSON values beside the fields, or in their place. hidden: names of fields that the JSON leaves out. only:
    all values of a JSON that holds no field as it is. find_fault: the error that the command ends with in spite of the
    result, with exit_code; None for commands that have none.
    """

    make_parts: Callable[[R, TextView], Iterable[RenderableType]]
    list_warnings: Callable[[R], Iterable[Caution | Text]] = lambda result: getattr(
        result, "warnings", ()
    )
    derive: Callable[[R], Values] = lambda result: {}
    hidden: str = ""
    only: Callable[[R], Values] | None = None
    find_fault: Callable[[R], OnnxqError | None] | None = None
    exit_code: int = 1

    def write_json(self, result: R, error: ErrorValues = None) -> str:
        """The JSON document. error: as plain values, if the command ends with one."""
        head: Values = {"schema": SCHEMA}
        if self.find_fault is not None:
            head["error"] = error
        if self.only is not None:
            return to_json(head | self.only(result))
        values = list_fields(result) | self.derive(result)
        for name in self.hidden.split():
            del values[name]
        return to_json(head | values)

    def show(self, result: R, view: TextView, error: ErrorValues = None) -> None:
        """Print the result as the view says."""
        parts = self.make_parts(result, view)
        print_result(
            view, lambda: self.write_json(result, error), parts, self.format_warnings(result)
        )

    def format_warnings(self, result: R) -> Iterator[Text]:
        """The warnings as texts."""
        for warning in self.list_warnings(result):
            yield format_warning(warning) if isinstance(warning, Caution) else warning
