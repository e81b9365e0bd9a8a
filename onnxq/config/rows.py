"""JSON of dataclasses. Their fields, with their types, are the schema: a key for each, in their order.

A type that stands otherwise in JSON is annotated with a `Form`, text that must not be empty with `Mark.NONEMPTY`. A
field that equals its default is left out, unless its type is `Written`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model
from pydantic_core import InitErrorDetails, PydanticCustomError

from onnxq.config.document import Schema
from onnxq.config.schema import JsonText
from onnxq.config.values import Frozen
from onnxq.errors import ErrorClass, OnnxqError
from onnxq.sites import JsonObject, Mark

_T = TypeVar("_T")
Convert = Callable[[Any], Any]
# Of types that only the run knows.
_TUPLE: Any = tuple
_DICT: Any = dict
Written = Annotated[_T, Mark.WRITTEN]


def keep_value(value: Any) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True)
class Form:
    """The form of values of a type in JSON.

    kind: the type that JSON has. read: its values to those of the field; ValueError or OnnxqError for others.
    write: back to JSON.
    flat: `kind` is a Frozen whose keys stand among those of the dataclass. `read` then gets the row of all these keys,
        and `write` the dataclass, of which it gives a mapping.
    """

    kind: Any
    read: Convert = keep_value
    write: Convert = keep_value
    flat: bool = False

    @property
    def checked(self) -> Any:
        """The type for pydantic, which then gives values of the field."""
        return self.kind if self.read is keep_value else Annotated[self.kind, read_by(self.read)]


def read_by(read: Convert) -> AfterValidator:
    """Annotate a type with this: its values are converted by `read`, whose errors become faults of the entry."""

    def convert(value: Any) -> Any:
        try:
            return read(value)
        except (OnnxqError, ValueError) as error:
            raise _make_fault(error) from error

    return AfterValidator(convert)


def _make_fault(error: Exception) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{error}", {"error": error})


@dataclass(frozen=True)
class _Column:
    """A field. default: MISSING where it must be given."""

    name: str
    form: Form
    default: Any
    written: bool


@cache
def _list_columns(cls: Any) -> tuple[_Column, ...]:
    kinds = get_type_hints(cls, include_extras=True)
    columns = []
    for entry in fields(cls):
        kind = kinds[entry.name]
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        written = default is MISSING or Mark.WRITTEN in getattr(kind, "__metadata__", ())
        columns.append(_Column(entry.name, _find_form(kind), default, written))
    return tuple(columns)


def _find_form(kind: Any) -> Form:
    # NOTE: not narrowed by it, since mypy takes no class for a value that hashes.
    cls = kind
    if is_dataclass(kind):
        return Form(_make_row(cls), partial(_build, cls), write_fields)
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin is Annotated:
        return _find_annotated_form(kind)
    if origin is tuple:
        forms = [_find_form(part) for part in parts if part is not ...]
        checked = tuple(form.checked for form in forms)
        if ... in parts:
            return Form(
                _TUPLE[(*checked, ...)],
                write=lambda values: [forms[0].write(value) for value in values],
            )
        return Form(
            _TUPLE[checked],
            write=lambda values: [form.write(v) for form, v in zip(forms, values, strict=True)],
        )
    if origin is Mapping:
        form = _find_form(parts[1])
        return Form(
            _DICT[str, form.checked],
            write=lambda values: {k: form.write(v) for k, v in values.items()},
        )
    if len(parts) == 2 and parts[1] is NoneType:
        form = _find_form(parts[0])
        return Form(
            form.checked | None, write=lambda value: None if value is None else form.write(value)
        )
    return Form(kind)


def _find_annotated_form(kind: Any) -> Form:
    for mark in kind.__metadata__:
        if isinstance(mark, Form):
            return mark
    form = _find_form(kind.__origin__)
    bounds = [Field(min_length=1) if mark is Mark.NONEMPTY else mark for mark in kind.__metadata__]
    return replace(form, kind=Annotated[(form.kind, *bounds)])


@cache
def _make_row(cls: Any, base: Schema = Frozen) -> Schema:
    """The schema of a dataclass."""
    columns = _list_columns(cls)
    flat = tuple(column.form.kind for column in columns if column.form.flat)
    # A default stands for "not there" only: `_build` takes those of the dataclass.
    keys: JsonObject = {
        column.name: (column.form.checked, ... if column.default is MISSING else None)
        for column in columns
        if not column.form.flat
    }
    return create_model(f"{cls.__name__}Row", __base__=(*flat, base), **keys)


def _build(cls: Any, row: BaseModel) -> Any:
    values = {}
    for column in _list_columns(cls):
        if column.form.flat:
            try:
                values[column.name] = column.form.read(row)
            except (OnnxqError, ValueError) as error:
                where = (column.name,) if column.name in type(row).model_fields else ()
                details = InitErrorDetails(type=_make_fault(error), loc=where, input=None)
                raise ValidationError.from_exception_data("row", [details]) from error
        elif column.name in row.model_fields_set:
            values[column.name] = getattr(row, column.name)
    return cls(**values)


def read_fields(
    text: JsonText,
    cls: type[_T],
    error: ErrorClass,
    fix: str,
    *,
    code: str = "",
    base: Schema = Frozen,
) -> _T:
    """The dataclass that `write_fields` wrote; JsonText.parse must have accepted the text.

    base: has further keys, those of the file. Raises `error`, with `code`, as JsonText.read does.
    """
    kind: Any = cls
    schema = _make_row(kind, base)
    try:
        # Strict, or "1" would be read as 1.
        value: _T = _build(
            cls, schema.model_validate_json(text.text, strict=True, context=text.source)
        )
        return value
    except ValidationError as found:
        raise text.locate(found, schema, error, fix, code) from found


def write_fields(value: Any) -> JsonObject:
    """The JSON of a dataclass."""
    cls: Any = type(value)
    out: JsonObject = {}
    for column in _list_columns(cls):
        part = getattr(value, column.name)
        default = column.default
        # Arrays, which have no truth value, are None by default.
        if column.written or not (part is default if default is None else part == default):
            out |= (
                column.form.write(value)
                if column.form.flat
                else {column.name: column.form.write(part)}
            )
    return out
