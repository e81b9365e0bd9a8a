"""Plan <-> JSON without loss, readable and editable by a person.

Arrays of up to 64 values are plain lists; longer ones are {"shape", "zlib64"}: little-endian float32 or
int32, deflated, base64. Both forms are read.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import OnnxqError, PlanError
from onnxq.plan.model import SCHEMA, BiasPlan, Plan, Saturation, SitePlan
from onnxq.plan.scalings import Scaling, read_scaling, scaling_dict
from onnxq.sites import Caution, Edge, LeftFloat, Refusal, Role, Site, TensorId
from onnxq.spec import GRAIN_NAMES, Granularity, ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

_INLINE = 64


def to_json(plan: Plan) -> str:
    """The plan as JSON text; equal plans give equal bytes."""
    return json.dumps(_plan_dict(plan), indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, *, source: str | Path = "plan") -> Plan:
    """Read what `to_json` wrote, or a person edited. PlanError names the entry that is wrong.

    source: the file it was read from, or a name for text from elsewhere.
    """
    try:
        return _read_plan(text, str(source))
    except PlanError as error:
        if isinstance(source, Path):
            raise error.name_file(source) from error
        raise


def _read_plan(text: str, source: str) -> Plan:
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{source}:{error.lineno}",
            f"not JSON: {error.msg}",
            "write it with `onnxq plan`",
            code="Q401",
            line=error.lineno,
        ) from error
    if not isinstance(raw, dict) or "schema" not in raw:
        raise PlanError(source, "not a plan: no `schema`", "write it with `onnxq plan`", code="Q401")
    if raw["schema"] != SCHEMA:
        raise PlanError(
            source, f"plan schema {raw['schema']}, this onnxq reads {SCHEMA}", "plan the model again", code="Q401"
        )
    unknown = sorted(set(raw) - set(_PLAN_KEYS))
    if unknown:
        raise PlanError(
            source, f"unknown key {unknown[0]!r}", f"use one of {', '.join(sorted(_PLAN_KEYS))}", code="Q403"
        )
    for key, kind in _PLAN_KEYS.items():
        if key in raw and not isinstance(raw[key], kind):
            raise PlanError(
                f"{source}: {key}", f"is {type(raw[key]).__name__}, not {kind.__name__}", _FRESH, code="Q403"
            )
    sites = tuple(_entry(source, k, entry) for k, entry in enumerate(raw.get("sites", ())))
    try:
        return Plan(
            **{
                key: raw[key]
                for key in ("target", "model", "topology", "weights", "schema", "opset", "data")
                if key in raw
            },
            prepare=tuple(raw.get("prepare", ())),
            sites=sites,
            float_nodes=tuple(raw.get("float_nodes", ())),
            refusals=tuple(Refusal(**entry) for entry in raw.get("refusals", ())),
            left_float=tuple(LeftFloat(**entry) for entry in raw.get("left_float", ())),
            kept=tuple(raw.get("kept", ())),
            warnings=tuple(Caution(**entry) for entry in raw.get("warnings", ())),
            choice=dict(raw.get("choice", {})),
            nodes=dict(raw.get("nodes", {})),
            scalings=tuple(_scaling(entry) for entry in raw.get("scalings", ())),
            biases=tuple(_bias(entry) for entry in raw.get("biases", ())),
            lasting=raw.get("lasting", False),
            saturation=_saturation(source, raw.get("saturation", "avoid")),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
        raise PlanError(source, f"{type(error).__name__}: {error}", _FRESH, code="Q403") from error


_FRESH = "compare with a fresh `onnxq plan`"
_PLAN_KEYS: dict[str, type] = {
    "schema": int,
    "target": str,
    "model": str,
    "topology": str,
    "weights": str,
    "opset": int,
    "prepare": list,
    "data": str,
    "choice": dict,
    "warnings": list,
    "kept": list,
    "float_nodes": list,
    "refusals": list,
    "left_float": list,
    "sites": list,
    "nodes": dict,
    "scalings": list,
    "biases": list,
    "lasting": bool,
    "saturation": str,
}
_SITE_KEYS = {
    "site", "scope", "role", "spec", "scale", "zero_point", "origin", "observer", "rule", "reason",
    "consumers", "bound", "derived", "group", "tensor", "anchor", "values", "sum_orders",
}  # fmt: skip


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return {
        "schema": plan.schema,
        "target": plan.target,
        "model": plan.model,
        "topology": plan.topology,
        "weights": plan.weights,
        "opset": plan.opset,
        "prepare": list(plan.prepare),
        "data": plan.data,
        "choice": dict(plan.choice),
        "warnings": [{"code": warning.code, "text": str(warning)} for warning in plan.warnings],
        "kept": list(plan.kept),
        "float_nodes": list(plan.float_nodes),
        "refusals": [{k: v for k, v in vars(refusal).items() if v} for refusal in plan.refusals],
        "left_float": [{k: v for k, v in vars(one).items() if v} for one in plan.left_float],
        "sites": [_site_dict(site) for site in plan.sites],
        "nodes": dict(plan.nodes),
        **({"scalings": [scaling_dict(s, _array(s.factors)) for s in plan.scalings]} if plan.scalings else {}),
        **({"biases": [_site_name(b.edge) | {"values": _array(b.values)} for b in plan.biases]} if plan.biases else {}),
        **({"lasting": True} if plan.lasting else {}),
        **({"saturation": plan.saturation} if plan.saturation != "avoid" else {}),
    }


def _saturation(source: str, found: str) -> Saturation:
    for known in get_args(Saturation):
        if found == known:
            return known  # type: ignore[no-any-return]
    raise PlanError(f"{source}: saturation", f"is {found!r}", "write avoid or allow", code="Q403")


def _bias(raw: Mapping[str, Any]) -> BiasPlan:
    return BiasPlan(edge=_read_edge(raw), values=_read_array(raw["values"], np.float32))


def _scaling(raw: Mapping[str, Any]) -> Scaling:
    return read_scaling(raw, _read_array(raw["factors"], np.float32))


def _site_dict(site: SitePlan) -> dict[str, Any]:
    out: dict[str, Any] = {**_site_name(site.site), "role": str(site.role), "spec": spec_dict(site.spec)}
    if site.qparams is not None:
        out |= {
            "scale": _array(site.qparams.scale),
            "zero_point": _array(site.qparams.zero_point),
            "origin": site.qparams.origin,
        }
    if site.observer != ObserverSpec():
        out["observer"] = {"name": site.observer.name, **dict(site.observer.options)}
    out |= {"rule": site.rule, "reason": site.reason}
    if site.consumers is not None:
        out["consumers"] = [_site_name(edge) for edge in site.consumers]
    if site.bound != (None, None):
        out["bound"] = list(site.bound)
    if site.derived is not None:
        out["derived"] = [_site_name(part) for part in site.derived]
    out |= {key: value for key in ("group", "tensor", "anchor") if (value := getattr(site, key))}
    out |= {"sum_orders": [list(order) for order in site.sum_orders]} if site.sum_orders else {}
    return out if site.values is None else out | {"values": _array(site.values)}


def _integers(storage: str) -> np.dtype[Any]:
    return np.dtype(storage.replace("int4", "int8"))


def _site_name(site: Site) -> dict[str, Any]:
    name: str | list[str | int] = site.name if isinstance(site, TensorId) else [site.node, site.index]
    return {"site": name, **({"scope": site.scope} if site.scope else {})}


def _read_site(raw: Mapping[str, Any]) -> Site:
    name, scope = raw["site"], raw.get("scope", "")
    return TensorId(name, scope) if isinstance(name, str) else Edge(str(name[0]), int(name[1]), scope)


def _read_edge(raw: Mapping[str, Any]) -> Edge:
    site = _read_site(raw)
    if not isinstance(site, Edge):
        raise ValueError(f"a consumer is [node, input index], not {site}")
    return site


def _entry(source: str, position: int, raw: Mapping[str, Any]) -> SitePlan:
    if not isinstance(raw, Mapping):
        raise PlanError(f"{source}: sites[{position}]", f"is {type(raw).__name__}, not an object", _FRESH, code="Q403")
    subject = f"{source}: sites[{position}] ({raw.get('site', '?')})"
    unknown = sorted(set(raw) - _SITE_KEYS)
    if unknown:
        raise PlanError(
            subject, f"unknown key {unknown[0]!r}", f"use one of {', '.join(sorted(_SITE_KEYS))}", code="Q403"
        )
    try:
        observer = dict(raw.get("observer", {"name": "minmax"}))
        numbers = None
        if "scale" in raw:
            numbers = QParams(
                _read_array(raw["scale"], np.float32),
                _read_array(raw["zero_point"], np.int32),
                raw.get("origin", source),
            )
        derived = raw.get("derived")
        low, high = raw.get("bound", (None, None))
        return SitePlan(
            site=_read_site(raw),
            role=Role(raw["role"]),
            spec=read_spec(raw["spec"]),
            qparams=numbers,
            observer=ObserverSpec(observer.pop("name"), tuple(sorted(observer.items()))),
            rule=raw.get("rule", ""),
            reason=raw.get("reason", ""),
            consumers=tuple(_read_edge(edge) for edge in raw["consumers"]) if "consumers" in raw else None,
            bound=(low, high),
            derived=(_read_site(derived[0]), _read_site(derived[1])) if derived else None,
            group=raw.get("group", ""),
            tensor=raw.get("tensor", ""),
            anchor=raw.get("anchor", ""),
            values=_read_array(raw["values"], _integers(raw["spec"]["type"])) if "values" in raw else None,
            sum_orders=tuple(tuple(int(axis) for axis in order) for order in raw.get("sum_orders", ())),
        )
    except OnnxqError as error:
        raise PlanError(f"{subject}: {error.subject}", error.cause, error.fix, code="Q403") from error
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, zlib.error) as error:
        raise PlanError(subject, f"{type(error).__name__}: {error}", _FRESH, code="Q403") from error


def spec_dict(spec: QuantSpec) -> dict[str, Any]:
    """A spec as plain JSON values, in the words of the configuration."""
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
    return out


def read_spec(raw: Mapping[str, Any]) -> QuantSpec:
    """The inverse of `spec_dict`; ValueError or KeyError on what it never wrote."""
    kinds = {"tensor": 0, "channel": 1, "block": 2}
    kind = kinds[raw["granularity"]]
    grain: Granularity = PerTensor()
    if kind == 1:
        grain = PerChannel(int(raw["axis"]))
    elif kind == 2:
        grain = PerBlock(int(raw["axis"]), int(raw["block_size"]))
    if raw["scheme"] not in ("symmetric", "asymmetric"):
        raise ValueError(f"scheme {raw['scheme']!r} is neither symmetric nor asymmetric")
    return QuantSpec(
        bits=int(raw["bits"]),
        signed=not str(raw["type"]).startswith("u"),
        symmetric=raw["scheme"] == "symmetric",
        narrow_range=bool(raw.get("narrow_range", False)),
        granularity=grain,
        storage=str(raw["type"]),
    )


def _array(values: NDArray[Any]) -> Any:
    if values.size <= _INLINE:
        return values.tolist()
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode("ascii")
    return {"shape": list(values.shape), "zlib64": packed}


def _read_array(raw: Any, dtype: Any) -> NDArray[Any]:
    if isinstance(raw, Mapping):
        data = zlib.decompress(base64.b64decode(raw["zlib64"]))
        return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(raw["shape"])
    return np.asarray(raw, dtype=dtype)
