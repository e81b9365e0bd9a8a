"""Errors at the outputs by each quantized weight alone in the float model, for `weight_bits.spend_budget`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import onnx

from onnxq.arrays import Array
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.selections import find_selections
from onnxq.graph import GraphIndex, ModelLike, ensure_opset
from onnxq.graph.light import bare_proto, rebuild
from onnxq.graph.scopes import walk_graphs
from onnxq.passes.rounding.operators import Operator, dequantize_constant, list_operators
from onnxq.passes.rounding.sequential import RoundingOptions, round_sequentially
from onnxq.plan import Plan
from onnxq.progress import Progress, count_items
from onnxq.runtime import Feeds, Session
from onnxq.runtime.crew import Crew, SharedFeeds, SharedModel, hash_run, open_model, read_feeds
from onnxq.sites import Edge, Site
from onnxq.workers import WorkPiece


@dataclass(frozen=True)
class IsolatedTask:
    """One weight to be measured. model: with weights as inputs. usual: their float values. changes: others of some."""

    model: SharedModel
    usual: SharedFeeds
    samples: tuple[SharedFeeds, ...]
    changes: SharedFeeds


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
    `fitted` does not hold: with few samples a layer of many columns fits those it saw. others: as of
    `round_sequentially`. The model is loaded once, with the weights as inputs. crew: rounds and
    measures the weights; the result does not depend on it.
    """
    proto = ensure_opset(proto, plan.opset)
    operators = list_operators(GraphIndex(proto), plan)
    alone = plan
    if rounded:
        alone = round_sequentially(
            proto, plan, fitted, others=others, options=RoundingOptions(alone=True), crew=crew, progress=progress
        ).plan
    open_, places, usual = _open_constants(proto, operators)
    samples = [dict(sample) for sample in judged]
    by_site: dict[Site, list[Operator]] = {}
    for op in operators:
        by_site.setdefault(op.site.site, []).append(op)
    # One by one: together they are as large as the model.
    changes = (_list_changes(alone, readers, places) for readers in by_site.values())
    with progress("measuring weights", len(by_site)) as task:
        if crew is None or crew.plain:
            trial = _IsolatedTrial(open_, usual, samples)
            errors: Iterator[float] = map(trial.measure_error, count_items(changes, task))
        else:
            board = crew.share_model(open_), crew.share_feeds(usual), tuple(map(crew.share_feeds, samples))
            tasks = [IsolatedTask(*board, crew.share_feeds(values)) for values in changes]
            pieces = [
                WorkPiece(f"error of {site}", one, _hash_task(one)) for site, one in zip(by_site, tasks, strict=True)
            ]
            errors = crew.map(measure_weight, pieces, on_done=lambda _: task.advance())
        return dict(zip(by_site, errors, strict=True))


class _IsolatedTrial:
    """A model with weights as inputs, and its outputs with their usual values."""

    def __init__(self, model: ModelLike, usual: Feeds, samples: Sequence[Feeds]) -> None:
        selections = find_selections(model)
        self.usual = usual
        self.session = Session(selections.expose_choices(model), optimize=False)
        self.wanted = [self.session.run({**sample, **usual}) for sample in samples]
        self.samples = [selections.add_choices(*pair) for pair in zip(samples, self.wanted, strict=True)]
        if selections.nodes:
            self.session = Session(selections.take_choices(model), optimize=False)

    def measure_error(self, changes: Feeds) -> float:
        """The error with these weights changed."""
        got = (self.session.run({**sample, **self.usual, **changes}) for sample in self.samples)
        return _measure_relative(self.samples, self.wanted, got)


def measure_weight(task: IsolatedTask) -> float:
    """The error of one weight."""
    return _open_trial(task.model, task.usual, task.samples).measure_error(read_feeds(task.changes))


@lru_cache(maxsize=1)
def _open_trial(model: SharedModel, usual: SharedFeeds, samples: tuple[SharedFeeds, ...]) -> _IsolatedTrial:
    return _IsolatedTrial(open_model(model), read_feeds(usual), [read_feeds(sample) for sample in samples])


def _hash_task(task: IsolatedTask) -> str:
    shared: tuple[SharedModel | SharedFeeds, ...] = (task.model, task.usual, *task.samples, task.changes)
    return hash_run("weight alone", *(str(part.digest) for part in shared))


def _open_constants(
    proto: ModelLike, operators: Sequence[Operator]
) -> tuple[ModelLike, dict[Edge, str], dict[str, Array]]:
    """A copy whose weights and biases of these operators are read from inputs of the model, their names and values."""
    copy = onnx.ModelProto.FromString(bare_proto(proto).SerializeToString())
    nodes = {node.name: node for _, graph in walk_graphs(copy.graph) for node in graph.node}
    places: dict[Edge, str] = {}
    usual: dict[str, Array] = {}
    for op in operators:
        constants = {Edge(op.node.name, 1, op.node.scope): op.weight}
        if op.bias_edge is not None:
            constants[op.bias_edge] = np.asarray(op.bias.reshape(op.bias_shape), np.float32)
        for edge, value in constants.items():
            node, name = nodes[edge.node], f"{edge.node}/in{edge.index}/given"
            places[edge], usual[name] = name, np.ascontiguousarray(value, np.float32)
            # An operator without a bias gets one of zeros.
            node.input.extend([""] * (edge.index + 1 - len(node.input)))
            node.input[edge.index] = name
            copy.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, value.shape))
    return rebuild(proto, copy), places, usual


def _list_changes(plan: Plan, readers: Sequence[Operator], places: Mapping[Edge, str]) -> dict[str, Array]:
    """The values of the inputs that these operators read, as the plan rounds them."""
    sites = {site.site: site for site in plan.sites}
    biases = {bias.edge: bias.values for bias in plan.biases}
    changes: dict[str, Array] = {}
    for op in readers:
        changes[places[Edge(op.node.name, 1, op.node.scope)]] = dequantize_constant(sites[op.site.site], op.weight)
        if op.bias_edge is None:
            continue
        name, site = places[op.bias_edge], op.bias_site
        if op.bias_edge in biases:
            changes[name] = np.asarray(biases[op.bias_edge].reshape(op.bias_shape), np.float32)
        elif site is not None and sites[site.site].values is not None:
            # Only integers that rounding chose: those of calibration are the model's own bias, rounded.
            changes[name] = dequantize_constant(sites[site.site], op.bias).reshape(op.bias_shape)
    return changes


def _measure_relative(
    samples: Sequence[Feeds], wanted: Sequence[Mapping[str, Any]], got: Iterable[Mapping[str, Any]]
) -> float:
    """Mean over float outputs of squared error over power, without padding."""
    errors = ModelErrors()
    for feeds, exact, outputs in zip(samples, wanted, got, strict=True):
        # Of labels and indices a step is no smaller for a smaller error.
        floats = {name: v for name, v in exact.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
        errors.update(feeds, floats, outputs)
    return errors.noise()
