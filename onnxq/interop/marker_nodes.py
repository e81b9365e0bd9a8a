"""One `ai.onnxq::FakeQuantize` node: float values in, the same values rounded to the quantizer's grid out.

    y = FakeQuantize(x, scale, zero_point)     site, role, qmin, qmax, bits, scheme [, storage] [, axis [, block_size]]
    y = FakeQuantize(x)                        the same, and dynamic = 1: scale and zero point are computed at each run

It stands where a quantizer stood in the network that was exported. site: the name of the quantizer, never of a tensor.
No axis: one scale for the tensor, of shape [] or [1]; axis: one a channel; block_size with it: one a block. scale:
positive; zero_point: of any number type, rounded half to even, in [qmin, qmax]; both constant, and of one shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onnxq.arrays import Array, are_scales, as_float32, as_float64, fits_dims, unwrap_single
from onnxq.config.schema import Axis, Level, Loose, Natural, Width, check_values
from onnxq.errors import ModelError, OnnxqError, suggest_names
from onnxq.graph import Dims, GraphIndex, NodeRef
from onnxq.numerics.rounding import shape_scales
from onnxq.sites import Role, TensorId
from onnxq.spec import PerTensor, QParams, QuantSpec, make_granularity

DOMAIN = "ai.onnxq"
OPERATOR = "FakeQuantize"
# Of the numbers, in plans.
ORIGIN = "marker"
# Attributes that a marker must have, and all that it may have.
_NEEDED = ("site", "role", "qmin", "qmax", "bits", "scheme")
_KNOWN = (*_NEEDED, "storage", "axis", "block_size", "dynamic")
# Biases are derived when the plan is made; they have no quantizer.
_ROLES = (Role.ACTIVATION, Role.WEIGHT, Role.OUTPUT)
_fault = partial(ModelError, code="Q119")


class _MarkerRow(Loose):
    """The attributes of a marker, unchecked but for their types."""

    site: str
    role: str
    qmin: Level
    qmax: Level
    bits: Width
    scheme: str
    storage: str = ""
    axis: Axis | None = None
    block_size: Natural = 0
    dynamic: Natural = 0


@dataclass(frozen=True, eq=False)
class Marker:
    """One marker: its node, its quantizer (site), its numbers, the tensors in front (source) and behind (result)."""

    node: NodeRef
    site: str
    role: Role
    spec: QuantSpec
    qparams: QParams | None
    source: TensorId
    result: TensorId

    def agrees_with(self, other: Marker) -> bool:
        """True when both round a tensor to the same values."""
        return self.spec == other.spec and self.qparams == other.qparams


def read_markers(index: GraphIndex) -> Iterator[Marker]:
    """Every marker of the model, in the order of execution. Raises ModelError naming the site of an incomplete one."""
    for node in index.nodes:
        if node.domain != DOMAIN:
            continue
        if node.op_type != OPERATOR:
            raise _fault(
                node.name, f"{DOMAIN} has no operator {node.op_type}", f"the marker is {OPERATOR}"
            )
        yield _read_marker(index, node)


def _read_marker(index: GraphIndex, node: NodeRef) -> Marker:
    attrs = {key: _decode_text(value) for key, value in node.attrs.items()}
    subject = str(attrs.get("site") or node.name)
    lacking = [key for key in _NEEDED if key not in attrs]
    if lacking or not attrs["site"]:
        raise _fault(
            subject,
            f"its marker has no {lacking[0] if lacking else 'site'}",
            "export the model again",
        )
    strange = sorted(set(attrs) - set(_KNOWN))
    if strange:
        raise _fault(
            subject, f"its marker has an unknown {strange[0]!r}", suggest_names(strange[0], _KNOWN)
        )
    row = check_values(attrs, _MarkerRow, subject, ModelError)
    if (
        len(node.inputs) != (1 if row.dynamic else 3)
        or not all(node.inputs)
        or len(node.outputs) != 1
    ):
        needed = "a tensor alone" if row.dynamic else "a tensor, a scale and a zero point"
        raise _fault(subject, f"its marker needs {needed}", "export the model again")
    source = index.find_input(node)
    if source is None:
        raise _fault(
            subject,
            f"nothing makes {node.inputs[0]!r}, which its marker reads",
            "export the model again",
        )
    spec = _make_spec(subject, row)
    qparams = None
    if not spec.dynamic:
        scale, zero = (_read_constant(index, node, k, subject) for k in (1, 2))
        qparams = _make_qparams(subject, spec, scale, zero)
    return Marker(node, subject, _read_role(subject, row.role), spec, qparams, source, node.result)


def _decode_text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _read_role(site: str, word: str) -> Role:
    if word not in _ROLES:
        cause = f"role {word!r} is none of a marker's"
        raise _fault(site, cause, f"use {', '.join(_ROLES)}")
    return Role(word)


def _make_spec(site: str, row: _MarkerRow) -> QuantSpec:
    if row.scheme not in ("symmetric", "asymmetric"):
        raise _fault(site, f"scheme {row.scheme!r}", "use symmetric or asymmetric")
    bits = row.bits
    low = row.qmin
    high = row.qmax
    # No attribute says it: an unsigned range never goes below 0.
    signed = low < 0
    try:
        spec = QuantSpec(
            bits=bits,
            signed=signed,
            symmetric=row.scheme == "symmetric",
            # From -127 on, for 8 bits.
            narrow_range=signed and bits > 0 and low == 1 - (1 << (bits - 1)),
            granularity=make_granularity(row.axis, row.block_size),
            storage=row.storage,
            dynamic=bool(row.dynamic),
        )
    except OnnxqError as error:
        raise _fault(site, error.fault, error.fix) from error
    # Pairs saturate at the ends of a spec's range, and nowhere else.
    if (low, high) != (spec.qmin, spec.qmax):
        cause = f"levels {low}…{high} are not those of {bits} bits"
        raise _fault(site, cause, f"use {spec.qmin}…{spec.qmax}")
    return spec


def _read_constant(index: GraphIndex, node: NodeRef, k: int, site: str) -> Array:
    value = index.input_value(node, k)
    what = ("scale", "zero point")[k - 1]
    if value is None:
        raise _fault(
            site, f"its {what} is computed at run time", "freeze the quantizers before the export"
        )
    if value.dtype.kind in "OSU":
        raise _fault(site, f"its {what} is text", "export the model again")
    return np.asarray(value)


def _make_qparams(site: str, spec: QuantSpec, scale: Array, zero: Array) -> QParams:
    scale, zero = unwrap_single(spec.has_one_scale, scale, zero)
    if scale.shape != zero.shape:
        raise _fault(
            site, f"scale of shape {scale.shape}, zero point of {zero.shape}", "give both one shape"
        )
    steps = as_float32(scale)
    if not are_scales(steps):
        raise _fault(
            site, "its scale is not a positive, finite number", "calibrate the quantizer again"
        )
    # Learned zero points are floats; the grid they stand for is that of the rounded one.
    codes = np.rint(as_float64(zero))
    # NaN is inside no bounds.
    if not ((codes >= spec.qmin) & (codes <= spec.qmax)).all():
        raise _fault(
            site,
            f"its zero point is outside {spec.qmin}…{spec.qmax}",
            "calibrate the quantizer again",
        )
    return QParams(steps, codes.astype(np.int32), ORIGIN)


def check_shape(marker: Marker, shape: Dims | None) -> None:
    """Raise ModelError when scale and zero point do not fit a tensor of this shape; unknown dims fit anything."""
    if marker.qparams is None:
        return
    grain = marker.spec.granularity
    actual = marker.qparams.scale.shape
    if isinstance(grain, PerTensor):
        if actual != ():
            raise _fault(
                marker.site, f"scale of shape {actual} and no axis", "give the axis of its channels"
            )
        return
    if shape is None:
        return
    if not -len(shape) <= grain.axis < len(shape):
        raise _fault(
            marker.site,
            f"axis {grain.axis} of a tensor of shape {list(shape)}",
            "use an axis it has",
        )
    if not fits_dims(actual, shape_scales(shape, grain)):
        raise _fault(
            marker.site,
            f"scale of shape {actual} for a tensor of shape {list(shape)} on axis {grain.axis}",
            "calibrate the quantizer again",
        )
