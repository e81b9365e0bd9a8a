"""Plan to JSON and back without loss; a person can read and edit the text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from onnxq.config.schema import JsonText, Path, shorten_value
from onnxq.errors import OnnxqError, PlanError
from onnxq.escapes import escape_json
from onnxq.files import find_calibrator
from onnxq.plan.arrays import read_array, read_mark, write_array, write_mark
from onnxq.plan.choice import AttentionChoice, AttentionKind, PlacementChoice, PlacementMethod
from onnxq.plan.contents import Contents, Feed, NodeContents, contents_dict, read_sketch
from onnxq.plan.model import SCHEMA, BiasPlan, Plan, SitePlan
from onnxq.plan.precision import KeepReason, KeptFloat32, PrecisionPlan
from onnxq.plan.scalings import Rotation, Scaling, check_scaling, scaling_dict
from onnxq.plan.schema import (
    AttentionRow,
    BiasRow,
    ContentsRow,
    PlacementRow,
    PlanFile,
    PrecisionRow,
    ScalingRow,
    SiteRef,
    SiteRow,
    SpecRow,
)
from onnxq.sites import Caution, Edge, LeftFloat, Refusal, Role, Site, TensorId, Unquantized
from onnxq.spec import (
    GRAIN_NAMES,
    FloatType,
    Granularity,
    ObserverSpec,
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
    find_element_type,
)


def to_json(plan: Plan) -> str:
    """The plan as JSON text; equal plans give equal bytes."""
    return escape_json(json.dumps(_plan_dict(plan), indent=1, ensure_ascii=False)) + "\n"


def from_json(text: str, *, source: str | FilePath = "plan") -> Plan:
    """The plan of JSON text.

    source: the file it was read from, or a name for text from elsewhere.
    Raises PlanError naming the line and the entry at fault.
    """
    try:
        return _read_plan(text, str(source))
    except PlanError as error:
        if isinstance(source, FilePath):
            raise error.name_file(source) from error
        raise


def _read_plan(text: str, source: str) -> Plan:
    # Some editors save UTF-8 with a byte order mark.
    read = JsonText(source, text.removeprefix("\ufeff"))
    if tool := find_calibrator(text):
        raise PlanError(source, f"is a calibration file of {tool}, and no plan", _CALIBRATIONS[tool], code="Q401")
    raw = read.parse(PlanError, _WRITE, code="Q401")
    if not isinstance(raw, dict) or "schema" not in raw:
        raise PlanError(source, "not a plan: no `schema`", _WRITE, code="Q401")
    # Before the rest: a file of another version has other keys, and telling of those would mislead.
    if raw["schema"] != SCHEMA:
        cause = f"plan schema {shorten_value(raw['schema'])}, this onnxq reads {SCHEMA}"
        raise PlanError(source, cause, "plan the model again", code="Q401")
    row = read.read(PlanFile, PlanError, _FRESH, code="Q403")
    return Plan(
        target=row.target,
        model=row.model,
        topology=row.topology,
        weights=row.weights,
        opset=row.opset,
        prepare=row.prepare,
        sites=tuple(_read_entry(read, ("sites", k), entry) for k, entry in enumerate(row.sites)),
        float_nodes=row.float_nodes,
        refusals=tuple(Refusal(**dict(one)) for one in row.refusals),
        left_float=tuple(LeftFloat(**dict(one)) for one in row.left_float),
        kept=row.kept,
        warnings=tuple(Caution(**dict(one)) for one in row.warnings),
        data=row.data,
        placement=_read_placement(row.placement),
        attention=_read_attention(row.attention),
        nodes=row.nodes,
        scalings=tuple(_read_scaling(read, k, entry) for k, entry in enumerate(row.scalings)),
        biases=tuple(_read_bias(read, k, entry) for k, entry in enumerate(row.biases)),
        lasting=row.lasting,
        nbits=row.nbits,
        saturation=row.saturation,
        existing=tuple(_read_entry(read, ("existing", k), entry) for k, entry in enumerate(row.existing)),
        precision=_read_precision(read, row.precision),
        contents=_read_contents(read, row.contents),
    )


# By the tool that wrote a calibration file.
_CALIBRATIONS = {
    "TensorRT": "`onnxq import-calibration` makes a plan of it",
    "ONNX Runtime": "give `quantize` the samples that it was made of: it finds ranges of its own",
}
_WRITE = "write it with `onnxq plan`"
_FRESH = "compare with a fresh `onnxq plan`"


def _plan_dict(plan: Plan) -> dict[str, Any]:
    # None: a key that most plans leave out, since a person reads the file.
    entries = {
        "schema": plan.schema,
        "target": plan.target,
        "model": plan.model,
        "topology": plan.topology,
        "weights": plan.weights,
        "opset": plan.opset,
        "prepare": list(plan.prepare),
        "data": plan.data,
        "placement": None if plan.placement is None else _placement_dict(plan.placement),
        "attention": None if plan.attention is None else _attention_dict(plan.attention),
        "warnings": [{"code": warning.code, "text": str(warning)} for warning in plan.warnings],
        "kept": list(plan.kept),
        "float_nodes": list(plan.float_nodes),
        "refusals": [_reason_dict(one) for one in plan.refusals],
        "left_float": [_reason_dict(one) for one in plan.left_float],
        "sites": [_site_dict(site) for site in plan.sites],
        "nodes": dict(plan.nodes),
        "scalings": [_scaling_dict(one) for one in plan.scalings] or None,
        "biases": [_site_name(one.edge) | {"values": write_array(one.values)} for one in plan.biases] or None,
        "lasting": plan.lasting or None,
        "nbits": plan.nbits,
        "saturation": plan.saturation if plan.saturation != "avoid" else None,
        "existing": [_site_dict(site) for site in plan.existing] or None,
        "precision": None if plan.precision is None else _precision_dict(plan.precision),
        "contents": None if plan.contents is None else contents_dict(plan.contents),
    }
    return {key: value for key, value in entries.items() if value is not None}


def _placement_dict(choice: PlacementChoice) -> dict[str, Any]:
    fields = {**vars(choice), "method": str(choice.method), "speedups": dict(choice.speedups)}
    return {key: value for key, value in fields.items() if value}


def _attention_dict(choice: AttentionChoice) -> dict[str, Any]:
    fields = {**vars(choice), "kind": str(choice.kind)}
    # JSON has no infinity, and a figure is infinite where the outputs are exact.
    return {key: value for key, value in fields.items() if value != math.inf}


def _read_placement(row: PlacementRow | None) -> PlacementChoice | None:
    if row is None:
        return None
    return PlacementChoice(**{**dict(row), "method": PlacementMethod(row.method), "speedups": row.speedups or {}})


def _read_attention(row: AttentionRow | None) -> AttentionChoice | None:
    if row is None:
        return None
    figures: dict[str, Any] = {key: math.inf if value is None else value for key, value in dict(row).items()}
    return AttentionChoice(**{**figures, "kind": AttentionKind(row.kind)})


def _precision_dict(plan: PrecisionPlan) -> dict[str, Any]:
    kept = [
        {key: value for key, value in (vars(one) | {"reason": str(one.reason)}).items() if value} for one in plan.kept
    ]
    fields = {"nodes": plan.nodes, "kept": kept, "limited": [_site_name(edge) for edge in plan.limited]}
    io = {} if plan.io is None else {"io": str(plan.io)}
    return {"type": str(plan.type), **{key: value for key, value in fields.items() if value}, **io}


def _read_precision(read: JsonText, row: PrecisionRow | None) -> PrecisionPlan | None:
    if row is None:
        return None
    with _locate_errors(read, ("precision", "limited")):
        limited = tuple(_read_edge(edge) for edge in row.limited)
    kept = tuple(
        KeptFloat32(node=one.node, reason=KeepReason(one.reason), figure=one.figure, detail=one.detail)
        for one in row.kept
    )
    io = None if row.io is None else FloatType(row.io)
    return PrecisionPlan(type=FloatType(row.type), nodes=row.nodes, kept=kept, limited=limited, io=io)


def _read_contents(read: JsonText, row: ContentsRow | None) -> Contents | None:
    if row is None:
        return None
    sketches = {}
    for name, text in row.tensors.items():
        with _locate_errors(read, ("contents", "tensors", name)):
            sketches[name] = read_sketch(text)
    return Contents(
        topology=row.topology,
        feeds={name: Feed(**dict(feed)) for name, feed in row.feeds.items()},
        tensors=sketches,
        nodes={name: NodeContents(**dict(node)) for name, node in row.nodes.items()},
    )


def _reason_dict(one: Unquantized) -> dict[str, str]:
    # The schema requires a subject and a reason, also where a person emptied them.
    return {key: value for key, value in vars(one).items() if value or key in ("subject", "reason")}


def _site_dict(site: SitePlan) -> dict[str, Any]:
    out: dict[str, Any] = {**_site_name(site.site), "role": str(site.role), "spec": spec_dict(site.spec)}
    if site.qparams is not None:
        out |= {
            "scale": write_array(site.qparams.scale),
            "zero_point": write_array(site.qparams.zero_point),
            "origin": site.qparams.origin,
        }
        out["computed_for"] = write_mark(site.qparams, site.spec)
    # Defaults are left out.
    if site.observer != ObserverSpec():
        out["observer"] = {"name": site.observer.name, **dict(site.observer.options)}
    out |= {"rule": site.rule, "reason": site.reason}
    if site.consumers is not None:
        out["consumers"] = [_site_name(edge) for edge in site.consumers]
    if site.bound != (None, None):
        out["bound"] = list(site.bound)
    if site.clip != (None, None):
        out["clip"] = list(site.clip)
    if site.derived is not None:
        out["derived"] = [_site_name(part) for part in site.derived]
    if site.tensor is not None:
        out |= {"tensor": site.tensor.name, **({"tensor_scope": site.tensor.scope} if site.tensor.scope else {})}
    out |= {key: value for key in ("group", "anchor", "dequantize") if (value := getattr(site, key))}
    out |= {"sum_orders": [list(order) for order in site.sum_orders]} if site.sum_orders else {}
    return out if site.values is None else out | {"values": write_array(site.values)}


def _site_name(site: Site) -> dict[str, Any]:
    name: str | list[str | int] = site.name if isinstance(site, TensorId) else [site.node, site.index]
    return {"site": name, **({"scope": site.scope} if site.scope else {})}


def _read_site(row: SiteRef | SiteRow | BiasRow) -> Site:
    if isinstance(row.site, str):
        return TensorId(row.site, row.scope)
    return Edge(row.site[0], row.site[1], row.scope)


def _read_edge(row: SiteRef | BiasRow) -> Edge:
    site = _read_site(row)
    if not isinstance(site, Edge):
        raise ValueError(f"must be [node, number of its input], not {site}")
    return site


@contextmanager
def _locate_errors(read: JsonText, path: Path) -> Iterator[None]:
    """Name the entry of the file in errors of the block."""
    try:
        yield
    except PlanError:
        raise
    except OnnxqError as error:
        raise PlanError(f"{read.where(path)}: {error.subject}", error.cause, error.fix, code="Q403") from error
    except ValueError as error:
        raise PlanError(read.where(path), str(error), _FRESH, code="Q403") from error


def _read_entry(read: JsonText, path: Path, row: SiteRow) -> SitePlan:
    with _locate_errors(read, (*path, "spec")):
        spec = _make_spec(row.spec)
    with _locate_errors(read, (*path, "consumers")):
        consumers = None if row.consumers is None else tuple(_read_edge(edge) for edge in row.consumers)
    with _locate_errors(read, (*path, "values")):
        values = None if row.values is None else read_array(row.values, _find_integer_type(spec))
    return SitePlan(
        site=_read_site(row),
        role=Role(row.role),
        spec=spec,
        qparams=_read_numbers(read, path, row),
        observer=row.observer,
        rule=row.rule,
        reason=row.reason,
        consumers=consumers,
        bound=row.bound,
        clip=row.clip,
        derived=None if row.derived is None else (_read_site(row.derived[0]), _read_site(row.derived[1])),
        group=row.group,
        tensor=TensorId(row.tensor, row.tensor_scope) if row.tensor else None,
        anchor=row.anchor,
        dequantize=row.dequantize,
        values=values,
        sum_orders=row.sum_orders,
    )


def _read_numbers(read: JsonText, path: Path, row: SiteRow) -> QParams | None:
    if row.scale is None and row.zero_point is None:
        return None
    with _locate_errors(read, path):
        if row.scale is None or row.zero_point is None:
            raise ValueError("has one of scale and zero_point: give both, or neither to have them computed")
    with _locate_errors(read, (*path, "scale")):
        scale = read_array(row.scale, np.float32)
    with _locate_errors(read, (*path, "zero_point")):
        numbers = QParams(scale, read_array(row.zero_point, np.int32), row.origin or read.source)
    # Numbers that a person wrote over are theirs: they hold for whatever spec the site has.
    return replace(numbers, computed_for=read_mark(row.computed_for, numbers))


def _scaling_dict(one: Scaling | Rotation) -> dict[str, Any]:
    return scaling_dict(
        one, {"factors": write_array(one.factors)} if isinstance(one, Scaling) else {"seed": one.seed, "size": one.size}
    )


def _read_scaling(read: JsonText, position: int, row: ScalingRow) -> Scaling | Rotation:
    tensor = TensorId(row.tensor, row.scope)
    if row.size is not None:
        return Rotation(tensor=tensor, seed=row.seed, size=row.size, anchor=row.anchor)
    with _locate_errors(read, ("scalings", position)):
        factors = read_array(row.factors, np.float32)
        return check_scaling(Scaling(name=row.name, tensor=tensor, factors=factors, anchor=row.anchor))


def _read_bias(read: JsonText, position: int, row: BiasRow) -> BiasPlan:
    with _locate_errors(read, ("biases", position)):
        return BiasPlan(edge=_read_edge(row), values=read_array(row.values, np.float32))


def spec_dict(spec: QuantSpec) -> dict[str, Any]:
    """The spec as JSON values, under the keys that the configuration has for it."""
    grain = spec.granularity
    out: dict[str, Any] = {
        "bits": spec.bits,
        "type": spec.storage,
        "scheme": "symmetric" if spec.symmetric else "asymmetric",
        "granularity": GRAIN_NAMES[type(grain)],
    }
    if isinstance(grain, (PerChannel, PerBlock)):
        out["axis"] = grain.axis
    if isinstance(grain, PerBlock):
        out["block_size"] = grain.size
    if spec.narrow_range:
        out["narrow_range"] = True
    if spec.dynamic:
        out["dynamic"] = True
    return out


def _make_spec(row: SpecRow) -> QuantSpec:
    grain: Granularity = PerTensor()
    if row.granularity != "tensor":
        if row.axis is None:
            raise ValueError(f"granularity {row.granularity!r} needs an axis")
        if row.granularity == "block" and not row.block_size:
            raise ValueError("granularity 'block' needs a block_size above 0")
        block = row.granularity == "block" and row.block_size
        grain = PerBlock(row.axis, block) if block else PerChannel(row.axis)
    return QuantSpec(
        bits=row.bits,
        signed=find_element_type(row.type).signed,
        symmetric=row.scheme == "symmetric",
        narrow_range=row.narrow_range,
        granularity=grain,
        storage=row.type,
        dynamic=row.dynamic,
    )


def _find_integer_type(spec: QuantSpec) -> np.dtype[Any]:
    if spec.is_float:
        raise ValueError(f"{spec.storage} has no integers: take them out")
    return np.dtype(spec.numpy_storage)
