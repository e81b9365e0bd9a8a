"""Errors at the outputs by each quantized weight alone in the float model, for `weight_bits_core.spend_budget`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import GraphIndex, ModelLike, ensure_opset
from onnxq.graph.light import bare_proto, rebuild
from onnxq.graph.scopes import walk_graphs
from onnxq.passes.rounding.operators import Operator, dequantize_constant, list_operators
from onnxq.passes.rounding.sequential import RoundingOptions, round_sequentially
from onnxq.plan import Plan
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew
from onnxq.sites import Edge, Site

Array = NDArray[Any]


def measure_isolated(
    proto: ModelLike,
    plan: Plan,
    fitted: Sequence[Feeds],
    judged: Iterable[Feeds],
    *,
    rounded: bool,
    others: Sequence[Feeds] = (),
    crew: Crew | None = None,
    progress: Progress,
) -> dict[Site, float]:
    """Squared error at the outputs over their power, with only this weight quantized; activations stay float.

    plan: calibrated for `proto`, the prepared float model. rounded: each weight is rounded by the second moments of
    `fitted` and its bias corrected, as sequential rounding does it; else it is as the plan has it. judged: samples that
    `fitted` does not hold: with few samples a layer of many columns fits those it saw. others, crew: as of
    `round_sequentially`. The model is loaded once, with the weights as inputs.
    """
    proto = ensure_opset(proto, plan.opset)
    found = list_operators(GraphIndex(proto), plan)
    alone = plan
    if rounded:
        alone = round_sequentially(
            proto, plan, fitted, others=others, options=RoundingOptions(alone=True), crew=crew, progress=progress
        ).plan
    open_, places, usual = _open_constants(proto, found)
    session = Session(open_, optimize=False)
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


def _open_constants(proto: ModelLike, found: Sequence[Operator]) -> tuple[ModelLike, dict[Edge, str], dict[str, Array]]:
    """A copy whose weights and biases of these operators are read from inputs of the model, their names and values."""
    copy = onnx.ModelProto.FromString(bare_proto(proto).SerializeToString())
    nodes = {node.name: node for _, graph in walk_graphs(copy.graph) for node in graph.node}
    places: dict[Edge, str] = {}
    usual: dict[str, Array] = {}
    for one in found:
        constants = {Edge(one.node.name, 1, one.node.scope): one.weight}
        if one.bias_edge is not None:
            constants[one.bias_edge] = np.asarray(one.bias.reshape(one.bias_shape), np.float32)
        for edge, value in constants.items():
            node, name = nodes[edge.node], f"{edge.node}/in{edge.index}/given"
            places[edge], usual[name] = name, np.ascontiguousarray(value, np.float32)
            # An operator without a bias gets one of zeros.
            node.input.extend([""] * (edge.index + 1 - len(node.input)))
            node.input[edge.index] = name
            copy.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, value.shape))
    return rebuild(proto, copy), places, usual


def _list_changes(plan: Plan, readers: Sequence[Operator], places: Mapping[Edge, str]) -> dict[str, Array]:
    """The values of the inputs that these operators read, with the numbers of the plan."""
    sites = {site.site: site for site in plan.sites}
    biases = {bias.edge: bias.values for bias in plan.biases}
    found: dict[str, Array] = {}
    for one in readers:
        found[places[Edge(one.node.name, 1, one.node.scope)]] = dequantize_constant(sites[one.site.site], one.weight)
        if one.bias_edge is None:
            continue
        name, held = places[one.bias_edge], one.bias_site
        if one.bias_edge in biases:
            found[name] = np.asarray(biases[one.bias_edge].reshape(one.bias_shape), np.float32)
        elif held is not None and sites[held.site].values is not None:
            # Only integers that rounding chose: those of calibration are the model's own bias, rounded.
            found[name] = dequantize_constant(sites[held.site], one.bias).reshape(one.bias_shape)
    return found


def _measure_relative(
    samples: Sequence[Feeds], wanted: Sequence[Mapping[str, Any]], got: Iterable[Mapping[str, Any]]
) -> float:
    """Mean over float outputs of squared error over power, without padding."""
    errors = ModelErrors()
    for feeds, one, other in zip(samples, wanted, got, strict=True):
        # Of labels and indices a step is no smaller for a smaller error.
        floats = {name: v for name, v in one.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
        errors.update(feeds, floats, other)
    return errors.noise()
