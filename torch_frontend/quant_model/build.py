"""A float module in, a module with quantizers out: trace, simplify, convert, fold, place, attach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from onnxq.config import Config
from onnxq.errors import ModelError
from onnxq.sites import Refusal
from torch_frontend.quant_model.attach import attach
from torch_frontend.quant_model.draft import Decision, draft
from torch_frontend.quant_model.units import asker_of, check_policies, find_units
from torch_frontend.quant_model.wishes import Wishes
from torch_frontend.tracing import Untraceable, look, name_calls, named, simplify, site_of, trace


@dataclass(frozen=True)
class Built:
    """A module with quantizers. paths: site -> module path of its quantizer."""

    model: nn.Module
    paths: dict[str, str]
    refusals: tuple[Refusal, ...]
    decisions: tuple[Decision, ...]


def build(model: nn.Module, config: Config, example: Any = None) -> Built:
    """Convert a module; its own modules are not changed, their Parameters are shared."""
    check_policies(config)
    traced = trace(model, config.torch.skip_trace)
    if isinstance(traced, Untraceable):
        raise ModelError("model", traced.reason)
    graph_model = _graph_module(traced.root, traced.graph)
    simplify(graph_model)
    name_calls(graph_model)
    if example is not None:
        look(graph_model, example)
    found = find_units(graph_model, config)
    wishes = Wishes(config)
    plan = draft(graph_model.graph, found, config, wishes)
    names = [name for node in graph_model.graph.nodes if (name := named(node)) is not None]
    sites = [site for node in graph_model.graph.nodes if (site := site_of(node)) is not None]
    wishes.check_used([asker_of(name) for name in names], [*sites, *(p.site for p in plan.pairs)])
    paths = attach(graph_model, plan, config)
    refusals = (*traced.opaque, *plan.refusals)
    return Built(graph_model, paths, refusals, tuple(plan.decisions))


def _graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The traced modules in a tree of their own. Folders get the mode of the model, layers keep theirs."""
    model = fx.GraphModule(root, graph, type(root).__name__)
    kept = {id(module) for module in root.modules()}
    for module in model.modules():
        if id(module) not in kept:
            module.training = root.training
    return model
