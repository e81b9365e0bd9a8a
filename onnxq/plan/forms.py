"""How sites, specs, arrays and numbers stand in the plan's JSON, where it is not by the fields of their classes.

Up to 64 values are written as lists, more as {"shape", "zlib64"}: little-endian float32 or int32, deflated, base64.
Both forms are read at any size. A mark says which spec a site's scale and zero point were computed for.
"""

import base64
import binascii
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np

from onnxq.arrays import Array, Codes, Floats, are_finite
from onnxq.config import Frozen, Observer, Scheme
from onnxq.config.rows import Form, read_by
from onnxq.config.schema import Axis, Code, Natural, Origin, SiteName
from onnxq.sites import Caution, Edge, JsonObject, MaybeTensor, Site, TensorId
from onnxq.spec import QParams, QuantSpec, find_element_type, make_granularity

# Values: a list of so many still fits a screen, and a person edits it.
_INLINE = 64
# Bytes: no model holds a larger array, since protobuf ends at 2 GiB.
_MOST_BYTES = 2**31
# Between the spec and the checksum of a mark.
_MARK = " #"


def write_array(values: Array) -> Any:
    """The array as JSON values: nested lists, or the packed form."""
    if values.size <= _INLINE:
        return values.tolist()
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode()
    return {"shape": list(values.shape), "zlib64": packed}


def read_array(raw: Any, dtype: Any) -> Array:
    """The array that `write_array` wrote, or a person.

    dtype: the numpy type it gets. Raises ValueError for another form and for values that the type does not hold.
    """
    kind = np.dtype(dtype)
    array = _unpack_array(raw, kind) if isinstance(raw, Mapping) else _read_list(raw, kind)
    if kind.kind == "f" and not are_finite(array):
        raise ValueError(f"must be finite {kind.name} numbers")
    return array


def read_floats(raw: Any) -> Floats:
    """The float32 array that `write_array` wrote, or a person."""
    return read_array(raw, np.float32)


def _read_list(raw: Any, kind: np.dtype[Any]) -> Array:
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    for value in _iterate_leaves(raw):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"must be numbers, not {type(value).__name__}")
        if limits is None:
            # Written so that NaN, which compares false, is refused too.
            if not abs(value) <= float(np.finfo(kind).max):
                raise ValueError(f"must be finite {kind.name} numbers")
        elif not limits.min <= value <= limits.max or value != int(value):
            raise ValueError(f"must be whole numbers from {limits.min} to {limits.max}")
    try:
        return np.asarray(raw, dtype=kind)
    except ValueError as error:
        raise ValueError("must be lists of one length at each depth") from error


def _iterate_leaves(raw: Any) -> Iterator[Any]:
    if isinstance(raw, list):
        for part in raw:
            yield from _iterate_leaves(part)
    else:
        yield raw


def _unpack_array(raw: Mapping[str, Any], kind: np.dtype[Any]) -> Array:
    shape = raw.get("shape")
    packed = raw.get("zlib64")
    if (
        raw.keys() != {"shape", "zlib64"}
        or not isinstance(shape, list)
        or not isinstance(packed, str)
    ):
        raise ValueError('must be numbers, or {"shape": […], "zlib64": "…"}')
    if not all(
        isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < _MOST_BYTES
        for dim in shape
    ):
        raise ValueError("must have a shape of whole numbers")
    size = math.prod(shape) * kind.itemsize
    if size > _MOST_BYTES or len(shape) > _INLINE:
        raise ValueError(f"must be smaller: its shape stands for {size:,} bytes")
    try:
        inflater = zlib.decompressobj()
        # NOTE: bounded, since a few kilobytes of a hostile file inflate to gigabytes.
        data = inflater.decompress(base64.b64decode(packed, validate=True), size + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"cannot be unpacked: {error}") from error
    if len(data) != size:
        raise ValueError(f"must hold {size:,} bytes, as its shape says, and does not")
    # Packed in little-endian order on every machine.
    return np.frombuffer(data, dtype=kind.newbyteorder("<")).astype(kind).reshape(shape)


def write_mark(qparams: QParams, spec: QuantSpec) -> str:
    """The spec that `qparams` were computed for, by default `spec`, with a checksum of the numbers."""
    return f"{qparams.computed_for or spec.levels}{_MARK}{_compute_checksum(qparams)}"


def read_mark(mark: str, qparams: QParams) -> str:
    """The spec of a mark; "" where `qparams` differ from those that were marked, so that a person wrote them."""
    spec, _, checksum = mark.rpartition(_MARK)
    return spec if checksum == _compute_checksum(qparams) else ""


def _compute_checksum(qparams: QParams) -> str:
    # In one byte order: a plan is read on other machines than it was written on.
    scale = np.asarray(qparams.scale, "<f4").tobytes()
    return f"{zlib.crc32(np.asarray(qparams.zero_point, '<i4').tobytes(), zlib.crc32(scale)):08x}"


class _SiteFields(Frozen):
    """The name of a site: a tensor's, or [node, number of its input]."""

    site: SiteName
    scope: str = ""


def _read_site(row: _SiteFields) -> Site:
    if isinstance(row.site, str):
        return TensorId(row.site, row.scope)
    return Edge(row.site[0], row.site[1], row.scope)


def _read_edge(row: _SiteFields) -> Edge:
    site = _read_site(row)
    if not isinstance(site, Edge):
        raise ValueError(f"must be [node, number of its input], not {site}")
    return site


def leave_out_empty(**entries: Any) -> JsonObject:
    """The entries of an object without empty texts."""
    return {key: value for key, value in entries.items() if value}


def _write_site(site: Site) -> JsonObject:
    name = site.name if isinstance(site, TensorId) else [site.node, site.index]
    return {"site": name, **leave_out_empty(scope=site.scope)}


SITE = Form(_SiteFields, _read_site, _write_site)
EDGE = Form(_SiteFields, _read_edge, _write_site)
# Among the keys of the dataclass that has them.
OWN_SITE = Form(_SiteFields, _read_site, lambda owner: _write_site(owner.site), flat=True)
OWN_EDGE = Form(_SiteFields, _read_edge, lambda owner: _write_site(owner.edge), flat=True)


class _TensorRow(Frozen):
    tensor: str = ""
    # Apart from the name, which may hold "::" itself.
    tensor_scope: str = ""


def _read_tensor(row: _TensorRow) -> MaybeTensor:
    return TensorId(row.tensor, row.tensor_scope) if row.tensor else None


def _write_tensor(owner: Any) -> JsonObject:
    return {"tensor": owner.tensor.name, **leave_out_empty(tensor_scope=owner.tensor.scope)}


OWN_TENSOR = Form(_TensorRow, _read_tensor, _write_tensor, flat=True)


class _SpecRow(Frozen):
    """A QuantSpec in the words of the configuration. type: the ONNX type that holds the values."""

    bits: Natural
    type: Literal[
        "int2",
        "uint2",
        "int4",
        "uint4",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "float8e4m3fn",
    ]
    scheme: Scheme
    granularity: Literal["tensor", "channel", "block"]
    axis: Axis | None = None
    block_size: Natural | None = None
    narrow_range: bool = False
    dynamic: bool = False
    footroom: bool = False
    min_range: float = 0.0


def _read_spec(row: _SpecRow) -> QuantSpec:
    whole = row.granularity == "tensor"
    blocked = row.granularity == "block"
    if row.axis is None and not whole:
        raise ValueError(f"granularity {row.granularity!r} needs an axis")
    if blocked and not row.block_size:
        raise ValueError("granularity 'block' needs a block_size above 0")
    return QuantSpec(
        bits=row.bits,
        signed=find_element_type(row.type).signed,
        symmetric=row.scheme == "symmetric",
        narrow_range=row.narrow_range,
        granularity=make_granularity(
            None if whole else row.axis, row.block_size if blocked else None
        ),
        storage=row.type,
        dynamic=row.dynamic,
        footroom=row.footroom,
        min_range=row.min_range,
    )


def spec_dict(spec: QuantSpec) -> JsonObject:
    """The spec as JSON values, under the keys that the configuration has for it."""
    grain = spec.granularity
    out = {
        "bits": spec.bits,
        "type": spec.storage,
        "scheme": spec.scheme,
        "granularity": grain.word,
        **grain.attributes,
    }
    optional = ("narrow_range", "dynamic", "footroom", "min_range")
    return out | {name: value for name in optional if (value := getattr(spec, name))}


SPEC = Form(_SpecRow, _read_spec, spec_dict)


def _read_scale(raw: Any) -> Floats | None:
    return None if raw is None else read_floats(raw)


def _read_zero_point(raw: Any) -> Codes | None:
    return None if raw is None else read_array(raw, np.int32)


class _NumbersRow(Frozen):
    """QParams. computed_for: the spec they are for, as `write_mark` wrote it."""

    scale: Annotated[Any, read_by(_read_scale)] = None
    zero_point: Annotated[Any, read_by(_read_zero_point)] = None
    minimum: Annotated[Any, read_by(_read_scale)] = None
    order: Annotated[Any, read_by(_read_zero_point)] = None
    origin: Origin = ""
    computed_for: str = ""


def _read_numbers(row: _NumbersRow) -> QParams | None:
    if row.scale is None and row.zero_point is None:
        return None
    if row.scale is None or row.zero_point is None:
        raise ValueError(
            "has one of scale and zero_point: give both, or neither to have them computed"
        )
    qparams = QParams(row.scale, row.zero_point, row.origin, minimum=row.minimum, order=row.order)
    # Numbers that a person wrote over are theirs: they hold for whatever spec the site has.
    return replace(qparams, computed_for=read_mark(row.computed_for, qparams))


def _write_numbers(owner: Any) -> JsonObject:
    qparams = owner.qparams
    more = {"minimum": qparams.minimum, "order": qparams.order}
    return {name: write_array(array) for name, array in more.items() if array is not None} | {
        "scale": write_array(qparams.scale),
        "zero_point": write_array(qparams.zero_point),
        "origin": qparams.origin,
        "computed_for": write_mark(qparams, owner.spec),
    }


OWN_NUMBERS = Form(_NumbersRow, _read_numbers, _write_numbers, flat=True)


class _ValuesRow(Frozen):
    values: Any = None


def _read_values(row: Any) -> Array | None:
    if row.values is None:
        return None
    if row.spec.is_float:
        raise ValueError(f"{row.spec.storage} has no integers: take them out")
    return read_array(row.values, np.dtype(row.spec.numpy_storage))


# Quantized values, of the type that the spec beside them has.
OWN_VALUES = Form(
    _ValuesRow, _read_values, lambda owner: {"values": write_array(owner.values)}, flat=True
)
FLOATS = Form(Any, read_floats, write_array)


OBSERVER = Form(Observer, write=lambda observer: {"name": observer.name, **dict(observer.options)})


class _CautionRow(Frozen):
    code: Code
    text: str


CAUTION = Form(
    _CautionRow,
    lambda row: Caution(row.code, row.text),
    lambda caution: {"code": caution.code, "text": str(caution)},
)
