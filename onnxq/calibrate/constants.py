"""Scales and zero points that need no data: of weights, and of biases, which derive from their weight and input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from onnxq.calibrate.importance import estimate_importance
from onnxq.errors import ConfigError, OnnxqError, PlanError
from onnxq.graph import GraphIndex
from onnxq.numerics import bias_qparams, floor_weight_scale, weight_qparams
from onnxq.plan import SitePlan
from onnxq.progress import Progress, silent
from onnxq.sites import Role, Site, TensorId
from onnxq.spec import QParams

Numbers = Mapping[Site, QParams]


def find_tensor(index: GraphIndex, site: Site) -> TensorId:
    """The tensor that a site quantizes. Raises PlanError where the model does not have it."""
    if isinstance(site, TensorId):
        if index.resolve(site.name, site.scope) != site:
            raise PlanError(str(site), "the model has no such tensor", "plan this model again", code="Q404")
        return site
    node = index.node(site.node)
    name = node.inputs[site.index] if site.index < len(node.inputs) else ""
    found = index.resolve(name, node.scope)
    if found is None:
        raise PlanError(str(site), "this input is not connected in the model", "plan this model again", code="Q404")
    return found


def _report_weights(index: GraphIndex, sites: Iterable[SitePlan], progress: Progress) -> Iterator[SitePlan]:
    """The sites of weights, one after another, each a step that names the tensor, in megabytes of all."""
    weights = [site for site in sites if site.role is Role.WEIGHT]
    if not weights:
        return
    sizes = [_count_megabytes(index, site) for site in weights]
    with progress("scales of weights, MB", sum(sizes)) as task:
        for site, size in zip(weights, sizes, strict=True):
            with progress(f"scales of weights: {site.site}, {size} MB"):
                yield site
            task.advance(size)


def _count_megabytes(index: GraphIndex, site: SitePlan) -> int:
    """Of the float values; at least 1, so that small ones count too."""
    dims = index.shape(find_tensor(index, site.site)) or ()
    return max(1, 4 * math.prod(dim for dim in dims if isinstance(dim, int)) // 10**6)


def weight_numbers(
    index: GraphIndex,
    missing: Sequence[SitePlan],
    biases: Iterable[SitePlan],
    numbers: Numbers,
    progress: Progress = silent,
) -> dict[Site, QParams]:
    """Scales and zero points of the missing weight sites.

    missing: sites without numbers, of any role. biases: sites whose scale derives from weights. numbers: those known
    already, activations included.
    Raises PlanError where a weight is no constant, CalibrationError for NaN or inf in it.
    """
    found: dict[Site, QParams] = {}
    for site in _report_weights(index, missing, progress):
        value = _read_constant(index, site)
        with _name_site(site):
            importance = estimate_importance(index, site, value.shape)
            found[site.site] = weight_qparams(
                value, site.spec, observer=site.observer, orders=site.sum_orders, importance=importance
            )
    for bias in biases:
        if bias.derived is None:
            continue
        x, w = bias.derived
        # A bias on a scale too small for it would overflow int32, so the weight's scale is raised.
        if w in found and x in numbers:
            value = _read_constant(index, bias)
            with _name_site(bias):
                scale = floor_weight_scale(found[w].scale, numbers[x].scale, value)
            found[w] = replace(found[w], scale=scale)
    first: dict[str, QParams] = {}
    for site in missing:
        # Of a weight and the table that it is the transpose of, the weight's scales serve both.
        if site.group and site.site in found:
            shared = first.setdefault(site.group, found[site.site])
            found[site.site] = replace(shared, computed_for=site.spec.levels)
    return found


def bias_numbers(index: GraphIndex, missing: Iterable[SitePlan], numbers: Numbers) -> dict[Site, QParams]:
    """Scales and zero points of the missing bias sites whose input and weight have theirs."""
    found: dict[Site, QParams] = {}
    for site in missing:
        if site.role is not Role.BIAS:
            continue
        if site.derived is None:
            raise PlanError(
                str(site.site), "a bias needs the activation and the weight it derives from", "plan again", code="Q403"
            )
        x, w = site.derived
        if x in numbers and w in numbers:
            count = _read_constant(index, site).size
            with _name_site(site):
                found[site.site] = bias_qparams(numbers[x], numbers[w], count)
    return found


def _read_constant(index: GraphIndex, site: SitePlan) -> NDArray[Any]:
    value = index.constant(find_tensor(index, site.site))
    if value is None:
        raise PlanError(
            str(site.site), f"is not a constant, as a {site.role} must be", "plan this model again", code="Q404"
        )
    return value


@contextmanager
def _name_site(site: SitePlan) -> Iterator[None]:
    """Name the site in an error of numerics, which sees arrays only."""
    try:
        yield
    except ConfigError as error:
        # Its subject is the setting at fault.
        raise error.replace_text(subject=f"{site.site}: {error.subject}") from error
    except OnnxqError as error:
        raise error.replace_text(subject=str(site.site)) from error
