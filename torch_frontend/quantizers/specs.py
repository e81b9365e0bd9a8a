"""A QuantSpec as quantizers read it: the groups of its scales, the qparams it may have, its node in an ONNX export."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from onnxq.arrays import Shape, are_scales, as_float32, as_int32
from onnxq.backends import find_target
from onnxq.errors import CalibrationError, CauseAndFix, ConfigError, suggest_names
from onnxq.numerics import scale_floor, symmetric_steps
from onnxq.observers.base import check_option_type
from onnxq.sites import Names, Role
from onnxq.spec import QParams, QuantSpec
from torch_frontend.fake_quant import grid


def axis_of(spec: QuantSpec) -> int | None:
    """Axis of the channels or blocks; None per tensor."""
    return None if spec.has_one_scale else spec.granularity.axis


def block_size_of(spec: QuantSpec) -> int:
    """Elements in a block; 0 unless per block."""
    # 0, not None: the op's schema takes an int.
    return spec.granularity.size if spec.has_blocks else 0


def shape_numbers(slots: Iterable[Tensor], spec: QuantSpec) -> list[Tensor]:
    """Scales and zero points of the shape of QParams: [] per tensor, where slots have shape [1]."""
    return [values.reshape(()) if axis_of(spec) is None else values for values in slots]


def spread_values(values: Tensor, spec: QuantSpec, shape: Shape) -> Tensor:
    """One value per group, [] or [channels] or blocked, as a tensor that broadcasts over `shape`."""
    return grid.spread_over(values, shape, axis_of(spec), block_size_of(spec))


def sum_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Sum of each group in float64, of the scales' shape."""
    return grid.sum_groups(x, axis_of(spec), block_size_of(spec))


def count_elements(x: Tensor, spec: QuantSpec) -> Tensor:
    """Number of elements of each group, float64, of the scales' shape."""
    if axis_of(spec) is None:
        return torch.tensor(float(x.numel()), dtype=torch.float64)
    # Counted, not divided: the last block may be shorter than the others.
    return sum_groups(torch.ones(x.shape, dtype=torch.float64), spec)


def gather_shards(values: Tensor) -> Tensor:
    """The whole of a tensor that ranks hold in shards (DTensor), for which all of them must call this; else itself."""
    whole = getattr(values, "full_tensor", None)
    return values if whole is None else whole()


def format_range(values: Tensor) -> str:
    """The value of a tensor with one value, else "lowest…highest"."""
    low = float(values.min())
    high = float(values.max())
    return f"{low:.4g}" if values.numel() == 1 or low == high else f"{low:.4g}…{high:.4g}"


_Option = TypeVar("_Option")


def check_options(
    options: Mapping[str, _Option],
    defaults: Mapping[str, _Option],
    choices: Mapping[str, Names],
    site: str,
    name: str,
) -> dict[str, _Option]:
    """`defaults` with the given options of quantizer `name`. Raises ConfigError for a wrong name, type or word."""
    for key, value in options.items():
        if key not in defaults:
            raise ConfigError(
                site, f"{name} has no option {key!r}", suggest_names(key, defaults), code="Q311"
            )
        check_option_type(site, key, value, defaults[key])
        if key in choices and value not in choices[key]:
            raise ConfigError(
                site, f"{key}={value!r}", suggest_names(str(value), choices[key]), code="Q311"
            )
    return {**defaults, **options}


def check_spec(spec: QuantSpec, site: str, target: str) -> None:
    """Raise ConfigError if the spec cannot be trained, or if the target cannot hold it."""
    if spec.is_float or spec.bits == 32:
        raise ConfigError(
            site,
            f"{spec.storage} has no fake-quantized training",
            "use 2 to 8 or 16 bits",
            code="Q316",
        )
    # A free zero point, None, counts as one.
    if not find_target(target).zero_points and find_zero_point(spec) != 0:
        scheme = "unsigned symmetric" if spec.symmetric else "asymmetric"
        cause = f"{target} holds no zero point, which {scheme} values need"
        raise ConfigError(site, cause, "use scheme: symmetric, signed: true", code="Q316")


def find_zero_point(spec: QuantSpec) -> int | None:
    """The only zero point of a symmetric scheme: 0, or the middle of an unsigned type; None if it is free."""
    return spec.qmax - symmetric_steps(spec) if spec.symmetric else None


def make_qparams(scale: ArrayLike, zero_point: ArrayLike, spec: QuantSpec, origin: str) -> QParams:
    """Qparams of scales that are not below their floor. A group of zeros would get scale 0."""
    floored = np.maximum(scale, scale_floor(spec))
    return QParams(as_float32(floored), as_int32(zero_point), origin)


def check_qparams(qparams: QParams, spec: QuantSpec, site: str, target: str) -> QParams:
    """The same qparams as float32 and int32 arrays.

    Raises CalibrationError if the scale is not positive and finite, or the zero point is outside qmin..qmax, against
    the scheme, or one that the target cannot hold.
    """
    checked = QParams(
        as_float32(qparams.scale),
        as_int32(qparams.zero_point),
        qparams.origin,
    )
    fault = _find_fault(checked.scale, checked.zero_point, spec, target)
    if fault is not None:
        raise CalibrationError(site, *fault, code="Q509")
    return checked


def _find_fault(scale: Any, zero: Any, spec: QuantSpec, target: str) -> CauseAndFix | None:
    """(cause, fix) of illegal qparams."""
    if scale.shape != zero.shape:
        return f"scale has shape {scale.shape}, zero point {zero.shape}", "give both the same shape"
    if not are_scales(scale):
        return f"scale {scale.min():g} is not a positive number", "calibrate again"
    if not find_target(target).zero_points and zero.any():
        return (
            f"zero point {zero[zero != 0].flat[0]}, and {target} holds only 0",
            "use scheme: symmetric",
        )
    fixed = find_zero_point(spec)
    if fixed is not None and (zero != fixed).any():
        cause = f"zero point {zero[zero != fixed].flat[0]} where the symmetric scheme has {fixed}"
        return cause, "use scheme: asymmetric"
    if (zero < spec.qmin).any() or (zero > spec.qmax).any():
        return (
            f"zero point {zero.min()}…{zero.max()} is outside the range {spec.qmin}…{spec.qmax}",
            "calibrate again",
        )
    return None


MARKER = "ai.onnxq::FakeQuantize"


def mark_tensor(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    spec: QuantSpec,
    *,
    site: str,
    role: Role,
) -> Tensor:
    """Return x through a marker node; only inside torch.onnx.export.

    scale, zero_point: [] or [1] per tensor, [channels] per channel, blocked per block, as in `onnxq.spec.QParams`;
    the reader of the marker rounds the zero point. Both None for a spec that is dynamic.
    """
    # Levels and bits: a narrow range has fewer levels than its bits.
    attrs = {
        "site": site,
        "role": str(role),
        "qmin": spec.qmin,
        "qmax": spec.qmax,
        "bits": spec.bits,
        "scheme": spec.scheme,
        "storage": spec.storage,
        **spec.granularity.attributes,
    }
    if "axis" in attrs:
        # Not negative: a reader of the marker may not know the tensor's rank.
        attrs["axis"] %= x.dim()
    if spec.dynamic:
        attrs["dynamic"] = 1
    inputs = (x,) if scale is None or zero_point is None else (x, scale, zero_point)
    return torch.onnx.ops.symbolic(MARKER, inputs, attrs, dtype=x.dtype, shape=x.shape, version=1)
