"""The numbers of an entry in the type that a site has, and the rules by which sites get the bits of their entries."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from onnxq.arrays import Array, Shape, as_int32
from onnxq.backends import Target
from onnxq.config import Rule, RuleSet, match_names
from onnxq.graph import GraphIndex
from onnxq.interop.base import TensorScale, TensorScales
from onnxq.numerics import clip_bounds, qparams_from_range
from onnxq.numerics.rounding import shape_scales
from onnxq.plan import Plan, SitePlan
from onnxq.sites import JsonObject, Site
from onnxq.spec import STORAGE_BITS, PerBlock, PerChannel, PerTensor, QParams, QuantSpec, name_int


def fit_numbers(
    entry: TensorScale, site: SitePlan, origin: str, shape: Shape
) -> tuple[QParams | None, str]:
    """The numbers of an entry for a site, and what became of them: "" where every level has its value.

    shape: of a weight. Without numbers the text says why the site gets none of this entry: a weight's scale is of use
    only where its integers stay as they are, an activation takes the range.
    """
    file_spec = entry.spec
    spec = site.spec
    weight = site.role.is_weight
    qparams = entry.make_qparams(origin)
    if weight:
        scale, problem = _spread_scale(entry, spec, qparams.scale, shape)
        if problem or scale is None:
            return None, problem
        zero = np.broadcast_to(
            qparams.zero_point.ravel() if scale.ndim == 1 else qparams.zero_point, scale.shape
        )
        qparams = QParams(scale, zero.copy(), origin)
    elif not file_spec.has_one_scale:
        return None, "a scale for each channel of an activation"
    if file_spec.is_float == spec.is_float and file_spec.bits == spec.bits:
        # The same values under the other sign's integers.
        shift = (int(file_spec.signed) - int(spec.signed)) * (1 << (spec.bits - 1))
        zero = qparams.zero_point + (0 if spec.is_float else shift)
        middle = 0 if spec.signed else 1 << (spec.bits - 1)
        if not spec.symmetric or (zero == middle).all():
            return replace(qparams, zero_point=as_int32(zero)), ""
    change = f"{describe_kind(file_spec)} in {describe_kind(spec)}"
    if weight:
        # Wider integers of the same steps; they do not end where the file's do.
        wider = file_spec.bits < spec.bits and not (
            qparams.zero_point.any() or file_spec.is_float or spec.is_float
        )
        return (qparams, change) if wider and file_spec.signed and spec.signed else (None, change)
    # The engine's own kernel may need more than the range, as a Relu in front of it does.
    low, high = map(float, clip_bounds(qparams, file_spec))
    fitted = qparams_from_range(low, high, spec, origin=origin, bound=site.bound)
    return fitted, f"its range, {change}"


def _spread_scale(
    entry: TensorScale, spec: QuantSpec, scale: Array, shape: Shape
) -> tuple[Array | None, str]:
    """The scales of a weight for the granularity of a spec; and why there are none."""
    mine = entry.spec.granularity
    theirs = spec.granularity
    # One scale serves channels as well as a row of equal ones.
    if isinstance(mine, PerTensor):
        if isinstance(theirs, PerBlock):
            return None, "one scale, and the target has blocks"
        if isinstance(theirs, PerChannel):
            scale = np.full(shape[theirs.axis], scale, np.float32)
        return scale, ""
    if type(mine) is not type(theirs) or isinstance(theirs, PerTensor):
        return None, "its scales are not of the parts that the target has scales for"
    axis = theirs.axis % len(shape)
    # Formats without an axis mean that of the output channels, which is the target's.
    if mine.axis >= 0 and mine.axis % len(shape) != axis:
        return None, f"scales along axis {mine.axis}, and the target's are along axis {axis}"
    expected = shape_scales(shape, theirs)
    return (
        (scale, "")
        if scale.shape == expected
        else (None, f"scales of shape {list(scale.shape)}, for {list(expected)}")
    )


def describe_kind(spec: QuantSpec) -> str:
    """Type and scheme, as int8 or asymmetric uint8."""
    return spec.kind if spec.symmetric else f"asymmetric {spec.kind}"


def make_rules(
    plan: Plan,
    entries: Mapping[Site, TensorScale],
    others: Mapping[str, TensorScales],
    engine: Target,
    index: GraphIndex,
) -> Iterator[Rule]:
    """Rules that give sites the bits of their entries, and weights their blocks, where the target has a kernel.

    entries: of the sites of the plan. others: all by tensor; those of some readers get rules in front.
    """
    # The scale of a bias is one for each channel, so that its weight has no blocks.
    biased = {site.derived[1] for site in plan.sites if site.derived is not None}
    for site in plan.sites:
        chosen = entries.get(site.site)
        if chosen is None or (site.site in biased and chosen.spec.has_blocks):
            continue
        group = [
            entry for entry in others.get(chosen.name, ()) if entry.readers and entry is not chosen
        ]
        # The first rule that selects a tensor counts.
        for entry in (*group, chosen):
            changes = _list_changes(entry, site)
            storage = _find_storage(site, entry, changes, engine, index) if changes else None
            if storage is not None:
                yield Rule(
                    node=match_names(entry.readers),
                    tensor=match_names([site.quantized_tensor.name]),
                    set=RuleSet.model_validate({**changes, "storage": storage}),
                )


def _find_storage(
    site: SitePlan,
    entry: TensorScale,
    changes: JsonObject,
    engine: Target,
    index: GraphIndex,
) -> str | None:
    """The type that the target holds the integers of an entry in, for all that reads the site; None without one."""
    grain = entry.spec.granularity if "granularity" in changes else site.spec.granularity
    ops = {index.find_node(edge.node).op_type for edge in site.find_readers(index)}
    packed = name_int(entry.spec.bits, signed=site.spec.signed)
    # Packed where there is a kernel that reads it so, else in bytes.
    for storage in dict.fromkeys((packed if packed in STORAGE_BITS else "", "")):
        spec = replace(site.spec, bits=entry.spec.bits, granularity=grain, storage=storage)
        if all(engine.capability(spec, site.role, op) is not None for op in ops):
            return spec.storage
    return None


def _list_changes(entry: TensorScale, site: SitePlan) -> JsonObject:
    """The fields of a rule in which an entry differs from the spec of its site."""
    spec = site.spec
    own = entry.spec
    changes: JsonObject = {} if own.is_float or own.bits == spec.bits else {"bits": own.bits}
    if (
        site.role.is_weight
        and type(own.granularity) is not type(spec.granularity)
        and not own.has_one_scale
    ):
        if isinstance(own.granularity, PerBlock):
            changes |= {"granularity": "block", "block_size": own.granularity.size}
        else:
            changes["granularity"] = "channel"
    return changes
