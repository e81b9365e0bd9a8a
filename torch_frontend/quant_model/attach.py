"""Carry out a placement: quantizers become modules, graph calls and children of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx, nn

from onnxq.config import Config, QuantizerSpec
from onnxq.spec import QuantSpec
from torch_frontend.placement import Pair, Pairs, bind_sums, fill_slot
from torch_frontend.qmodules import WeightQuantized, swap_class
from torch_frontend.quant_model.follower import Follower
from torch_frontend.quantizers import Quantizer, create_quantizer
from torch_frontend.tracing import make_unique_path, replace_module

WEIGHT = "weight_quantizer"


def attach_quantizers(model: fx.GraphModule, placement: Pairs, config: Config) -> dict[str, str]:
    """Insert every quantizer of the placement. Returns site -> module path, activations in order, then weights."""
    holder = make_unique_path(model, "", "quantizers")
    made: dict[str, Quantizer] = {}
    paths: dict[str, str] = {}
    # A follower is made from its leader.
    leaders_first = sorted(placement.pairs, key=lambda pair: pair.leader != pair.site)
    for pair in leaders_first:
        if pair.weight is None or not pair.weight.module:
            made.setdefault(pair.site, make_quantizer(pair, config, made))
    _name_groups(placement, made)
    for pair in placement.pairs:
        if pair.weight is None:
            paths[pair.site] = _insert_quantizer(model, holder, pair, made[pair.site])
    parameters: dict[str, list[Pair]] = {}
    for pair in placement.pairs:
        if pair.weight is not None and not pair.weight.module:
            parameters.setdefault(pair.site, []).append(pair)
    for site, group in parameters.items():
        paths[site] = _insert_shared(model, holder, group, made[site])
    paths.update(
        _convert_layers(model, [p for p in placement.pairs if p.weight is not None and p.weight.module], config)
    )
    bind_sums(
        placement.pairs, made,
        lambda p: model.get_submodule(f"{p.weight.module}.{WEIGHT}" if p.weight and p.weight.module else paths[p.site]),
    )  # fmt: skip
    model.graph.lint()
    model.recompile()
    return paths


def make_quantizer(pair: Pair, config: Config, made: Mapping[str, Quantizer]) -> Quantizer:
    """The quantizer of a pair. made: site -> quantizer, in which a follower finds its leader."""
    if pair.leader != pair.site:
        return Follower(made[pair.leader], pair.site, contributes=pair.contributes)
    return _new_quantizer(pair, config)


def _new_quantizer(pair: Pair, config: Config) -> Quantizer:
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
    quantizer.group = ""  # type: ignore[assignment]
    quantizer.bound = pair.bound  # type: ignore[assignment]
    return quantizer


def _name_groups(placement: Pairs, made: Mapping[str, Quantizer]) -> None:
    """Name the group of sites that share a scale after their leader, as plans do."""
    shared = {pair.leader for pair in placement.pairs if pair.leader != pair.site}
    for pair in placement.pairs:
        if pair.leader in shared and pair.site in made:
            made[pair.site].group = pair.leader  # type: ignore[assignment]


def _add_quantizer(model: fx.GraphModule, holder: str, site: str, quantizer: Quantizer) -> str:
    path = make_unique_path(model, holder, site.replace(".", "_"))
    model.add_submodule(path, quantizer)
    return path


def _insert_quantizer(model: fx.GraphModule, holder: str, pair: Pair, quantizer: Quantizer) -> str:
    assert pair.value is not None
    path = _add_quantizer(model, holder, pair.site, quantizer)
    node = _insert_call(model, pair.value, path)
    # None: all readers, save the quantizer itself.
    if pair.readers is None:
        pair.value.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    else:
        for reader, slot in pair.readers:
            fill_slot(reader, slot, node)
    return path


def _insert_shared(model: fx.GraphModule, holder: str, group: list[Pair], quantizer: Quantizer) -> str:
    """Insert one quantizer and one node for a parameter that one or several calls read."""
    path = _add_quantizer(model, holder, group[0].site, quantizer)
    first = group[0].value
    assert first is not None
    node = _insert_call(model, first, path)
    for pair in group:
        for reader, slot in pair.readers or ():
            fill_slot(reader, slot, node)
    return path


def _insert_call(model: fx.GraphModule, value: fx.Node, path: str) -> fx.Node:
    at = value
    # fx needs all placeholders in front of the first call.
    if value.op == "placeholder":
        at = [node for node in model.graph.nodes if node.op == "placeholder"][-1]
    with model.graph.inserting_after(at):
        node = model.graph.call_module(path, (value,))
    stack = value.meta.get("nn_module_stack") or {}
    node.meta["nn_module_stack"] = {**stack, path: (path, Quantizer)}
    return node


def _convert_layers(model: fx.GraphModule, pairs: Iterable[Pair], config: Config) -> dict[str, str]:
    """Change the class of layers and give them their weight's quantizer; tied weights of one spec share it."""
    paths: dict[str, str] = {}
    layers: dict[int, nn.Module] = {}
    by_weight: dict[tuple[int, QuantSpec, QuantizerSpec], Quantizer] = {}
    for pair in pairs:
        assert pair.weight is not None
        if pair.site in paths:
            continue
        path = pair.weight.module
        old = model.get_submodule(path)
        if isinstance(old, WeightQuantized):  # the same layer under another name
            continue
        if id(old) not in layers:
            layers[id(old)] = swap_class(old)
        layer = layers[id(old)]
        replace_module(model, path, layer)
        if WEIGHT in layer._modules:
            continue
        # Tied weights are one Parameter in several layers.
        key = (id(layer._parameters["weight"]), pair.spec, pair.quantizer)
        if key not in by_weight:
            by_weight[key] = make_quantizer(pair, config, {})
            paths[pair.site] = f"{path}.{WEIGHT}"
        layer.add_module(WEIGHT, by_weight[key])
    return paths
