"""Build a module with quantizers from a float module: trace, simplify, name, fold, place, attach."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from onnxq.backends import find_target
from onnxq.config import Config
from onnxq.errors import ModelError
from onnxq.sites import LeftFloat, Refusal, Refusals, split_unquantized
from torch_frontend.placement.lower import lower_layers, lower_model
from torch_frontend.placement.pairs import Decision, Product, plan_pairs
from torch_frontend.placement.rules import CallRequests, check_policies
from torch_frontend.qmodules import multiply_weight_norms
from torch_frontend.qmodules.registry import GROUPS
from torch_frontend.quant_model import attach
from torch_frontend.quantizers import quantizers_of
from torch_frontend.tracing.attention import take_apart
from torch_frontend.tracing.batch_norms import fold_batch_norms, replace_batch_norms
from torch_frontend.tracing.capture import capture_model, take_graph
from torch_frontend.tracing.modules import Inputs, as_inputs
from torch_frontend.tracing.names import name_calls
from torch_frontend.tracing.signature import find_given_arguments
from torch_frontend.tracing.simplify import simplify_graph
from torch_frontend.tracing.tracer import GraphOrigin, Traced, Untraceable, trace_model
from torch_frontend.tracing.values import compare_outputs, keep_buffers, record_shapes


@dataclass(frozen=True)
class ConvertedModel:
    """A module with quantizers, and what became of the rest."""

    model: nn.Module
    refusals: Refusals
    left_float: tuple[LeftFloat, ...]
    decisions: tuple[Decision, ...]
    products: tuple[Product, ...]
    origin: GraphOrigin = GraphOrigin.LAYERS


@dataclass(frozen=True)
class _Network:
    """A traced network, simplified. norms: functions of batch norms that stayed functions, and why."""

    traced: Traced
    model: fx.GraphModule
    norms: tuple[tuple[str, str], ...]


def build_quantized(model: nn.Module, config: Config, example: Any = None) -> ConvertedModel:
    """Convert a module. Its own modules do not change; Parameters are shared, save those of folded layers."""
    check_policies(config)
    inputs = None if example is None else as_inputs(example)
    if isinstance(model, fx.GraphModule):
        return _build_traced(
            _simplify_traced(take_graph(model, config.torch.skip_trace)), config, inputs
        )
    arguments = None if inputs is None else find_given_arguments(model, inputs)
    model, normed = multiply_weight_norms(model)
    # A trace runs the forward, which may write into buffers.
    with keep_buffers(model):
        network = _trace_network(model, config.torch.skip_trace, arguments, inputs)
    if isinstance(network, Untraceable):
        built = _build_untraced(model, config, inputs, network.reason)
    else:
        built = _build_traced(network, config, inputs)
    plain = "its weight norm is multiplied out: it trains the plain weight"
    decisions = [Decision(path, plain, "weight-norm") for path in normed]
    return replace(built, decisions=(*decisions, *built.decisions))


def _trace_network(
    model: nn.Module, skip: Sequence[str], arguments: Any, inputs: Inputs | None
) -> _Network | Untraceable:
    """The network as symbols or, where they cannot follow, a run on the inputs find it."""

    def simplify_trace(traced: Traced | Untraceable) -> _Network | Untraceable:
        if isinstance(traced, Untraceable):
            return traced
        network = _simplify_traced(traced)
        # A trace misses writes into views, and takes random numbers for constants; a capture takes what held for the
        # example for always so. On the example both have to be right.
        why = None if inputs is None else compare_outputs(model, network.model, inputs)
        return network if why is None else Untraceable(why)

    symbolic = simplify_trace(trace_model(model, skip, arguments))
    failed = isinstance(symbolic, Untraceable)
    # Where symbols see only an opaque part, a run may see through it.
    if inputs is None or not (failed or symbolic.traced.opaque):
        return symbolic
    captured = simplify_trace(capture_model(model, skip, inputs))
    if isinstance(captured, Untraceable) and failed:
        return Untraceable(f"{symbolic.reason}; nor by torch.export: {captured.reason}")
    return symbolic if isinstance(captured, Untraceable) else captured


def check_float_module(model: nn.Module) -> None:
    """Raise ModelError for what is no module, has no forward in Python or hides it, or is quantized already."""
    if isinstance(model, torch.jit.ScriptModule):
        cause = "is TorchScript, which has no modules to quantize"
        fix = "give the module that it was made from"
    elif hasattr(model, "_orig_mod"):
        cause = "is compiled"
        fix = "give the module itself (`model._orig_mod`), and compile the QuantModel"
    elif isinstance(model, torch.export.ExportedProgram):
        cause = "is an exported program"
        fix = "give the module that was exported, or `program.module()`"
    elif not isinstance(model, nn.Module):
        cause = "is no module"
        fix = "give an instance of torch.nn.Module"
    elif quantizers_of(model):
        cause = "has quantizers already"
        fix = "give the float module; a QuantModel is calibrated again after prepare_calibration()"
    else:
        return
    raise ModelError(type(model).__name__, cause, fix, code="Q123")


def _simplify_traced(traced: Traced) -> _Network:
    root = traced.root
    for node in traced.graph.nodes:
        node.type = None  # annotations may be strings, which a pickled graph cannot import
    model = fx.GraphModule(root, traced.graph, type(root).__name__)
    # GraphModule creates the parents of the modules it copies, in train mode; layers keep theirs.
    for module in set(model.modules()).difference(root.modules()):
        module.training = root.training
    norms = replace_batch_norms(model, root)
    simplify_graph(model)
    return _Network(traced, model, tuple(norms))


def _build_traced(network: _Network, config: Config, inputs: Inputs | None) -> ConvertedModel:
    traced = network.traced
    model = network.model
    # The order matters: calls are named before anything is placed, and shapes are read before batch norms disappear.
    if config.attention == "quantized" and find_target(config.target).attention_rules:
        take_apart(model)
    name_calls(model, traced.skipped)
    if inputs is not None:
        record_shapes(model, inputs)
    decisions = [
        Decision(name, "keeps its default: it was traced with it", "arguments")
        for name in traced.fixed
    ]
    shaped = "its control flow on shapes and types goes the way it went for example_inputs"
    decisions += [
        Decision(path or type(traced.root).__name__, shaped, "shapes") for path in traced.shaped
    ]
    decisions += [Decision(path, "left float as asked", "skip-trace") for path in traced.skipped]
    decisions += [Decision(path, reason, "batch-norm") for path, reason in network.norms]
    if config.torch.fuse_bn:
        decisions += [
            Decision(path, outcome, "fuse-bn") for path, outcome in fold_batch_norms(model)
        ]
    graph = lower_model(model, config, traced.skipped)
    requests = CallRequests(config, graph)
    # Parts that could not be traced are converted layer by layer, under their own names.
    layers = {
        r.subject: lower_layers(model.get_submodule(r.subject), config, r.subject)
        for r in traced.opaque
    }
    requests.check_used(*layers.values())
    placed = plan_pairs(graph, requests, sized=inputs is not None)
    attach.attach_quantizers(model, placed, config)
    reasons = [*traced.refusals, *traced.opaque, *placed.reasons]
    products = placed.products
    for path, inside_graph in layers.items():
        converted, inside = attach.convert_layers(
            model.get_submodule(path), requests, inside_graph, path
        )
        model.set_submodule(path, converted)
        reasons += inside.reasons
        products += inside.products
    model.recompile()
    refusals, left_float = split_unquantized(reasons)
    decisions += placed.decisions
    return ConvertedModel(
        model, refusals, left_float, tuple(decisions), tuple(products), traced.origin
    )


def _build_untraced(
    model: nn.Module, config: Config, inputs: Inputs | None, reason: str
) -> ConvertedModel:
    """Convert layer by layer; calls outside of layers are listed as refusals, if there is an example."""
    graph = lower_layers(model, config)
    requests = CallRequests(config, graph)
    requests.check_used()
    converted, placed = attach.convert_layers(model, requests, graph)
    cause = f"its forward cannot be traced ({reason}): its layers are quantized one by one, not what connects them"
    fix = "take control flow on values and shapes out of its forward"
    if inputs is None:
        fix += ", or give example_inputs to see which calls were not reached"
    root = Refusal(type(model).__name__, cause, fix, "tracing", "R108")
    unreached = [] if inputs is None else attach.list_unreached(converted, inputs)
    refusals, left_float = split_unquantized(
        [root, *placed.reasons, *(product.reason for product in unreached if product.reason)]
    )
    multiplying = GROUPS["products"] | GROUPS["product_functions"]
    products = (*placed.products, *(product for product in unreached if product.op in multiplying))
    return ConvertedModel(converted, refusals, left_float, (), products)
