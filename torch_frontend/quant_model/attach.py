"""Carry out a placement: quantizers become modules, graph calls and children of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx, nn

from onnxq.config import Config
from torch_frontend.placement.pairs import Pair, Pairs
from torch_frontend.placement.slots import fill_slot
from torch_frontend.qmodules import swap_class
from torch_frontend.quant_model.follower import Follower
from torch_frontend.quantizers import Quantizer, create_quantizer
from torch_frontend.tracing.arguments import CHECKS
from torch_frontend.tracing.names import make_unique_path

WEIGHT = "weight_quantizer"


def attach_quantizers(model: fx.GraphModule, placement: Pairs, config: Config) -> dict[str, str]:
    """Insert every quantizer of the placement. Returns site -> module path, activations in order, then weights."""
    holder = make_unique_path(model, "", "quantizers")
    calls = [pair for pair in placement.pairs if pair.weight is None or not pair.weight.module]
    made = make_quantizers(calls, config)
    paths: dict[str, str] = {}
    nodes: dict[str, fx.Node] = {}
    for pair in calls:
        assert pair.value is not None
        # A parameter that several calls read has a pair for each of them, and one quantizer.
        if pair.site not in paths:
            paths[pair.site] = path = make_unique_path(model, holder, pair.site.replace(".", "_"))
            model.add_submodule(path, made[pair.site])
            nodes[pair.site] = _insert_call(model, pair.value, path)
        node = nodes[pair.site]
        # None: all readers, save the quantizer itself, and checks: these come before anything is observed.
        if pair.readers is None:
            pair.value.replace_all_uses_with(
                node, delete_user_cb=lambda user, own=node: user is not own and user.target not in CHECKS
            )
        for reader, slot in pair.readers or ():
            fill_slot(reader, slot, node)
    paths |= swap_layers(model, placement.pairs, config, made)
    bind_sums(model, placement.pairs, made, paths)
    model.graph.lint()
    model.recompile()
    return paths


def make_quantizers(pairs: Iterable[Pair], config: Config) -> dict[str, Quantizer]:
    """Site -> its quantizer."""
    made: dict[str, Quantizer] = {}
    # A follower is made from its leader.
    for pair in sorted(pairs, key=lambda pair: pair.leader is not None):
        if pair.leader is not None:
            made[pair.site] = Follower(made[pair.leader], pair.site, contributes=pair.contributes)
        elif pair.site not in made:
            made[pair.site] = _make_quantizer(pair, config)
    return made


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
    quantizer.disabled_reason, quantizer.bound = pair.disabled, pair.bound
    return quantizer


def _insert_call(model: fx.GraphModule, value: fx.Node, path: str) -> fx.Node:
    at = value
    # fx needs all placeholders in front of the first call.
    if value.op == "placeholder":
        at = [node for node in model.graph.nodes if node.op == "placeholder"][-1]
    while at.next.target in CHECKS:
        at = at.next
    with model.graph.inserting_after(at):
        node = model.graph.call_module(path, (value,))
    stack = value.meta.get("nn_module_stack") or {}
    node.meta["nn_module_stack"] = {**stack, path: (path, Quantizer)}
    return node


def swap_layers(
    model: nn.Module, pairs: Iterable[Pair], config: Config, made: Mapping[str, Quantizer] | None = None
) -> dict[str, str]:
    """Give layers their weight's quantizer and change their class. Returns site -> module path of a new quantizer.

    made: quantizers of weights that calls outside of layers read, by site; layers of these weights share them.
    """
    paths: dict[str, str] = {}
    layers: dict[int, nn.Module] = {}
    shared: dict[object, Quantizer] = {}
    for pair in pairs:
        path = "" if pair.weight is None else pair.weight.module
        # A layer that is called twice has two pairs.
        if not path or id(model.get_submodule(path)) in layers:
            continue
        old = model.get_submodule(path)
        layers[id(old)] = layer = swap_class(old)
        # Tied weights are one Parameter in several layers; with one spec they share a quantizer.
        key = (id(layer._parameters["weight"]), pair.spec, pair.quantizer)
        if key not in shared:
            known = (made or {}).get(pair.site)
            if known is not None and known.spec == pair.spec:
                shared[key] = known
            else:
                shared[key], paths[pair.site] = _make_quantizer(pair, config), f"{path}.{WEIGHT}"
        layer.add_module(WEIGHT, shared[key])
    # One module under two names stays one module.
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in layers:
            model.set_submodule(path, layers[id(module)])
    return paths


def bind_sums(
    model: nn.Module, pairs: Iterable[Pair], activations: Mapping[str, Quantizer], paths: Mapping[str, str]
) -> None:
    """Let the quantizers of weights keep the sums of the target's kernels, while those of the data are on."""
    for pair in pairs:
        if pair.sums is not None and pair.sums.data in activations:
            # Layers with tied weights share a quantizer, whose path is that in the first of them.
            path = f"{pair.weight.module}.{WEIGHT}" if pair.weight and pair.weight.module else paths[pair.site]
            weight = model.get_submodule(path)
            assert isinstance(weight, Quantizer)
            weight.bind_sums(pair.sums.order, activations[pair.sums.data])
