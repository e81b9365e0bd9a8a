"""The graph with its quantizers as a Mermaid diagram."""

from torch import fx, nn

from torch_frontend.qmodules import Call
from torch_frontend.quantizers import Quantizer
from torch_frontend.tracing.modules import find_module


def draw_mermaid(model: nn.Module) -> str:
    """`graph TD` text: layers as boxes; quantizers as rounded boxes with bits and scheme, dashed if off for good."""
    if not isinstance(model, fx.GraphModule):
        return _draw_list(model)
    # Positions as ids: names hold characters that Mermaid does not take in ids.
    ids = {node: f"n{k}" for k, node in enumerate(model.graph.nodes)}
    lines = ["graph TD", *(f"  {key}{_draw_box(model, node)}" for node, key in ids.items())]
    off = []
    for node in model.graph.nodes:
        for source in node.all_input_nodes:
            lines.append(f"  {ids[source]} --> {ids[node]}")
        module = find_module(model, node)
        if isinstance(module, Quantizer) and module.disabled_reason is not None:
            off.append(ids[node])
    if off:
        lines += ["  classDef off stroke-dasharray: 4 4", f"  class {','.join(off)} off"]
    return "\n".join(lines) + "\n"


def _draw_box(model: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "placeholder":
        return f'[/"{_escape_text(node.target)}"/]'
    if node.op == "output":
        return '[/"output"/]'
    module = find_module(model, node)
    if module is None:
        target = (
            node.target
            if isinstance(node.target, str)
            else getattr(node.target, "__name__", node.name)
        )
        return f'["{_escape_text(target)}"]'
    if isinstance(module, Quantizer):
        off = "" if module.disabled_reason is None else f"<br/>off: {module.disabled_reason}"
        return f'("{_escape_text(f"{module.site} {_describe_spec(module)}{off}")}")'
    return _draw_layer(str(node.target), module)


def _draw_layer(name: str, module: nn.Module) -> str:
    kind = "" if isinstance(module, Call) else f"<br/>{type(module).__name__}"
    inner = module._modules.get("weight_quantizer")
    weight = f"<br/>weight {_describe_spec(inner)}" if isinstance(inner, Quantizer) else ""
    return f'["{_escape_text(name)}{kind}{weight}"]'


def _describe_spec(module: Quantizer) -> str:
    return f"{module.spec.kind} {module.spec.scheme}"


def _escape_text(value: object) -> str:
    # Labels stand in double quotes.
    return str(value).replace('"', "'")


def _draw_list(model: nn.Module) -> str:
    """The diagram of a model without a graph: its layers with quantizers, without edges."""
    lines = [
        f"  n{k}{_draw_layer(name, module)}"
        for k, (name, module) in enumerate(model.named_modules())
        if "weight_quantizer" in module._modules
    ]
    return "\n".join(["graph TD", *lines]) + "\n"
