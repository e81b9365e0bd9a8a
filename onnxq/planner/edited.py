"""A person's edits of the sites of a plan: some taken out, others added, or their tensors changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from onnxq.errors import PlanError
from onnxq.graph import GraphIndex
from onnxq.graph.precision.widen import is_narrow
from onnxq.plan import SitePlan
from onnxq.planner.sums import read_constant, read_tensor
from onnxq.sites import Caution, Role
from onnxq.spec import PerBlock, PerTensor

# From these opsets on QuantizeLinear takes 4 and 16 bits and blocks, and FP8.
_WIDE_OPSET, _FLOAT8_OPSET = 21, 19
_WIDE = ("int4", "uint4", "int16", "uint16")


def drop_orphans(
    sites: tuple[SitePlan, ...], existing: Iterable[SitePlan]
) -> tuple[tuple[SitePlan, ...], tuple[Caution, ...]]:
    """The sites without biases whose input or weight was taken out of the plan, and a line for each.

    existing: pairs that the model came with, from which biases may derive too.
    """
    known = {site.site for site in (*existing, *sites)}
    lines = []
    for site in sites:
        gone = [str(part) for part in site.derived or () if part not in known]
        if gone:
            text = f"{site.site}: left float, its scale follows from {gone[0]}, which is not in the plan"
            lines.append(Caution("W121", text))
    return tuple(site for site in sites if known.issuperset(site.derived or ())), tuple(lines)


def check_site(site: SitePlan, index: GraphIndex) -> SitePlan:
    """The site; that of a weight or bias with its readers. Raises PlanError where it does not fit its tensor."""
    tensor = read_tensor(index, site.site)
    if tensor is None:
        raise PlanError(
            str(site.site), "this input is not connected in this model", "plan this model again", code="Q404"
        )
    constant = site.role in (Role.WEIGHT, Role.BIAS)
    if constant:
        # A constant has a copy in integers for the readers it names, so that none comes under it unnoticed.
        site = replace(site, consumers=site.find_readers(index))
    for edge in site.consumers or ():
        if read_tensor(index, edge) != tensor:
            others = ", ".join(str(one) for one in index.consumers(tensor)[:4])
            raise PlanError(
                str(site.site), f"is not read by {edge}, which its `consumers` name", f"readers: {others}", code="Q403"
            )
    value = index.constant(tensor) if constant else None
    if constant and value is None:
        fix = "make its role activation, or plan this model again"
        raise PlanError(str(site.site), f"is not a constant in this model, as a {site.role} is", fix, code="Q404")
    grain = site.spec.granularity
    if value is not None and not isinstance(grain, PerTensor) and not -value.ndim <= grain.axis < value.ndim:
        cause = f"axis {grain.axis} is outside its shape {list(value.shape)}"
        raise PlanError(str(site.site), cause, "give the axis of its channels", code="Q403")
    if site.values is not None and (value is None or site.values.shape != value.shape):
        shape = "a computed tensor" if value is None else f"a tensor of shape {list(value.shape)}"
        cause = f"its values of shape {list(site.values.shape)} do not fit {shape}"
        raise PlanError(str(site.site), cause, "take `values` out, or plan this model again", code="Q408")
    return site


def find_needed_opset(sites: Iterable[SitePlan], index: GraphIndex | None = None) -> int:
    """The lowest opset in which all these pairs can be written. index: of the model, None where none looks rows up.

    Rows are dequantized by operators that are no part of ONNX's opset, or old.
    """
    pairs = (site for site in sites if index is None or site.consumers is None or not _is_looked_up(site, index))
    return max(map(_site_opset, pairs), default=13)


def _is_looked_up(site: SitePlan, index: GraphIndex) -> bool:
    return site.find_lookups(index) == site.consumers


def _site_opset(site: SitePlan) -> int:
    if site.spec.storage in _WIDE or isinstance(site.spec.granularity, PerBlock):
        return _WIDE_OPSET
    return _FLOAT8_OPSET if site.spec.is_float else 13


def digest_weights(sites: Iterable[SitePlan], index: GraphIndex) -> str:
    """sha256 of the weights at these sites, in their order: the same however the graph around them is written."""
    digest = hashlib.sha256()
    for site in sites:
        if site.role is not Role.WEIGHT:
            continue
        value = read_constant(index, site.site)
        if value is not None:
            # A model in a narrower type is planned, and carried out, in float32.
            value = value.astype(np.float32) if is_narrow(value.dtype) else value
            digest.update(f"{value.dtype.str}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
