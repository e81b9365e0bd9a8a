"""Carry out a placement: quantizers become calls of a graph, children of layers, or hooks of untraced layers."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx, nn

from onnxq.config import Config
from onnxq.sites import Refusal
from torch_frontend.placement.graph import CallGraph, fill_slot
from torch_frontend.placement.pairs import Pair, Pairs, Product, plan_pairs
from torch_frontend.placement.rules import CallRequests
from torch_frontend.qmodules import WeightQuantized, copy_module_tree, swap_class
from torch_frontend.qmodules.layers import replace_modules
from torch_frontend.qmodules.registry import GROUPS, Registration, find_entry, find_layer
from torch_frontend.quantizers import Quantizer, create_quantizer
from torch_frontend.quantizers.base import Quantizers
from torch_frontend.quantizers.borrowed import Follower
from torch_frontend.tracing.leaves import CallsOutside
from torch_frontend.tracing.modules import Args, Inputs, Kwargs, make_unique_path, read_stack
from torch_frontend.tracing.names import name_input
from torch_frontend.tracing.signature import CHECKS
from torch_frontend.tracing.values import use_eval_mode

WEIGHT = "weight_quantizer"


def attach_quantizers(model: fx.GraphModule, placement: Pairs, config: Config) -> None:
    """Insert every quantizer of the placement."""
    holder = make_unique_path(model, "", "quantizers")
    calls = [pair for pair in placement.pairs if not pair.layer]
    quantizers = make_quantizers(calls, config)
    nodes: dict[str, fx.Node] = {}
    for pair in calls:
        # A parameter that several calls read has a pair for each of them, and one quantizer.
        if pair.site not in nodes:
            path = make_unique_path(model, holder, pair.site.replace(".", "_"))
            model.add_submodule(path, quantizers[pair.site])
            nodes[pair.site] = _insert_call(model, pair.value, path)
        node = nodes[pair.site]
        # None: all readers, save the quantizer itself, and checks: these come before anything is observed.
        if pair.readers is None:
            pair.value.replace_all_uses_with(
                node,
                delete_user_cb=lambda user, own=node: user is not own and user.target not in CHECKS,
            )
        for reader, slot in pair.readers or ():
            fill_slot(reader, slot, node)
    swap_layers(model, placement.pairs, config, quantizers)
    bind_sums(model, placement.pairs, quantizers)
    model.graph.lint()
    model.recompile()


def make_quantizers(pairs: Iterable[Pair], config: Config) -> dict[str, Quantizer]:
    """Site -> its quantizer."""
    quantizers = {}
    # A follower is made from its leader.
    for pair in sorted(pairs, key=lambda pair: pair.leader is not None):
        if pair.leader is not None:
            quantizers[pair.site] = Follower(
                quantizers[pair.leader], pair.site, contributes=pair.contributes
            )
        elif pair.site not in quantizers:
            quantizers[pair.site] = _make_quantizer(pair, config)
    return quantizers


def _make_quantizer(pair: Pair, config: Config) -> Quantizer:
    """The quantizer of a site with qparams of its own."""
    quantizer = create_quantizer(
        pair.quantizer.name,
        pair.spec,
        site=pair.site,
        role=pair.role,
        observer=pair.observer,
        options=dict(pair.quantizer.options),
        target=config.target,
    )
    quantizer.disabled_reason = pair.disabled
    quantizer.bound = pair.bound
    return quantizer


def _insert_call(model: fx.GraphModule, value: fx.Node, path: str) -> fx.Node:
    at = value
    # fx needs all placeholders in front of the first call.
    if value.op == "placeholder":
        at = model.graph.find_nodes(op="placeholder")[-1]
    while at.next.target in CHECKS:
        at = at.next
    with model.graph.inserting_after(at):
        node = model.graph.call_module(path, (value,))
    node.meta["nn_module_stack"] = {**read_stack(value), path: (path, Quantizer)}
    return node


def swap_layers(model: nn.Module, pairs: Iterable[Pair], config: Config, known: Quantizers) -> None:
    """Give layers their weight's quantizer and change their class.

    known: quantizers of weights that calls outside of layers read, by site; layers of these weights share them.
    """
    layers = {}
    shared = {}
    for pair in pairs:
        # A layer that is called twice has two pairs.
        if not pair.layer or (old := model.get_submodule(pair.layer)) in layers:
            continue
        layers[old] = layer = swap_class(old)
        # Tied weights are one Parameter in several layers; with one spec they share a quantizer.
        key = (layer._parameters["weight"], pair.spec, pair.quantizer)
        if key not in shared:
            quantizer = known.get(pair.site)
            fits = quantizer is not None and quantizer.spec == pair.spec
            shared[key] = quantizer if quantizer and fits else _make_quantizer(pair, config)
        layer.add_module(WEIGHT, shared[key])
    replace_modules(model, layers)


def bind_sums(model: nn.Module, pairs: Iterable[Pair], quantizers: Quantizers) -> None:
    """Let the quantizers of weights keep the sums of the target's kernels, while those of the data are on.

    quantizers: those that are no children of layers.
    """
    for pair in pairs:
        if pair.sums is not None and pair.sums.data in quantizers:
            path = f"{pair.layer}.{WEIGHT}"
            weight = model.get_submodule(path) if pair.layer else quantizers[pair.site]
            weight.bind_sums(pair.sums.order, quantizers[pair.sums.data])


INPUTS = "input_quantizers"
# Modules that a forward may call by hand in place of functions.
_BY_HAND = {"add": "Add", "mul": "Mul", "matmul": "MatMul", "cat": "Cat"}


def quantize_inputs(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """Forward pre-hook: quantize the module's data arguments by its `input_quantizers`."""
    values = list(args)
    named = dict(kwargs)
    for name, quantizer in module._modules[INPUTS].named_children():  # type: ignore[union-attr]
        # <parameter>_<position>, by `_add_input_quantizers`; parameters may hold underscores, so the last one counts.
        param, _, position = name.rpartition("_")
        k = int(position)
        if k < len(values):
            values[k] = _quantize_value(quantizer, values[k])
        elif param in named:
            named[param] = _quantize_value(quantizer, named[param])
    return tuple(values), named


def _quantize_value(quantizer: nn.Module, value: Any) -> Any:
    # Lists are the tensors of a cat or stack.
    if isinstance(value, (list, tuple)):
        return [_quantize_value(quantizer, item) for item in value]
    return quantizer(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def convert_layers(
    model: nn.Module, requests: CallRequests, graph: CallGraph, prefix: str = ""
) -> tuple[nn.Module, Pairs]:
    """(a copy of the module tree with the same tensors, with quantizers where the planner places them; the placement).

    graph: its layers. prefix: the module's own qualified name, with which sites begin. Activation sites are inputs of
    layers (`<path>.in`), since their producers are unknown; a layer that is called twice has one.
    """
    placed = plan_pairs(graph, requests, sized=False)
    converted = copy_module_tree(model)
    inputs = make_quantizers(
        (pair for pair in placed.pairs if pair.weight is None), requests.config
    )
    # By the classes of before: quantized classes are not registered.
    entries = {
        path: find_layer(module) for path, module in converted.named_modules(remove_duplicate=False)
    }
    swap_layers(converted, placed.pairs, requests.config, {})
    for path, entry in entries.items():
        if path and entry is not None:
            full = f"{prefix}.{path}" if prefix else path
            _add_input_quantizers(converted.get_submodule(path), entry, full, inputs)
    bind_sums(converted, placed.pairs, inputs)
    return converted, placed


def _add_input_quantizers(
    module: nn.Module, entry: Registration, path: str, quantizers: Quantizers
) -> None:
    """Give a layer the quantizers of its data arguments."""
    children = nn.Module()
    for k, param in enumerate(entry.data):
        site = name_input(path, k)
        if site in quantizers:
            children.add_module(f"{param}_{entry.params.index(param)}", quantizers[site])
    if children._modules:
        module.add_module(INPUTS, children)
        module.register_forward_pre_hook(quantize_inputs, with_kwargs=True)


def list_unreached(model: nn.Module, inputs: Inputs) -> list[Product]:
    """Calls of functions in a forward that cannot be traced, which stay float; one run of it shows them."""
    calls: dict[tuple[str, str], None] = {}

    def record(path: str, function: Any, *_: Any) -> None:
        name = getattr(function, "__name__", "")
        entry = find_entry(function) or find_entry(name)
        op = name if entry is None else entry.op.name
        if op in GROUPS["product_functions" if entry is None else "combining"]:
            calls[path, op] = None

    # Calls inside a known module belong to its operator.
    def is_known(module: nn.Module, _: str) -> bool:
        return find_layer(module) is not None or isinstance(module, (WeightQuantized, Quantizer))

    with use_eval_mode(model), CallsOutside(model, is_known, record):
        inputs.run_model(model)
    products = []
    for path, op in calls:
        by_hand = _BY_HAND.get(op)
        fix = (
            f"call torch_frontend.qmodules.{by_hand}() there"
            if by_hand
            else "use the layer of torch.nn there"
        )
        name = f"{path}.{op}" if path else op
        reason = "a function call in a forward that cannot be traced: it stays float"
        products.append(Product(name, op, reason=Refusal(name, reason, fix, "tracing", "R108")))
    return products
