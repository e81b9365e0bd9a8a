"""From a float module to a graph with names: tracing that reports the parts it cannot follow, and float rewrites.

tracer    torch.fx with our leaves; modules that fail become opaque
arguments defaults of arguments that are not passed
example   shapes and types while tracing
attention torch's transformer modules as single products
simplify  in-place writes, identities, dropouts, unbind
fold      batch norms into the layer in front
names     every call a named module, every tensor a site
values    shapes and types, from an example
modules   modules, attributes and calls by their dotted paths
"""

# The tracer knows nothing of quantizers; `quant_model` places them on the graph that comes out.
from torch_frontend.tracing.arguments import find_given_arguments
from torch_frontend.tracing.attention import take_apart
from torch_frontend.tracing.fold import compute_factors, fold_batch_norms, fold_layer
from torch_frontend.tracing.modules import find_module, read_attribute, replace_module, run_call, split_path
from torch_frontend.tracing.names import (
    CallName,
    element_of,
    is_constant,
    is_plain,
    make_unique_path,
    name_calls,
    read_name,
    scope_of,
    site_of,
)
from torch_frontend.tracing.simplify import simplify_graph
from torch_frontend.tracing.tracer import Traced, Untraceable, trace_model
from torch_frontend.tracing.values import (
    as_inputs,
    bind_inputs,
    compute_constant,
    has_shapes,
    is_float,
    record_shapes,
    shape_of,
    use_eval_mode,
)

__all__ = [
    "CallName",
    "Traced",
    "Untraceable",
    "as_inputs",
    "bind_inputs",
    "compute_constant",
    "compute_factors",
    "element_of",
    "find_given_arguments",
    "find_module",
    "fold_batch_norms",
    "fold_layer",
    "has_shapes",
    "is_constant",
    "is_float",
    "is_plain",
    "make_unique_path",
    "name_calls",
    "read_attribute",
    "read_name",
    "record_shapes",
    "replace_module",
    "run_call",
    "scope_of",
    "shape_of",
    "simplify_graph",
    "site_of",
    "split_path",
    "take_apart",
    "trace_model",
    "use_eval_mode",
]
