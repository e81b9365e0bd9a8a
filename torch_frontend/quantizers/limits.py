"""Checks of options, specs and qparams: when a quantizer is made and when it gets qparams, never in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from onnxq.backends import find_target
from onnxq.errors import CalibrationError, ConfigError
from onnxq.nearest import suggest_names
from onnxq.numerics import symmetric_steps
from onnxq.spec import QParams, QuantSpec

_Option = TypeVar("_Option")


def check_options(
    given: Mapping[str, _Option],
    defaults: Mapping[str, _Option],
    choices: Mapping[str, tuple[str, ...]],
    site: str,
    name: str,
) -> dict[str, _Option]:
    """`defaults` with the given options of quantizer `name`. Raises ConfigError for a wrong name, type or word."""
    for key, value in given.items():
        if key not in defaults:
            raise ConfigError(site, f"{name} has no option {key!r}", suggest_names(key, defaults), code="Q311")
        default = defaults[key]
        wanted = (float, int) if isinstance(default, float) else (type(default),)
        # bool is a subclass of int, but True is no number of an option.
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise ConfigError(
                site, f"{key}={value!r} is not a {wanted[0].__name__}", f"default: {default!r}", code="Q311"
            )
        if key in choices and value not in choices[key]:
            raise ConfigError(site, f"{key}={value!r}", suggest_names(str(value), choices[key]), code="Q311")
    return {**defaults, **given}


def check_spec(spec: QuantSpec, site: str, target: str) -> None:
    """Raise ConfigError if the spec cannot be trained, or if the target cannot hold it."""
    if spec.is_float or spec.bits == 32:
        raise ConfigError(site, f"{spec.storage} has no fake-quantized training", "use 2 to 8 or 16 bits", code="Q316")
    if not find_target(target).zero_points and find_zero_point(spec) != 0:
        scheme = "asymmetric" if not spec.symmetric else "unsigned symmetric"
        cause = f"{target} holds no zero point, which {scheme} values need"
        raise ConfigError(site, cause, "use scheme: symmetric, signed: true", code="Q316")


def find_zero_point(spec: QuantSpec) -> int | None:
    """The only zero point of a symmetric scheme: 0, or the middle of an unsigned type; None if it is free."""
    return spec.qmax - symmetric_steps(spec) if spec.symmetric else None


def check_qparams(qparams: QParams, spec: QuantSpec, site: str, target: str) -> QParams:
    """The same qparams as float32 and int32 arrays.

    Raises CalibrationError if the scale is not positive and finite, or the zero point is outside qmin..qmax, against
    the scheme, or one that the target cannot hold.
    """
    found = QParams(np.asarray(qparams.scale, np.float32), np.asarray(qparams.zero_point, np.int32), qparams.origin)
    wrong = _find_fault(found.scale, found.zero_point, spec, target)
    if wrong is not None:
        raise CalibrationError(site, *wrong, code="Q509")
    return found


def _find_fault(scale: Any, zero: Any, spec: QuantSpec, target: str) -> tuple[str, str] | None:
    """(cause, fix) of illegal qparams."""
    if scale.shape != zero.shape:
        return f"scale has shape {scale.shape}, zero point {zero.shape}", "give both the same shape"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return f"scale {scale.min():g} is not a positive number", "calibrate again"
    if not find_target(target).zero_points and zero.any():
        return f"zero point {zero[zero != 0].flat[0]}, and {target} holds only 0", "use scheme: symmetric"
    fixed = find_zero_point(spec)
    if fixed is not None and (zero != fixed).any():
        cause = f"zero point {zero[zero != fixed].flat[0]} where the symmetric scheme has {fixed}"
        return cause, "use scheme: asymmetric"
    if (zero < spec.qmin).any() or (zero > spec.qmax).any():
        return f"zero point {zero.min()}…{zero.max()} is outside the range {spec.qmin}…{spec.qmax}", "calibrate again"
    return None
