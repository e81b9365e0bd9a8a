"""The integers of weights and biases."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import OnnxqError, PlanError
from onnxq.numerics import find_saturating_sums, quantize, quantize_weight
from onnxq.plan import SitePlan
from onnxq.sites import Role
from onnxq.spec import QParams, QuantSpec


def quantize_constant(site: SitePlan, qparams: QParams, value: NDArray[np.generic]) -> NDArray[np.generic]:
    """The quantized values of a weight (in its own shape) or a bias (as a vector), in the storage's numpy type.

    Values that the plan carries take the place of rounding to nearest. Raises PlanError where those do not fit, and
    where the scales do not.
    """
    if site.values is not None:
        return _check_values(site, value.shape)
    try:
        if site.role is Role.BIAS:
            # A Gemm takes a bias of shape [1, N]; the integer kernels read [N] only.
            return quantize(value.reshape(-1), qparams, site.spec)
        return quantize_weight(value, qparams, site.spec, site.sum_orders)
    except OnnxqError as error:
        # numerics sees arrays only, so the site is named here.
        raise PlanError(f"{site.site}: {error.subject}", error.cause, error.fix, code=error.code) from error


def _check_values(site: SitePlan, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The quantized values that the plan carries, once they are found to be legal."""
    data = np.asarray(site.values)
    fits = data.shape == shape and data.dtype == numpy_type(site.spec)
    if not fits or (data.size and (data.min() < site.spec.qmin or data.max() > site.spec.qmax)):
        cause = f"its values do not fit a {site.spec.storage} tensor of shape {list(shape)}"
        raise PlanError(str(site.site), cause, "take `values` out, or plan this model again", code="Q408")
    if any(find_saturating_sums(data, order).any() for order in site.sum_orders):
        cause = "its values overflow 16-bit sums on CPUs without VNNI, and the plan says that they do not"
        raise PlanError(str(site.site), cause, "take `values` out, or write `saturation: allow`", code="Q408")
    return data


def numpy_type(spec: QuantSpec) -> np.dtype[np.generic]:
    """The numpy type of a site's quantized values and zero point."""
    # FP8 has one zero point only, 0, which the graph editor casts to the storage.
    return np.dtype(np.float32 if spec.is_float else spec.numpy_storage)
