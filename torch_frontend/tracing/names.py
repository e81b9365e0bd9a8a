"""Names of graph values: the path of the module that makes them, never a position."""

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from torch_frontend.qmodules import UNKNOWN, Call, Registration, find_entry
from torch_frontend.tracing.modules import call_module, find_module, make_unique_path, read_stack
from torch_frontend.tracing.signature import CHECKS, PackOutputs

# Keys of a node's meta.
_NAMED = "onnxq_name"
_PLAIN = "onnxq_plain"
_CONSTANT = "onnxq_constant"
_SITE = "onnxq_site"

# Attributes and methods of tensors whose values are no tensors.
_FACTS = ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout")
_FACT_METHODS = (
    "size",
    "dim",
    "numel",
    "item",
    "stride",
    "ndimension",
    "is_floating_point",
    "tolist",
    "__len__",
)
# Operators with several results: an index of their result selects one, it does not slice a tensor.
_SEVERAL = ("split", "lstm", "gru", "rnn", "multihead_attention")


@dataclass(frozen=True, eq=False)
class CallName:
    """One call. path: the module's qualified name. call: number of earlier calls. entry: its registration."""

    path: str
    call: int = 0
    entry: Registration = UNKNOWN

    @property
    def name(self) -> str:
        """The path, with `@call` from the second call on."""
        return f"{self.path}@{self.call}" if self.call else self.path


def read_name(node: fx.Node) -> CallName | None:
    """The name of a node's call; None for inputs, parameters, sizes and elements of tuples."""
    return node.meta.get(_NAMED)


def read_op(node: fx.Node) -> str:
    """Name of the operator that a node calls; "" where nothing is known of it."""
    name = read_name(node)
    return "" if name is None else name.entry.op.name


def is_plain(node: fx.Node) -> bool:
    """True for sizes, dtypes and values computed from them, which are no tensors."""
    return bool(node.meta.get(_PLAIN))


def list_readers(node: fx.Node) -> list[fx.Node]:
    """Nodes that read a node's values, and not its size or type alone, as a check of its rank does."""
    return [user for user in node.users if not is_plain(user)]


def is_constant(node: fx.Node) -> bool:
    """True for parameters, buffers and values computed from them alone."""
    return bool(node.meta.get(_CONSTANT))


def site_of(node: fx.Node) -> str | None:
    """The site of a node's tensor; None for values without a name.

    `<path>[@call].out`; `….out1` for the second of several tensors; `input:<name>`; a parameter's own name.
    """
    if node.op == "placeholder":
        return str(node.meta.get(_SITE, f"input:{node.target}"))
    if node.op == "get_attr":
        return str(node.target)
    name = read_name(node)
    if name is not None:
        return f"{name.name}.out"
    element = element_of(node)
    if element is None:
        return None
    source, index = element
    above = site_of(source)
    return None if above is None or not isinstance(index, int) else f"{above}{index}"


def element_of(node: fx.Node) -> tuple[fx.Node, Any] | None:
    """(source, index) of a node that indexes another's result; None for other nodes."""
    if (
        node.op == "call_function"
        and node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
    ):
        return node.args[0], node.args[1]
    return None


def scope_of(node: fx.Node) -> str:
    """Qualified name of the module whose forward makes the call; "" for the model itself."""
    paths = [path for path, _ in read_stack(node).values()]
    return str(paths[-1]) if paths else ""


def find_constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of parameters, buffers, and values computed from them alone."""
    constants = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "get_attr" or (sources and constants.issuperset(sources)):
            constants.add(node)
    return constants


def name_calls(model: fx.GraphModule, skipped: Collection[str]) -> None:
    """Turn known function and method calls into named modules of `model`, and name every call.

    A call becomes a `Call` in the scope that makes it, `layer1.0.add`; the next one there is `layer1.0.add_1`. A call
    that is not in the registry stays a function in the graph, with the name it would have had. skipped: paths of
    modules that are treated as unknown.
    """
    calls: Counter[str] = Counter()
    taken: set[str] = set()
    constants = find_constants(model.graph)
    for node in model.graph.nodes:
        node.meta[_CONSTANT] = node in constants
        # Nodes come in topological order, so sources are settled before their readers.
        if _computes_no_tensor(node) or isinstance(find_module(model, node), PackOutputs):
            node.meta[_PLAIN] = True
        elif node.op == "call_module":
            path = str(node.target)
            known = None if path in skipped else find_entry(type(model.get_submodule(path)))
            node.meta[_NAMED] = CallName(path, calls[path], known or UNKNOWN)
            calls[path] += 1
        elif node.op in ("call_function", "call_method") and not _is_element(node):
            _name_call(model, node, taken)


def add_layer_call(graph: fx.Graph, target: str, name: CallName) -> None:
    """Append the call of a layer on inputs of its own. target: its path in the module of the graph."""
    values = {}
    for k, param in enumerate(name.entry.data):
        values[param] = value = graph.placeholder("value")
        value.meta[_SITE] = name_input(name.path, k)
    graph.call_module(target, (), values).meta[_NAMED] = name


def name_input(path: str, k: int) -> str:
    """The site of data argument k of a layer alone."""
    return f"{path}.in{k or ''}"


def _computes_no_tensor(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _FACT_METHODS
    if node.op != "call_function":
        return False
    # Checks give nothing that is read.
    if node.target in (*CHECKS, torch._assert):
        return True
    if node.target is getattr:
        return node.args[1] in _FACTS
    sources = node.all_input_nodes
    # Python's own arithmetic on sizes gives sizes.
    name = getattr(node.target, "__name__", "")
    place = getattr(node.target, "__module__", "")
    plainly = place in ("builtins", "_operator", "operator", "math") or (
        place == "torch" and name.startswith("sym_")
    )
    return plainly and bool(sources) and all(map(is_plain, sources))


def _is_element(node: fx.Node) -> bool:
    """True for an element of several results, as opposed to a slice of a tensor."""
    element = element_of(node)
    if element is None:
        return node.target is getattr
    source, index = element
    # Calls that nothing is known of may return tuples.
    several = read_name(source) is not None and read_op(source) in ("", "float", *_SEVERAL)
    return several and isinstance(index, int)


def _name_call(model: fx.GraphModule, node: fx.Node, taken: set[str]) -> None:
    known = find_entry(node.target)
    scope = scope_of(node)
    base = (
        str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "call")
    )
    base = base.strip("_") or "call"  # __matmul__ -> matmul
    path = make_unique_path(model, scope, f"{base}_" if iskeyword(base) else base, taken)
    if known is not None:
        call_module(model, node, path, (known.qmodule or Call)(node.target).train(model.training))
    taken.add(path)
    node.meta[_NAMED] = CallName(path, entry=known or UNKNOWN)
