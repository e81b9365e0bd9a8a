"""Errors at the outputs by each quantized weight alone in the float model, for `weight_bits_core.spend_budget`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import GraphIndex, ModelLike, ensure_opset
from onnxq.graph.light import bare_proto, rebuild
from onnxq.graph.scopes import iterate_subgraphs
from onnxq.numerics import dequantize, fake_quant_weight
from onnxq.passes.rounding.operators import Operator, list_operators
from onnxq.passes.rounding.sequential import round_sequentially
from onnxq.plan import Plan, SitePlan
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session
from onnxq.sites import Edge, Site

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class _Place:
    """An input of a node that reads a constant, made an input of the whole model."""

    name: str
    usual: Array


def measure_isolated(
    proto: ModelLike,
    plan: Plan,
    fitted: Sequence[Feeds],
    judged: Iterable[Feeds],
    *,
    rounded: bool,
    others: Sequence[Feeds] = (),
    progress: Progress,
) -> dict[Site, float]:
    """Squared error at the outputs over their power, with only this weight quantized; activations stay float.

    plan: calibrated for `proto`, the prepared float model. rounded: each weight is rounded by the second moments of
    `fitted` and its bias corrected, as sequential rounding does it; else it is as the plan has it. judged: samples that
    `fitted` does not hold: with few samples a layer of many columns fits those it saw. others: as of
    `round_sequentially`. The model is loaded once, with the weights as inputs.
    """
    proto = ensure_opset(proto, plan.opset)
    found = list_operators(GraphIndex(proto), plan)
    alone = (
        round_sequentially(proto, plan, fitted, others=others, alone=True, progress=progress).plan if rounded else plan
    )
    open_, places = _open_constants(proto, found)
    session = Session(open_, optimize=False)
    usual = {place.name: place.usual for place in places.values()}
    samples = [dict(sample) for sample in judged]
    wanted = [session.run({**sample, **usual}) for sample in samples]
    errors: dict[Site, float] = {}
    by_site: dict[Site, list[Operator]] = {}
    for one in found:
        by_site.setdefault(one.site.site, []).append(one)
    with progress("measuring weights", len(by_site)) as task:
        for site, readers in by_site.items():
            changed = {**usual, **_list_changes(alone, readers, places)}
            got = (session.run({**sample, **changed}) for sample in samples)
            errors[site] = _measure_relative(samples, wanted, got)
            task.advance()
    return errors


def _open_constants(proto: ModelLike, found: Sequence[Operator]) -> tuple[ModelLike, dict[Edge, _Place]]:
    """A copy whose weights and biases of these operators are read from inputs of the model."""
    copy = onnx.ModelProto.FromString(bare_proto(proto).SerializeToString())
    nodes = {node.name: node for node in _nodes(copy.graph)}
    places: dict[Edge, _Place] = {}
    for one in found:
        wanted = {Edge(one.node.name, 1, one.node.scope): one.weight}
        if one.bias_edge is not None:
            wanted[one.bias_edge] = np.asarray(one.bias.reshape(one.bias_shape), np.float32)
        for edge, value in wanted.items():
            node = nodes[edge.node]
            place = _Place(f"{edge.node}/in{edge.index}/given", np.ascontiguousarray(value, np.float32))
            node.input.extend([""] * (edge.index + 1 - len(node.input)))
            node.input[edge.index] = place.name
            copy.graph.input.append(onnx.helper.make_tensor_value_info(place.name, 1, place.usual.shape))
            places[edge] = place
    return rebuild(proto, copy), places


def _nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for _, body in iterate_subgraphs(node):
            yield from _nodes(body)


def _list_changes(plan: Plan, readers: Sequence[Operator], places: Mapping[Edge, _Place]) -> dict[str, Array]:
    sites = {site.site: site for site in plan.sites}
    biases = {bias.edge: bias.values for bias in plan.biases}
    found: dict[str, Array] = {}
    for one in readers:
        found[places[Edge(one.node.name, 1, one.node.scope)].name] = _value(sites[one.site.site], one.weight)
        if one.bias_edge is None:
            continue
        place, held = places[one.bias_edge], one.bias_site
        if one.bias_edge in biases:
            found[place.name] = np.asarray(biases[one.bias_edge].reshape(place.usual.shape), np.float32)
        elif held is not None and sites[held.site].values is not None:
            found[place.name] = _value(sites[held.site], place.usual.reshape(-1)).reshape(place.usual.shape)
    return found


def _value(site: SitePlan, constant: Array) -> Array:
    if site.qparams is None:
        return constant
    if site.values is None:
        return np.asarray(fake_quant_weight(constant, site.qparams, site.spec, site.sum_orders))
    return np.ascontiguousarray(dequantize(site.values, site.qparams, site.spec), np.float32)


def _measure_relative(
    samples: Sequence[Feeds], wanted: Sequence[Mapping[str, Any]], got: Iterable[Mapping[str, Any]]
) -> float:
    """Mean over float outputs of squared error over power, without padding."""
    errors = ModelErrors()
    for feeds, one, other in zip(samples, wanted, got, strict=True):
        floats = {name: v for name, v in one.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
        errors.update(feeds, floats, other)
    return errors.noise()
